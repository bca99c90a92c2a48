"""Which stored episodes an algorithm learns from, and as what the others are counted."""

from __future__ import annotations

import re

import pytest
from credited_episodes import episode, settings
from stored_samples import trajectory

from openhands_rl_plugin.config.training import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.redaction import redact_trajectory
from openhands_rl_plugin.core.types import Message, SamplingParams, StopReason, StrategySpec, Task, Trajectory
from openhands_rl_plugin.training.data.batch import samples_of
from openhands_rl_plugin.training.data.dataset import (
    Episodes,
    ExcludedEpisodes,
    TrainingDataset,
    build_dataset,
    build_dataset_or_sft,
)

REINFORCING = ("grpo", "reinforce++", "reinforce++-baseline", "rloo")
COMPARING = ("dpo", *REINFORCING)


def played(number: int, reward: float, stop: StopReason = StopReason.TERMINATED) -> Trajectory:
    task = Task(id="task", environment="shop")
    return episode(number, reward, stop=stop).model_copy(update={"task": task})


def stored(*trajectories: Trajectory) -> Episodes:
    returns = tuple(trajectory.episode_return for trajectory in trajectories)
    return Episodes(trajectories, returns, ExcludedEpisodes())


def ids(dataset: TrainingDataset) -> set[str]:
    return {sample.trajectory_id for sample in dataset.samples}


@pytest.mark.parametrize("algorithm", COMPARING)
def test_an_episode_that_ran_out_of_time_is_compared_with_none(algorithm: str) -> None:
    episodes = stored(played(0, 1.0), played(1, 0.5), played(2, 0.0, StopReason.TIMEOUT))
    dataset = build_dataset(episodes, settings(algorithm=algorithm))
    assert (dataset.used, dataset.excluded) == (2, ExcludedEpisodes(unfinished=1))
    assert ids(dataset) == {"0", "1"}
    alone = build_dataset(stored(played(0, 1.0), played(2, 0.0, StopReason.TIMEOUT)), settings(algorithm="dpo"))
    assert (alone.used, alone.excluded) == (0, ExcludedEpisodes(unfinished=1, no_signal=1))


def cut_by_length(trajectory: Trajectory) -> Trajectory:
    """Its last answer ended at ``max_tokens``, and the environment went by what there was of it."""
    nodes = list(trajectory.nodes)
    at = trajectory.acted()[-1]
    nodes[at] = nodes[at].model_copy(update={"finish_reason": "length"})
    return trajectory.model_copy(update={"nodes": tuple(nodes)})


@pytest.mark.parametrize("stop", [StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.TRUNCATED, "length"])
@pytest.mark.parametrize("algorithm", [*COMPARING, "sft", "rejection-sampling"])
def test_what_a_limit_cut_short_is_left_out_of_every_algorithm(algorithm: str, stop: StopReason | str) -> None:
    long = played(2, 2.0, stop) if isinstance(stop, StopReason) else cut_by_length(played(2, 2.0))
    episodes = stored(played(0, 1.0), played(1, 0.5), long)
    left_out = build_dataset(episodes, settings(algorithm=algorithm, overlong="leave-out"))
    assert "2" not in ids(left_out) and left_out.excluded.overlong == 1
    kept = build_dataset(episodes, settings(algorithm=algorithm))
    assert "2" in ids(kept) and kept.excluded.overlong == 0
    assert kept.used + kept.excluded.no_signal == 3


def test_a_success_is_imitated_though_its_time_ran_out() -> None:
    episodes = stored(played(0, 1.0, StopReason.TIMEOUT), played(1, 0.0), played(2, 1.0, StopReason.UNFINISHED))
    for algorithm in ("sft", "rejection-sampling"):
        dataset = build_dataset(episodes, settings(algorithm=algorithm))
        assert ids(dataset) == {"0"}
        assert dataset.excluded == ExcludedEpisodes(unfinished=1, no_signal=1)
        assert re.fullmatch(r"1 unfinished \(.*\), 1 without a signal \(.*\)", dataset.excluded.in_words())


SECRET = "api_key = " + '"' + "Zk39slQ2x7Lm4#" + '"'


@pytest.mark.parametrize("algorithm", ["grpo", "rejection-sampling"])
def test_what_was_sampled_before_a_secret_is_trained(algorithm: str) -> None:
    whole = [trajectory(f"{number}", reward=float(number % 2), turns=4) for number in range(4)]
    nodes = list(whole[1].nodes)
    told = next(at for at, node in enumerate(nodes) if at > 3 and not node.sampled)
    nodes[told] = nodes[told].model_copy(update={"message": Message(role="user", content=SECRET)})
    dirty = redact_trajectory(whole[1].model_copy(update={"nodes": tuple(nodes)}))
    assert any(node.sampled and node.tokens is None for node in dirty.nodes)
    episodes = stored(whole[0], dirty, *whole[2:])
    settings = TrainingSettings(algorithm=algorithm, keep_best=4 if algorithm == "rejection-sampling" else 1)
    dataset = build_dataset(episodes, settings)
    assert "1" in ids(dataset) and dataset.excluded.shortened == 1 and dataset.excluded.no_tokens == 0
    kept = sum(sum(sample.mask) for sample in dataset.samples if sample.trajectory_id == "1")
    before = [node for node in whole[1].nodes[:told] if node.sampled and node.tokens]
    assert kept == sum(len(node.tokens.sampled_ids) for node in before if node.tokens) > 0
    assert "1 in part (from the first secret on" in dataset.excluded.in_words()
    compared = build_dataset(episodes, TrainingSettings(algorithm="dpo"))
    assert compared.excluded.no_tokens == 1, "a preference compares whole episodes"


