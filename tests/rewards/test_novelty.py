"""The tests' verdict, and a bonus for a turn that showed something new."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.types import Message, Node, ToolCall, Trajectory
from openhands_rl_plugin.rewards.novelty import NoveltyOptions, NoveltyReward
from openhands_rl_plugin.testing import check_reward, example_trajectory

REWARD = NoveltyReward(NoveltyOptions(command="pytest -q"))
EDIT, OTHER = "<function=execute_bash>sed -i 3s/a/b/ x.py", "<function=execute_bash>sed -i 3s/a/c/ x.py"
FAILS = "1 failed, 3 passed in 0.02s\n[Command finished with exit code 1]"
FAILS_MORE = "2 failed, 2 passed in 0.02s\n[Command finished with exit code 1]"
BROKEN = "sed: -e expression #1\n[Command finished with exit code 1]"


def played(*turns: str | Message, passes: bool = False) -> Trajectory:
    """Answers of the policy and what they saw, in turn; the last may have seen nothing yet."""
    nodes = [Node(parent=None, message=Message(role="user", content="Repair it."))]
    for number, turn in enumerate(turns):
        sampled = number % 2 == 0
        text = turn if isinstance(turn, Message) else Message(role="assistant" if sampled else "user", content=turn)
        nodes.append(Node(parent=number, message=text, sampled=sampled))
    evidence = {"command": {"command": "pytest -q", "exit_code": 0 if passes else 1}}
    changed = {"nodes": tuple(nodes), "head": len(nodes) - 1, "evidence": evidence}
    return example_trajectory().model_copy(update=changed)


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ((EDIT, FAILS), 0.2),
        ((EDIT, FAILS, OTHER, FAILS), 0.2),
        ((EDIT, FAILS, EDIT, FAILS_MORE), 0.2),
        ((EDIT, FAILS, OTHER, FAILS, f" {EDIT}\n", FAILS), 0.0),
        ((EDIT, BROKEN), 0.0),
        (("<function=execute_bash>cat x.py", "a = 1\n[The command completed with exit code 0.]"), 0.2),
        (("<function=str_replace_editor>view", "1: a = 1"), 0.2),
        (("<function=execute_bash>python3 -m unittest", "Ran 3 tests in 0.1s\n[exit code 1]"), 0.2),
        (("I cannot do it.", "Please continue working."), 0.0),
        ((EDIT, FAILS, "<function=finish>The tests pass."), 0.0),
        ((), 0.0),
    ],
)
async def test_what_shows_something_new_is_worth_more_while_tests_fail(turns: tuple[str, ...], expected: float) -> None:
    assert (await REWARD(played(*turns))).reward == expected
    assert (await REWARD(played(*turns, passes=True))).reward == 1.0, "that is worth most, however it came about"


async def test_calls_are_compared_without_their_ids() -> None:
    def call(identity: str, command: str) -> Message:
        return Message(role="assistant", tool_calls=(ToolCall(id=identity, name="bash", arguments=command),))

    assert (await REWARD(played(call("1", "a"), FAILS, call("2", "b"), FAILS))).reward == 0.2
    assert (await REWARD(played(call("1", "a"), FAILS, call("2", "a"), FAILS))).reward == 0.0


async def test_the_bonus_and_what_counts_as_shown_are_options() -> None:
    options = NoveltyOptions(command="pytest -q", novelty=0.4, shows="expression")
    other = NoveltyReward(options)
    assert (await other(played(EDIT, BROKEN))).reward == 0.4 and (await other(played(EDIT, FAILS))).reward == 0.0
    assert other.version != REWARD.version
    with pytest.raises(ValidationError, match="no regular expression"):
        NoveltyOptions(command="pytest -q", shows="(")
    with pytest.raises(GraderError, match="no command was run"):
        await REWARD(example_trajectory())
    await check_reward(REWARD, [played(EDIT, FAILS), played(EDIT, BROKEN)])
