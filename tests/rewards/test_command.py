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


@pytest.mark.parametrize(("output", "expected"), [("2 of 4\n0.5\n", 0.5), ("-3\n\n", -3.0), ("1e-1", 0.1)])
async def test_the_number_that_it_prints_last(output: str, expected: float) -> None:
    assert (await COUNTS(ran(output=output, exit_code=1))).reward == expected


@pytest.mark.parametrize(
    ("reward", "trajectory", "reason"),
    [
        (PASSES, example_trajectory(), "no command was run in their workspace"),
        (PASSES, ran("make check"), "another command was run in their workspace, which is gone: 'make check'"),
        (PASSES, ran(error="the sandbox ended"), "could not be run: .the sandbox ended"),
        (PASSES, ran(exit_code=127, output="bash: pytest: command not found"), "pytest: command not found"),
        (COUNTS, ran(output="all good"), "printed no number on its last line, but 'all good'"),
        (COUNTS, ran(output="nan"), "printed no number"),
        (COUNTS, ran(output="1.0\n", timed_out=True, exit_code=None), "printed no number"),
        (PASSES, example_trajectory(3), "failed .infrastructure."),
    ],
)
async def test_what_is_not_known_gets_no_number(reward: CommandReward, trajectory: Trajectory, reason: str) -> None:
    with pytest.raises(GraderError, match=reason):
        await reward(trajectory)


async def test_it_keeps_the_rules_of_rewards() -> None:
    await check_reward(PASSES, [ran(), ran(exit_code=2)])
    versions = {PASSES.version, COUNTS.version, CommandReward(CommandOptions(command="make check")).version}
    assert len(versions) == 3, "another command or another reading gives other scores"
    assert CommandReward(CommandOptions(command="pytest -q", timeout=5)).version == PASSES.version
    with pytest.raises(ValidationError):
        CommandOptions(command="", timeout=0)