def sampled(trajectory: Trajectory, asked: SamplingParams | None, *, last: bool = False) -> Trajectory:
    """The episode with all its answers (or only its ``last`` one) sampled as asked."""
    answers = [at for at, node in enumerate(trajectory.nodes) if node.sampled]
    chosen = answers[-1:] if last else answers
    nodes = [
        node.model_copy(update={"sampling": asked}) if at in chosen else node
        for at, node in enumerate(trajectory.nodes)
    ]
    return trajectory.model_copy(update={"nodes": tuple(nodes)})


HALF, NUCLEUS = SamplingParams(temperature=0.5), SamplingParams(temperature=1.0, top_p=0.9)


@pytest.mark.parametrize(
    ("asked", "how"),
    [
        (NUCLEUS, "top_p = 0.9"),
        (SamplingParams(temperature=0.0), "temperature = 0"),
        (SamplingParams(temperature=0.7, top_k=20, min_p=0.0), "temperature = 0.7, top_k = 20"),
        (SamplingParams(min_p=0.05), "min_p = 0.05"),
        (SamplingParams(repetition_penalty=1.05, top_k=-1), "repetition_penalty = 1.05"),
        (SamplingParams(presence_penalty=-0.5), "presence_penalty = -0.5"),
        (SamplingParams(frequency_penalty=0.1), "frequency_penalty = 0.1"),
    ],
)
@pytest.mark.parametrize("algorithm", REINFORCING)
def test_what_was_sampled_from_another_distribution_is_not_reinforced(
    algorithm: str, asked: SamplingParams, how: str
) -> None:
    plain = [played(0, 1.0), played(1, 0.5)]
    dataset = build_dataset(stored(*plain, sampled(played(2, 0.0), asked)), settings(algorithm=algorithm))
    assert ids(dataset) == {"0", "1"}
    assert dataset.excluded == ExcludedEpisodes(off_temperature=1, sampled_by=how)
    two_turns = episode(2, 0.0, 0.0).model_copy(update={"task": plain[0].task})
    partly = build_dataset(stored(*plain, sampled(two_turns, asked, last=True)), settings(algorithm=algorithm))
    assert partly.excluded == ExcludedEpisodes(off_temperature=1, sampled_by=how)


def test_what_was_sampled_at_another_temperature_is_reinforced_at_that_one() -> None:
    warm = [sampled(played(number, float(number)), HALF) for number in range(2)]
    dataset = build_dataset(stored(*warm), settings(algorithm="grpo"))
    assert (dataset.used, dataset.excluded) == (2, ExcludedEpisodes())
    assert {sample.temperature for sample in dataset.samples} == {0.5}
    mixed = sampled(episode(2, 0.0, 1.0), HALF, last=True)
    (sample,) = samples_of(mixed)
    trained = [at for at, own in enumerate(sample.mask) if own]
    assert sample.temperature_at(trained[0]) == 1.0 and sample.temperature_at(trained[-1]) == 0.5


def test_fine_tuning_and_preferences_take_any_temperature() -> None:
    episodes = stored(*(sampled(played(number, float(number)), NUCLEUS) for number in range(2)))
    assert ids(build_dataset(episodes, settings(algorithm="sft"))) == {"1"}
    assert build_dataset(episodes, settings(algorithm="dpo")).used == 2
    with pytest.raises(TrainingError, match=r"2 episodes were sampled with top_p = 0.9, .*: roll out again with"):
        build_dataset_or_sft(episodes, "grpo")


def by(trajectory: Trajectory, name: str, **options: int) -> Trajectory:
    strategy = StrategySpec(name=name, options=dict(options))
    return trajectory.model_copy(update={"strategy": strategy})


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
def test_what_was_played_otherwise_is_not_compared(algorithm: str) -> None:
    chosen = settings(algorithm=algorithm)
    apart = [
        by(played(0, 1.0), "MCTS", depth=2),
        by(played(1, 0.0), "StandardReAct"),
        by(played(2, 0.5), "MCTS", depth=3),
    ]
    assert build_dataset(stored(*apart), chosen).excluded == ExcludedEpisodes(no_signal=3)
    alike = [by(played(number, float(number)), "MCTS", depth=2, seed=number) for number in range(2)]
    assert build_dataset(stored(*alike), chosen).used == 2, "a seed is no other policy"


def with_prompt(trajectory: Trajectory, prompt: str) -> Trajectory:
    first = trajectory.nodes[0].model_copy(update={"metadata": {"prompt": prompt}})
    return trajectory.model_copy(update={"nodes": (first, *trajectory.nodes[1:])})


def test_episodes_with_different_instructions_are_trained_side_by_side() -> None:
    mixed = stored(
        *(with_prompt(played(number, float(number)), "compact") for number in range(2)),
        *(played(number, float(number - 2)) for number in range(2, 4)),
    )
    assert build_dataset(mixed, settings(algorithm="grpo")).used == 4
    apart = stored(with_prompt(played(0, 1.0), "compact"), played(1, 0.0))
    assert build_dataset(apart, settings(algorithm="grpo")).excluded == ExcludedEpisodes(no_signal=2)
    assert not build_dataset(stored(played(0, 0.0), played(1, 1.0)), settings(algorithm="grpo")).warnings()
