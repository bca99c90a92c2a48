from __future__ import annotations

from typing import Any

import pytest
from exchange_samples import CODE, PROMPT, call, reply, result, score, trajectory

from openhands_rl_plugin.core.types import Message, ToolCall
from openhands_rl_plugin.trajectories.exchange.foreign import LeftOutError
from openhands_rl_plugin.trajectories.exchange.formats import FORMATS

text_rows: Any = FORMATS["sft-text"].rows


def test_a_row_is_what_swe_gym_publishes() -> None:
    episode = trajectory()
    (row,) = text_rows(episode, (score(episode, 0.75, resolved=True),))
    messages = row.pop("messages")
    assert row == {
        "trajectory_id": episode.id,
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


BOTH = reply(call("a", "finish"), call("b", "execute_bash", command="ls"))


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ((CODE[1], reply(ToolCall(id="x", name="execute_bash", arguments='{"comm'))), "not JSON"),
        (CODE[:2], "has no answer"),
        ((CODE[1], BOTH, result("b", "execute_bash", "x"), Message(role="user", content="go on")), "got no result"),
    ],
)
def test_an_episode_that_no_text_can_carry_is_left_out(messages: tuple[Message, ...], why: str) -> None:
    with pytest.raises(LeftOutError, match=why):
        list(text_rows(trajectory(messages), ()))
