"""Rewards of what an episode earned, of what its tests or people found, of a command, of an answer, of nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.types import Node, Score, StopReason, StrategySpec, Task, Trajectory
from openhands_rl_plugin.evals.runs.evaluate import report_of, with_verdict
from openhands_rl_plugin.evals.swe.instances import PatchVerdict, VerdictKind
from openhands_rl_plugin.rewards.command import CommandOptions, CommandReward
from openhands_rl_plugin.rewards.matching import MatchingOptions, MatchingReward
from openhands_rl_plugin.rewards.outcome import (
    BonusOptions,
    RecordedReward,
    ReturnReward,
    SuccessBonusReward,
    SuccessOptions,
    SuccessReward,
)
from openhands_rl_plugin.rollout.scoring import known_score
from openhands_rl_plugin.testing import check_reward, example_trajectory


def with_rewards(*rewards: float | None, stop: StopReason = StopReason.MAX_TURNS) -> Trajectory:
    """The example with its executed actions' rewards replaced (and as many of them as rewards are given)."""
    example = example_trajectory(1)
    opening, action, state = example.nodes[0], example.nodes[1], example.nodes[3]
    nodes: list[Node] = [opening]
    for reward in rewards:
        nodes.append(action.model_copy(update={"parent": len(nodes) - 1, "reward": reward}))
        if reward is not None:
            nodes.append(state.model_copy(update={"parent": len(nodes) - 1}))
    return example.model_copy(update={"nodes": tuple(nodes), "head": len(nodes) - 1, "stop": stop})


async def test_they_keep_the_rules_of_rewards() -> None:
    for reward in (ReturnReward(), SuccessReward(), SuccessReward(SuccessOptions(threshold=0.5)), RecordedReward()):
        await check_reward(reward, [example_trajectory(at) for at in range(3)])
    await check_reward(PASSES, [ran(), ran(exit_code=2)])
    await check_reward(MatchingReward(), [answered("3", "3", at) for at in range(3)])
    for reward in (MatchingReward(), PASSES, ReturnReward()):
        with pytest.raises(GraderError, match="failed"):
            await reward(example_trajectory(3))


@pytest.mark.parametrize(
    ("rewards", "threshold", "expected"),
    [((0.99,), 1.0, 0.0), ((1.0,), 1.0, 1.0), ((0.1,) * 10, 1.0, 1.0), ((0.4, 0.1), 0.5, 1.0), ((-1.0,), 0.0, 0.0)],
)
async def test_success_is_reaching_the_threshold(rewards: tuple[float, ...], threshold: float, expected: float):
    score = await SuccessReward(SuccessOptions(threshold=threshold))(with_rewards(*rewards))
    assert score.reward == expected


@pytest.mark.parametrize("reward", [ReturnReward(), SuccessReward(SuccessOptions(threshold=0.0))])
@pytest.mark.parametrize(
    ("trajectory", "reason"),
    [
        (example_trajectory(3), "failed .infrastructure.: the server went away"),
        (with_rewards(stop=StopReason.TIMEOUT), "no executed action .timeout."),
        (with_rewards(0.5, None, stop=StopReason.TIMEOUT), "an action that got no answer .timeout."),
    ],
    ids=["failed", "nothing executed", "no answer"],
)
async def test_what_cannot_be_judged_gets_no_number(
    reward: ReturnReward | SuccessReward, trajectory: Trajectory, reason: str
):
    with pytest.raises(GraderError, match=reason):
        await reward(trajectory)


async def test_the_success_bonus_lifts_only_what_reaches_the_threshold() -> None:
    trajectory = example_trajectory().model_copy(update={"failure": None})
    total = (await ReturnReward()(trajectory)).reward
    assert total is not None
    reached = await SuccessBonusReward(BonusOptions(threshold=total, share=0.25))(trajectory)
    missed = await SuccessBonusReward(BonusOptions(threshold=total + 1, share=0.25))(trajectory)
    assert reached.reward == pytest.approx(0.75 * total + 0.25)
    assert missed.reward == pytest.approx(0.75 * total)
    assert reached.reward_version != missed.reward_version


def score(version: str, reward: float | None) -> Score:
    return Score(trajectory_id="x", reward=reward, reward_version=version)


def session(**changes: object) -> Trajectory:
    """An ordinary run in a workspace: every step was answered but the last one, ``finish``."""
    made = example_trajectory()
    last = max(made.path(), key=lambda at: made.nodes[at].sampled * at)
    nodes: list[Node] = []
    for at, node in enumerate(made.nodes[: last + 1]):
        reward = 0.0 if node.sampled and at != last else None
        nodes.append(node.model_copy(update={"reward": reward}))
    update = {"task": Task(id="s", environment="workspace"), "nodes": tuple(nodes), "head": last, "evidence": {}}
    return made.model_copy(update=update | changes)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([], None),
        ([score("tests-1", 1.0)], 1.0),
        ([score("tests-1", 1.0), score("verifier-1@a", 0.1)], 1.0),
        ([score("tests-1", 1.0), score("verdict-1", 0.0), score("verdict-1", None)], 1.0),
        ([score("verifier-1@a", 0.9)], None),
    ],
)
def test_the_newest_judgement_of_the_outcome(scores: list[Score], expected: float | None) -> None:
    newest = newest_outcome(scores)
    assert (newest and newest.reward) == expected
    known = known_score(RecordedReward(), session(), scores)
    assert (known and known.reward) == expected


async def test_an_ordinary_run_that_nobody_judged_has_no_reward_and_names_the_remedy() -> None:
    run = session()
    assert run.known_return is None
    assert session(task=Task(id="x", environment="swe"), evidence={"git_patch": ""}).known_return is None
    for reward in (RecordedReward(), ReturnReward(), SuccessReward()):
        with pytest.raises(GraderError, match="say one: openhands-rl score STORE --id ID --value 1"):
            await reward(run)
        assert known_score(reward, run, ()) is None


