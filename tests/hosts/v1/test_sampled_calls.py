"""Arguments of any form that a model may sample: they are replayed as sampled, and nothing else is changed."""

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_model import ScriptedModel, call, says
from sdk_play import converse, finish, make_agent, make_llm, stored

from openhands_rl_plugin.core.messages import WireMessage, to_wire
from openhands_rl_plugin.core.types import Message, ToolCall
from openhands_rl_plugin.session.session import SampledTexts

pytestmark = pytest.mark.contract

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def written(draw: st.DrawFn, value: st.SearchStrategy[Any]) -> str:
    """A value as some model or other writes it."""
    spaced = draw(st.sampled_from([None, (",", ":"), (" , ", " : ")]))
    text = json.dumps(
        draw(value), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2])), separators=spaced
    )
    return draw(st.sampled_from(["", " ", "\n"])) + text + draw(st.sampled_from(["", " ", "\n\n"]))


OBJECTS = written(st.dictionaries(TEXT, JSON, max_size=4))
OTHERS = TEXT.filter(lambda text: not text.strip().startswith("{")) | written(
    JSON.filter(lambda value: not isinstance(value, dict))
)
THOUGHTS = written(
    st.fixed_dictionaries({"thought": TEXT | st.lists(TEXT).map(json.dumps)}, optional={"summary": TEXT})
)


def saying(arguments: str, id: str) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id=id, name="think", arguments=arguments),))


def arguments_in(messages: list[WireMessage]) -> list[str]:
    return [one["function"]["arguments"] for message in messages for one in message.get("tool_calls") or ()]


@given(st.lists(OBJECTS | OTHERS, max_size=8))
def test_only_calls_whose_arguments_are_objects_are_put_back(sampled: list[str]) -> None:
    """Ids may be used again."""
    path = [saying(arguments, "a") for arguments in sampled]  # with the arguments as the value reads them: {} for none
    given = [message.tool_calls[0].arguments for message in path]
    repaired = [f'{{"repaired": {number}}}' for number in range(len(path))]
    replayed = [to_wire(saying(arguments, "a")) for arguments in repaired]
    before = copy.deepcopy(replayed)
    expected = [own if _is_object(own) else other for own, other in zip(given, repaired, strict=True)]
    assert arguments_in(SampledTexts().put_back(replayed, path)) == expected
    assert replayed == before


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(THOUGHTS, min_size=1, max_size=8))
def test_the_prompts_of_a_conversation_extend_each_other(server: ScriptedModel, sampled: list[str]) -> None:
    name = "forms"
    answers = [says(None, call("think", arguments, f"call-{at}")) for at, arguments in enumerate(sampled)]
    server.script(name, [*answers, finish()])
    with tempfile.TemporaryDirectory() as made:
        store, workspace = Path(made) / "store", Path(made) / "w"
        workspace.mkdir()
        conversation = converse(make_agent(make_llm(server, name), store, tools=()), workspace)
        conversation.send_message("Think.")
        conversation.run()
        conversation.close()
        [episode] = asyncio.run(stored(store))
    acted = [node for node in episode.nodes if node.sampled]
    assert [node.message.tool_calls[0].arguments for node in acted[:-1]] == sampled
    assert [node.tokens.extends for node in acted if node.tokens] == [False, *(True for _ in sampled)]
    last = server.requests[name][-1]["messages"]
    replayed = [message["tool_calls"][0] for message in last if message.get("tool_calls")]
    assert [one["function"]["arguments"] for one in replayed] == sampled


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
