"""The reward of a command that ran in the workspace: pass or fail, or a number; nothing where nothing is known."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.rewards.command import CommandOptions, CommandReward
from openhands_rl_plugin.testing import check_reward, example_trajectory

PASSES = CommandReward(CommandOptions(command="pytest -q"))
COUNTS = CommandReward(CommandOptions(command="pytest -q", result="last-line"))


def ran(command: str = "pytest -q", **result: object) -> Trajectory:
    told = {"command": command, "exit_code": 0, **result}
    return example_trajectory().model_copy(update={"evidence": {"command": told}})


@pytest.mark.parametrize(
    ("result", "expected"),
    [({}, 1.0), ({"exit_code": 1}, 0.0), ({"exit_code": -9}, 0.0), ({"exit_code": None, "timed_out": True}, 0.0)],
)
async def test_it_passes_when_the_command_does(result: dict[str, object], expected: float) -> None:
    score = await PASSES(ran(**result))
    assert score.reward == expected and score.reward_version == PASSES.version


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"exit_code": 127, "output": "bash: pytest: command not found"}, "pytest: command not found"),
        ({"exit_code": 126}, "could not run"),
        ({"exit_code": None, "prevented": "the sandbox ended"}, "the sandbox ended"),
    ],
)
async def test_what_keeps_it_from_a_result_is_worth_the_least(result: dict[str, object], why: str) -> None:
    for reward in (PASSES, COUNTS):
        score = await reward(ran(**result))
        assert score.reward == 0.0 and why in str(score.detail["refused"])


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"output": "2 of 4\n0.5\n"}, 0.5),
        ({"output": "1e-1"}, 0.1),
        *(({"output": text}, None) for text in ("-3\n\n", "1.01", "1e999", "nan", "all good", "")),
        ({"output": "1.0\n", "timed_out": True, "exit_code": None}, None),
    ],
)
async def test_the_number_that_it_prints_last_is_in_the_range(
    result: dict[str, object], expected: float | None
) -> None:
    score = await COUNTS(ran(exit_code=1, **result) if "exit_code" not in result else ran(**result))
    assert score.reward == (expected or 0.0) and ("refused" in score.detail) == (expected is None)


@pytest.mark.parametrize(
    ("trajectory", "reason"),
    [
        (example_trajectory(), "no command was run in their workspace"),
        (ran("make check"), "another command was run in their workspace, which is gone: 'make check'"),
        (ran(protected=["tests"]), "another command was run in their workspace"),
        (ran(error="the sandbox ended"), "could not be run: .the sandbox ended"),
        (example_trajectory(3), "failed .infrastructure."),
    ],
)
async def test_what_was_not_run_gets_no_number(trajectory: Trajectory, reason: str) -> None:
    with pytest.raises(GraderError, match=reason):
        await PASSES(trajectory)


async def test_it_keeps_the_rules_of_rewards() -> None:
    await check_reward(PASSES, [ran(), ran(exit_code=2)])
    others = ({"command": "make check"}, {"protected": ("tests",)}, {"result": "last-line"}, {"most": 2.0})
    made = [CommandReward(CommandOptions.model_validate({"command": "pytest -q", **other})) for other in others]
    assert len({PASSES.version, *(each.version for each in made)}) == 5, "another reading gives other scores"
    assert CommandReward(CommandOptions(command="pytest -q", timeout=5)).version == PASSES.version
    with pytest.raises(ValidationError):
        CommandOptions(command="", timeout=0)
    with pytest.raises(ValidationError, match="least must be below most"):
        CommandOptions(command="x", least=1.0)
