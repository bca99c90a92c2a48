"""Which stored episodes an algorithm learns from, in which pairs, and as what the others are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from credited_episodes import episode, settings
from searched_episode import searched
from stored_samples import trajectory

from openhands_rl_plugin.core.records import SUB_AGENT, TrajectoryFilter, sub_agents_run
from openhands_rl_plugin.core.redaction import redact_trajectory
from openhands_rl_plugin.core.types import (
    Message,
    PolicyRef,
    SamplingParams,
    Score,
    StopReason,
    StrategySpec,
    Task,
    Trajectory,
)
from openhands_rl_plugin.rollout.scoring import rescore
from openhands_rl_plugin.training.algorithms import samples_of
from openhands_rl_plugin.training.data.dataset import (
    Episodes,
    TrainingDataset,
    causes_of,
    nothing_learnt,
    preference_pairs,
    select_for_sft,
)
from openhands_rl_plugin.training.learn import build_dataset, load_episodes
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

COMPARING = ("dpo", "grpo", "reinforce++", "reinforce++-baseline", "rloo")


def graded(number: int, *rewards: float, stop: StopReason = StopReason.TERMINATED) -> Trajectory:
    task = Task(id="task", environment="shop")
    return episode(number, *rewards, stop=stop).model_copy(update={"task": task})


def made(algorithm: str, *trajectories: Trajectory, **changes: object) -> TrainingDataset:
    returns = tuple(each.episode_return for each in trajectories)
    return build_dataset(Episodes(trajectories, returns), settings(algorithm=algorithm, **changes))


def ids(dataset: TrainingDataset) -> set[str]:
    return {sample.trajectory_id for sample in dataset.samples}


def cut_by_length(trajectory: Trajectory) -> Trajectory:
    """Its last answer ended at ``max_tokens``, and the environment went by what there was of it."""
    nodes = list(trajectory.nodes)
    nodes[-1] = nodes[-1].model_copy(update={"finish_reason": "length"})
    return trajectory.model_copy(update={"nodes": tuple(nodes)})


@pytest.mark.parametrize("algorithm", [*COMPARING, "sft", "rejection-sampling"])
def test_an_episode_that_was_cut_short_is_counted_and_not_compared(algorithm: str) -> None:
    late = graded(2, 2.0, stop=StopReason.TIMEOUT)
    dataset = made(algorithm, graded(0, 1.0), graded(1, 0.5), late, graded(3, 1.0, stop=StopReason.UNFINISHED))
    if algorithm in COMPARING:
        assert (ids(dataset), dataset.excluded) == ({"0", "1"}, Counter(unfinished=2))
    else:
        assert "2" in ids(dataset) and dataset.excluded["unfinished"] == 1, "it succeeded before its time was up"
    limits = (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.TRUNCATED)
    for long in (*(graded(2, 2.0, stop=stop) for stop in limits), cut_by_length(graded(2, 2.0))):
        left_out = made(algorithm, graded(0, 1.0), graded(1, 0.5), long, overlong="leave-out")
        assert "2" not in ids(left_out) and left_out.excluded["overlong"] == 1
        kept = made(algorithm, graded(0, 1.0), graded(1, 0.5), long)
        assert "2" in ids(kept) and kept.used + kept.excluded["no_signal"] == 3 and not kept.excluded["overlong"]


SECRET = "api_key = " + '"' + "Zk39slQ2x7Lm4#" + '"'


def test_what_was_sampled_before_a_secret_is_trained() -> None:
    whole = [trajectory(f"{number}", reward=float(number % 2), turns=4) for number in range(4)]
    nodes = list(whole[1].nodes)
    hidden = next(at for at, node in enumerate(nodes) if at > 3 and not node.sampled)
    nodes[hidden] = nodes[hidden].model_copy(update={"message": Message(role="user", content=SECRET)})
    dirty = redact_trajectory(whole[1].model_copy(update={"nodes": tuple(nodes)}))
    assert any(node.sampled and node.tokens is None for node in dirty.nodes)
    dataset = made("grpo", whole[0], dirty, *whole[2:])
    assert "1" in ids(dataset) and dataset.excluded == Counter(shortened=1)
    kept = sum(sum(sample.mask) for sample in dataset.samples if sample.trajectory_id == "1")
    before = [node for node in whole[1].nodes[:hidden] if node.sampled and node.tokens]
    assert kept == sum(len(node.tokens.sampled_ids) for node in before if node.tokens) > 0
    compared = made("dpo", whole[0], dirty, *whole[2:])
    assert compared.excluded["no_tokens"] == 1, "a preference compares whole episodes"


def sampled(trajectory: Trajectory, asked: SamplingParams | None, *, last: bool = False) -> Trajectory:
    """The episode with all its answers (or only its ``last`` one) sampled as asked."""
    answers = [at for at, node in enumerate(trajectory.nodes) if node.sampled]
    nodes = list(trajectory.nodes)
    for at in answers[-1:] if last else answers:
        nodes[at] = nodes[at].model_copy(update={"sampling": asked})
    return trajectory.model_copy(update={"nodes": tuple(nodes)})


@pytest.mark.parametrize(
    ("asked", "how"),
    [
        (SamplingParams(temperature=1.0, top_p=0.9), "top_p = 0.9"),
        (SamplingParams(temperature=0.0), "temperature = 0"),
        (SamplingParams(temperature=0.7, top_k=20, min_p=0.0), "temperature = 0.7, top_k = 20"),
        (SamplingParams(min_p=0.05), "min_p = 0.05"),
        (SamplingParams(repetition_penalty=1.05, top_k=-1), "repetition_penalty = 1.05"),
        (SamplingParams(presence_penalty=-0.5), "presence_penalty = -0.5"),
        (SamplingParams(frequency_penalty=0.1), "frequency_penalty = 0.1"),
    ],
)
def test_what_was_sampled_from_another_distribution_is_not_reinforced(asked: SamplingParams, how: str) -> None:
    plain = [graded(0, 1.0), graded(1, 0.5)]
    for other in (sampled(graded(2, 0.0), asked), sampled(graded(2, 0.0, 0.0), asked, last=True)):
        dataset = made("grpo", *plain, other)
        assert (ids(dataset), dataset.excluded) == ({"0", "1"}, Counter({f"off_temperature: {how}": 1}))
        assert how in nothing_learnt(settings(algorithm="grpo"), dataset.excluded)
        assert ids(made("sft", *plain, other)) == {"0", "1"}
    assert made("dpo", *(sampled(each, asked) for each in plain)).used == 2


def test_what_was_sampled_at_another_temperature_is_reinforced_at_that_one() -> None:
    half = SamplingParams(temperature=0.5)
    dataset = made("grpo", *(sampled(graded(number, float(number)), half) for number in range(2)))
    assert (dataset.used, dataset.excluded) == (2, Counter())
    assert {sample.temperature for sample in dataset.samples} == {0.5}
    (sample,) = samples_of(sampled(episode(2, 0.0, 1.0), half, last=True))
    trained = [at for at, own in enumerate(sample.mask) if own]
    assert sample.temperature_at(trained[0]) == 1.0 and sample.temperature_at(trained[-1]) == 0.5


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_what_another_strategy_rolled_out_is_not_compared(algorithm: str) -> None:
    names = ("MCTS", "ReAct", "MCTS")
    of_strategies = [
        graded(number, float(number)).model_copy(update={"strategy": StrategySpec(name=name)})
        for number, name in enumerate(names)
    ]
    assert made(algorithm, *of_strategies[:2]).excluded == Counter(no_signal=2)
    assert ids(made(algorithm, *of_strategies)) == {"0", "2"}


EPISODES = [episode(0, 1.0), episode(1, 1.0), episode(2, 0.0), episode(3, 0.5, group="b"), episode(4, 0.2, group="b")]
REWARDS = [1.0, 1.0, 0.0, 0.5, 0.2]


def test_all_successes_are_imitated_or_the_best_of_a_task() -> None:
    assert select_for_sft(EPISODES, REWARDS, settings(algorithm="sft")) == (0, 1, 3, 4)
    assert select_for_sft(EPISODES, REWARDS, settings(algorithm="sft", imitate_above=0.5)) == (0, 1)
    best = settings(algorithm="rejection-sampling")
    assert select_for_sft(EPISODES, REWARDS, best) == (0, 3), "the shorter one of two equally good ones"
    assert select_for_sft(EPISODES, REWARDS, best.model_copy(update={"keep_best": 2})) == (0, 1, 3, 4)


def test_the_best_is_paired_with_the_worst_after_what_people_preferred() -> None:
    chosen = settings(algorithm="dpo")

    def names(*arguments: object) -> list[tuple[str, str]]:
        pairs = preference_pairs(*arguments)  # type: ignore[arg-type]
        return [(pair.chosen[0].trajectory_id, pair.rejected[0].trajectory_id) for pair in pairs]

    assert names(EPISODES, REWARDS, chosen) == [("0", "2"), ("3", "4")]
    assert names(EPISODES[:2], REWARDS[:2], chosen) == [], "equally good"
    five = [episode(number, float(number)) for number in range(5)]
    assert names(five, [float(number) for number in range(5)], chosen) == [("4", "0"), ("3", "1")]
    preferred = {frozenset(("0", "2")): "2", frozenset(("1", "4")): "1", frozenset(("3", "4")): None}
    assert names(EPISODES, REWARDS, chosen, preferred) == [("2", "0"), ("1", "4")], "nothing where neither is better"
    assert names(EPISODES[:3], [None, None, None], chosen, preferred) == [("2", "0")]


async def test_siblings_of_a_tree_are_pairs_with_one_context() -> None:
    trajectory = await searched()
    pairs = preference_pairs([trajectory], [1.0], settings(algorithm="dpo", tree="proposals"))
    assert pairs
    for pair in pairs:
        (better,), (worse,) = pair.chosen, pair.rejected
        start = better.mask.index(True)
        assert worse.mask.index(True) == start and better.input_ids[:start] == worse.input_ids[:start]
        assert sum(better.mask) == len(better.mask) - start, "one action alone is trained"
        assert better.input_ids[start:] != worse.input_ids[start:]
    assert preference_pairs([trajectory], [1.0], settings(algorithm="dpo")) == []


class Opinion:
    version = "verifier-1@abc"

    async def __call__(self, trajectory: Trajectory) -> Score:
        return Score(trajectory_id=trajectory.id, reward=0.02, reward_version=self.version)


def score(version: str, reward: float | None, name: str = "0") -> Score:
    return Score(trajectory_id=name, reward=reward, reward_version=version)


def imported() -> Trajectory:
    one = episode(0, 0.0).model_copy(update={"strategy": StrategySpec(name="imported")})
    return one.model_copy(
        update={"nodes": tuple(node.model_copy(update={"tokens": None, "reward": None}) for node in one.nodes)}
    )


@pytest.mark.parametrize(
    ("scores", "presume", "expected"),
    [
        ([score("verifier-1@abc", 0.02)], True, 0.02),
        ([score("imported-1", 0.0), score("verifier-1@abc", 0.02)], True, 0.02),
        ([score("verdict-1", 0.0), score("verdict-1", None)], True, 0.02),
        ([score("imported-1", 0.0)], True, 0.0),
        ([], True, 1.0),
        ([], False, 0.02),
    ],
)
async def test_an_import_is_worth_its_newest_judgement(
    scores: Sequence[Score], presume: bool, expected: float, tmp_path: Path
) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        await storage.add(imported())
        await storage.add_scores(scores)
        where = {"base_model": "m", "adapter": "z", "demonstrations": True, "presume": presume}
        loaded = await load_episodes(storage, TrajectoryFilter(), reward=Opinion(), **where)  # type: ignore[arg-type]
    assert loaded.rewards == (expected,)
    assert any("judged by nobody" in cause for cause in causes_of(loaded.excluded)) == (presume and not scores)


async def test_a_sub_agent_is_trained_on_only_where_somebody_scored_it(tmp_path: Path) -> None:
    """A reward that is made for the parent's task does not judge the sub-agent's."""
    policy = PolicyRef(base_model="m")
    task = Task(id="s", environment="swe", data={SUB_AGENT: {"parent": "0", "kind": "researcher"}})
    of_run = {"policy": policy, "task": task, "run_id": sub_agents_run("r")}
    begun = [episode(number, 0.0).model_copy(update={**of_run, "group_id": f"{number}"}) for number in (1, 2)]
    async with FileTrajectoryStorage(tmp_path) as storage:
        for each in (episode(0, 0.0).model_copy(update={"policy": policy}), *begun):
            await storage.add(each)
        await storage.add_scores([score("verifier-1@abc", 0.7, "2")])
        report = await rescore(storage, Opinion(), sub_agents=False)
        assert (report.scored, report.already_scored) == (1, 1)
        loaded = await load_episodes(storage, TrajectoryFilter(), base_model="m", adapter="z", reward=Opinion())
        assert [each.id for each in loaded.trajectories] == ["0", "2"] and loaded.rewards == (0.02, 0.7)
        assert loaded.excluded == Counter(sub_agents=1)
        assert (await rescore(storage, Opinion())).scored == 1, "who asks for all of them gets them"
