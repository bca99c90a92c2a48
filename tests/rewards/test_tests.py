"""The reward that reads the report of tests."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.types import StrategySpec, Trajectory
from openhands_rl_plugin.evals.runs.runner import report_of, with_verdict
from openhands_rl_plugin.evals.swe.types import PatchVerdict, VerdictKind
from openhands_rl_plugin.rewards.command import CommandOptions, CommandReward
from openhands_rl_plugin.testing import example_trajectory


def judged(kind: VerdictKind) -> Trajectory:
    verdict = PatchVerdict(instance_id="a", kind=kind, reason="why")
    return with_verdict(example_trajectory().model_copy(update={"evidence": {"git_patch": "diff"}}), verdict)


@pytest.mark.parametrize(
    ("kind", "reward", "told"),
    [
        (VerdictKind.RESOLVED, 1.0, "resolved"),
        (VerdictKind.UNRESOLVED, 0.0, None),
        (VerdictKind.UNAPPLIED, 0.0, "failed_apply_patch"),
        (VerdictKind.TIMED_OUT, 0.0, "test_timeout"),
    ],
)
async def test_a_verdict_is_a_reward(kind: VerdictKind, reward: float, told: str | None):
    score = await build("rewards", "tests")(judged(kind))
    assert (score.reward, score.detail["resolved"]) == (reward, reward == 1.0)
    assert PatchVerdict.model_validate(score.detail["verdict"]).kind is kind
    assert {name for name, value in report_of(PatchVerdict(instance_id="a", kind=kind)).items() if value} == (
        {told} if told else set()
    )


async def test_what_was_not_tested_has_no_reward():
    with pytest.raises(GraderError, match="could not be run"):
        await build("rewards", "tests")(judged(VerdictKind.INFRASTRUCTURE))
    with pytest.raises(GraderError, match="grade it first"):
        await build("rewards", "tests")(example_trajectory())


@pytest.mark.parametrize("origin", ["gateway", "imported"])
async def test_what_a_client_or_a_file_says_proves_nothing(origin: str):
    command = {"command": "true", "exit_code": 0}
    evidence = {"test_result": {"report": {"resolved": True}}, "command": command, "answer": "4", "label": "4"}
    told = example_trajectory().model_copy(update={"evidence": evidence, "strategy": StrategySpec(name=origin)})
    for reward in (
        build("rewards", "tests"),
        build("rewards", "matching"),
        CommandReward(CommandOptions(command="true")),
    ):
        assert (await reward(told.model_copy(update={"strategy": StrategySpec(name="StandardReAct")}))).reward == 1.0
        with pytest.raises(GraderError, match="take --reward recorded"):
            await reward(told)