def test_a_given_reward_is_the_return_where_the_environment_has_none() -> None:
    kept = [score("gateway-1", 0.7)]
    assert known_score(ReturnReward(), session(), kept) == Score(
        trajectory_id=session().id, reward=0.7, detail={"judged_by": "gateway-1"}, reward_version="return-1"
    )
    success = known_score(SuccessReward(SuccessOptions(threshold=0.5)), session(), kept)
    assert success is not None and success.reward == 1.0
    assert known_score(ReturnReward(), example_trajectory(), kept) is None, "there the environment's rewards decide"
    assert known_score(RecordedReward(), example_trajectory(3), [score("tests-1", 1.0)]) is None, "it failed"


def judged(kind: VerdictKind) -> Trajectory:
    verdict = PatchVerdict(instance_id="a", kind=kind, reason="why")
    return with_verdict(example_trajectory().model_copy(update={"evidence": {"git_patch": "diff"}}), verdict)


@pytest.mark.parametrize(
    ("kind", "reward", "expected"),
    [
        (VerdictKind.RESOLVED, 1.0, "resolved"),
        (VerdictKind.UNRESOLVED, 0.0, None),
        (VerdictKind.UNAPPLIED, 0.0, "failed_apply_patch"),
        (VerdictKind.TIMED_OUT, 0.0, "test_timeout"),
    ],
)
async def test_a_verdict_is_a_reward(kind: VerdictKind, reward: float, expected: str | None):
    score = await build("rewards", "tests")(judged(kind))
    assert (score.reward, score.detail["resolved"]) == (reward, reward == 1.0)
    assert PatchVerdict.model_validate(score.detail["verdict"]).kind is kind
    assert {name for name, value in report_of(PatchVerdict(instance_id="a", kind=kind)).items() if value} == (
        {expected} if expected else set()
    )


async def test_what_was_not_tested_has_no_reward():
    with pytest.raises(GraderError, match="could not be run"):
        await build("rewards", "tests")(judged(VerdictKind.INFRASTRUCTURE))
    with pytest.raises(GraderError, match="grade it first"):
        await build("rewards", "tests")(example_trajectory())


@pytest.mark.parametrize("origin", ["gateway", "imported"])
async def test_what_a_client_or_a_file_claims_proves_nothing(origin: str):
    command = {"command": "true", "exit_code": 0}
    evidence = {"test_result": {"report": {"resolved": True}}, "command": command, "answer": "4", "label": "4"}
    judged = example_trajectory().model_copy(update={"evidence": evidence, "strategy": StrategySpec(name=origin)})
    for reward in (
        build("rewards", "tests"),
        build("rewards", "matching"),
        CommandReward(CommandOptions(command="true")),
    ):
        assert (await reward(judged.model_copy(update={"strategy": StrategySpec(name="StandardReAct")}))).reward == 1.0
        with pytest.raises(GraderError, match="take --reward recorded"):
            await reward(judged)


PASSES = CommandReward(CommandOptions(command="pytest -q"))
COUNTS = CommandReward(CommandOptions(command="pytest -q", result="last-line"))


def ran(command: str = "pytest -q", **result: object) -> Trajectory:
    result_fields = {"command": command, "exit_code": 0, **result}
    return example_trajectory().model_copy(update={"evidence": {"command": result_fields}})


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
    ],
)
async def test_what_was_not_run_gets_no_number(trajectory: Trajectory, reason: str) -> None:
    with pytest.raises(GraderError, match=reason):
        await PASSES(trajectory)


def test_another_reading_of_a_command_gives_other_scores() -> None:
    others = ({"command": "make check"}, {"protected": ("tests",)}, {"result": "last-line"}, {"most": 2.0})
    made = [CommandReward(CommandOptions.model_validate({"command": "pytest -q", **other})) for other in others]
    assert len({PASSES.version, *(each.version for each in made)}) == 5
    assert CommandReward(CommandOptions(command="pytest -q", timeout=5)).version == PASSES.version
    with pytest.raises(ValidationError, match="least must be below most"):
        CommandOptions(command="x", least=1.0)


def answered(answer: Any, label: Any, at: int = 0) -> Any:
    return example_trajectory(at).model_copy(update={"evidence": {"answer": answer, "label": label}})


@pytest.mark.parametrize(
    ("mode", "answer", "label", "reward"),
    [
        ("exact", "Paris", "Paris", 1.0),
        ("exact", "paris", "Paris", 0.0),
        ("normalised", "  paris.\n", "Paris", 1.0),
        ("normalised", "\N{LATIN SMALL LIGATURE FI}ne", "Fine", 1.0),
        ("normalised", "-5", "5", 0.0),
        ("normalised", "London", ["Paris", "London"], 1.0),
        ("normalised", None, "42", 0.0),
        ("number", "17 and 25 make 42.", "42", 1.0),
        ("number", "It is 1,234.50", 1234.5, 1.0),
        ("number", "0.33333333", 1 / 3, 1.0),
        ("number", "between 3, 4, and .5", 0.5, 1.0),
    ],
)
async def test_what_matches(mode: Any, answer: Any, label: Any, reward: float) -> None:
    score = await MatchingReward(MatchingOptions(mode=mode))(answered(answer, label))
    assert score.reward == reward and score.detail == {"answered": answer is not None}


@pytest.mark.parametrize("label", [None, [], [None], True, {"a": 1}])
async def test_without_a_label_there_is_no_score(label: Any) -> None:
    with pytest.raises(GraderError, match="has no label"):
        await MatchingReward()(answered("x", label))
