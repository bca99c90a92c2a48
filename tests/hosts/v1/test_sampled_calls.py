"""Arguments of any form that a model may sample: they are replayed as sampled, and nothing else is changed."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_model import ScriptedModel, call, says
from sdk_play import finish, make_agent, make_llm, run_task, stored

pytestmark = pytest.mark.contract

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)


@st.composite
def written(draw: st.DrawFn, value: st.SearchStrategy[Any]) -> str:
    """A value as some model or other writes it."""
    spaced = draw(st.sampled_from([None, (",", ":"), (" , ", " : ")]))
    text = json.dumps(
        draw(value), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])), separators=spaced
    )
    return draw(st.sampled_from(["", " ", "\n"])) + text + draw(st.sampled_from(["", " ", "\n\n"]))


THOUGHTS = written(
    st.fixed_dictionaries({"thought": TEXT | st.lists(TEXT).map(json.dumps)}, optional={"summary": TEXT})
)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(THOUGHTS, min_size=1, max_size=8))
def test_the_prompts_of_a_conversation_extend_each_other(server: ScriptedModel, sampled: list[str]) -> None:
    name = "forms"
    answers = [says(None, call("think", arguments, f"call-{at}")) for at, arguments in enumerate(sampled)]
    server.script(name, [*answers, finish()])
    with tempfile.TemporaryDirectory() as made:
        store, workspace = Path(made) / "store", Path(made) / "w"
        workspace.mkdir()
        run_task(make_agent(make_llm(server, name), store, tools=()), workspace, task="Think.")
        [episode] = asyncio.run(stored(store))
    acted = [node for node in episode.nodes if node.sampled]
    assert [node.message.tool_calls[0].arguments for node in acted[:-1]] == sampled
    assert [node.tokens.extends for node in acted if node.tokens] == [False, *(True for _ in sampled)]
    last = server.requests[name][-1]["messages"]
    replayed = [message["tool_calls"][0] for message in last if message.get("tool_calls")]
    assert [one["function"]["arguments"] for one in replayed] == sampled
