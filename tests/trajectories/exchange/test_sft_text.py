from __future__ import annotations

import json
from typing import Any

import pytest
from exchange_samples import CODE, PROMPT, SYSTEM, TOOLS, call, said, score, told, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin.core.templates.function_text import calls_in_text
from openhands_rl_plugin.core.templates.text_form import system_prompt, text_messages
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError, Record, row_episode
from openhands_rl_plugin.trajectories.exchange.formats import FORMATS

text_rows: Any = FORMATS["sft-text"].rows


def test_the_system_prompt_is_that_of_the_published_rows() -> None:
    assert system_prompt(SYSTEM, TOOLS) == PROMPT
    assert len(PROMPT) == 4758


def test_a_row_is_what_swe_gym_publishes() -> None:
    played = trajectory()
    (row,) = text_rows(played, (score(played, 0.75, resolved=True),))
    messages = row.pop("messages")
    assert row == {
        "trajectory_id": played.id,
        "instance_id": "repo__repo-1",
        "run_id": "night-3",
        "model": "swe-v000007",
        "score": 0.75,
        "resolved": True,
    }
    assert isinstance(messages, list)
    contents = [(message["role"], message["content"]) for message in messages if isinstance(message, dict)]
    assert contents[:4] == [
        ("system", PROMPT),
        ("user", "Fix f.\n"),
        (
            "assistant",
            "First a look.\n\n<function=execute_bash>\n<parameter=command>\nls\n\n</parameter>\n</function>",
        ),
        ("user", "EXECUTION RESULT of [execute_bash]:\na.py\n[Command finished with exit code 0]"),
    ]
    # Two calls at once are two turns, and the last word is the assistant's.
    assert [role for role, _ in contents[1:]] == ["user", "assistant"] * 5
    assert contents[-1] == ("assistant", "<function=finish>\n</function>")


def test_a_row_reads_back_as_it_was_written() -> None:
    played = trajectory()
    (row,) = text_rows(played, (score(played, 1.0),))
    found = row_episode(record := Record(row), "sft-text", record.messages("messages"))
    (again,) = text_rows(found.trajectory, found.scores)
    assert again["messages"] == row["messages"] and [each.reward for each in found.scores] == [1.0]
    assert all(node.tokens is None for node in found.trajectory.nodes)
    assert found.trajectory.strategy.options == {"format": "sft-text", "tokens": None}
    assert found.trajectory.policy.base_model == "swe-v000007"


def test_observations_after_the_last_answer_are_no_part_of_a_row() -> None:
    played = trajectory((*CODE[:4],))
    (row,) = text_rows(played, ())
    assert isinstance(row["messages"], list) and len(row["messages"]) == 3


def test_an_episode_that_no_text_can_carry_is_left_out() -> None:
    with pytest.raises(LeftOutError, match="not JSON"):
        list(text_rows(trajectory((CODE[1], said(ToolCall(id="x", name="execute_bash", arguments='{"comm')))), ()))
    with pytest.raises(LeftOutError, match="has no answer"):
        list(text_rows(trajectory(CODE[:2]), ()))


def test_several_calls_need_all_their_results() -> None:
    both = said(call("a", "finish"), call("b", "execute_bash", command="ls"))
    for told_after in ((), (told("b", "execute_bash", "x"), Message(role="user", content="go on"))):
        with pytest.raises(LeftOutError, match="got no result"):
            list(text_rows(trajectory((CODE[1], both, *told_after)), ()))


_ODD = ["</parameter>", "</function>", "<parameter=x>", "\n", "  a\n b\n\n", "<json>1</json>", "None", "3"]
_CHARACTERS = st.characters(exclude_categories=("Cs",)) | st.sampled_from(list("\n\t <>/=`'\"\\\r"))
_TEXT = st.text(_CHARACTERS, max_size=40) | st.sampled_from(_ODD)
_NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)
_CALLS = st.one_of(
    st.builds(lambda value: ("execute_bash", {"command": value}), _TEXT),
    st.builds(
        lambda text, line, span: (
            "str_replace_editor",
            {"command": "insert", "path": "/a", "new_str": text, "insert_line": line, "view_range": span},
        ),
        _TEXT,
        st.integers(0, 99) | _JSON,
        st.lists(st.integers(-1, 99)) | _JSON,
    ),
    st.builds(lambda values: ("made_up", values), st.dictionaries(_TEXT, _JSON, max_size=3)),
    st.just(("finish", {})),
)


@settings(max_examples=300, deadline=None)
@given(_CALLS, _TEXT, _TEXT, st.booleans())
def test_no_call_is_changed_by_the_text_form(
    made: tuple[str, JsonObject], thought: str, result: str, with_tools: bool
) -> None:
    name, arguments = made
    tools = TOOLS if with_tools else ()
    # A thought that itself looks like a call cannot be told from one.
    thought = thought.replace("<", "").replace(">", "")
    messages = (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Go."),
        said(ToolCall(id="toolu_01", name=name, arguments=json.dumps(arguments)), text=thought or None),
        told("toolu_01", name, result),
        said(text="Done."),
    )
    rendered = [*text_messages(messages, tools)]
    (made_again,) = calls_in_text(str(rendered[2]["content"]), tools)
    assert (made_again.name, json.loads(made_again.arguments)) == (name, arguments)
    assert str(rendered[2]["content"]).startswith(thought)
    assert rendered[3]["content"] == f"EXECUTION RESULT of [{name}]:\n{result}"
