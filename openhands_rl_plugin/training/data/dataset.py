"""What ``RLAgent.train`` and ``openhands-rl train`` learn from: which of the stored episodes, and with what weight."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.config.rl import AlgorithmName, TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Adapter, Frozen, PolicyRef, Sample, Score, StopReason, Trajectory
from openhands_rl_plugin.rollout.scoring import judge_all
from openhands_rl_plugin.training.algorithms import Kind, algorithm_of, needs_logprobs
from openhands_rl_plugin.training.credit.credit import credited_samples
from openhands_rl_plugin.training.data.batch import is_recorded, samples_of
from openhands_rl_plugin.training.data.endings import is_no_sample, is_overlong
from openhands_rl_plugin.training.data.imitation import Pair, imitated, preference_pairs
from openhands_rl_plugin.training.data.tempering import is_tempered, samplings

if TYPE_CHECKING:
    from openhands_rl_plugin.training.trainer.metrics import TrainMetrics
    from openhands_rl_plugin.training.trainer.trainer import OnProgress, Trainer


class ExcludedEpisodes(Frozen):
    """Stored episodes that were not trained on, by reason.

    ``held_out``: of a split that only measures (``HELD_OUT_SPLITS``), which no filter named; ``other_policy``: sampled
    from another model or another agent's adapter; ``failed``: no valid reward;
    ``no_tokens``: the ids (or, for reinforcement learning, logprobs) were not recorded; ``unfinished``: the time ran
    out, or the process ended, so that the reward says nothing about the policy; ``overlong``: a limit cut them short,
    where such are to be left out; ``tempered``: sampled at another temperature than 1 or with a ``top_p``, so that the
    logprobs are not those of what sampled, which reinforcement learning needs; ``no_signal``: no other episode of the
    task that was played and sampled alike has another reward, or, for fine-tuning, no success, or not among the best.
    """

    held_out: int = 0
    other_policy: int = 0
    failed: int = 0
    no_tokens: int = 0
    unfinished: int = 0
    overlong: int = 0
    tempered: int = 0
    no_signal: int = 0

    def in_words(self) -> str:
        """``"1 other policy, 2 no signal"``; ``"none"`` where nothing was left out."""
        found = [f"{count} {why.replace('_', ' ')}" for why, count in self.model_dump().items() if count]
        return ", ".join(found) or "none"


class TrainReport(Frozen):
    """What one call of ``RLAgent.train`` did; ``used`` counts episodes, ``metrics`` are those of the optimiser."""

    algorithm: AlgorithmName
    adapter: Adapter
    used: int
    excluded: ExcludedEpisodes
    metrics: dict[str, float]


@dataclass(frozen=True)
class Episodes:
    """Valid episodes of one policy with their rewards, and how many stored ones were left out on the way."""

    trajectories: tuple[Trajectory, ...]
    returns: tuple[float, ...]
    excluded: ExcludedEpisodes


@dataclass(frozen=True)
class Lesson:
    """Weighted training sequences, or pairs of them, and where they come from.

    ``samples`` are those of the ``pairs`` where the algorithm learns from preferences.
    """

    algorithm: AlgorithmName
    samples: tuple[Sample, ...]
    used: int
    excluded: ExcludedEpisodes
    pairs: tuple[Pair, ...] = ()


async def collected_episodes(
    storage: TrajectoryStorage,
    where: TrajectoryFilter,
    *,
    base_model: str,
    adapter: str,
    reward: Reward,
) -> Episodes:
    """The stored episodes that ``base_model`` sampled, alone or below any version of ``adapter``.

    Those of a split that only measures are left out, unless ``where`` names it.
    An episode that has no score of the reward yet is judged here, without storing the score.
    """
    own: list[Trajectory] = []
    known: dict[str, Score] = {}
    others = held_out = 0
    async for trajectory, scores in storage.find(where):
        if where.only_measures(trajectory.task.split):
            held_out += 1
        elif _is_own(trajectory.policy, base_model, adapter):
            own.append(trajectory)
            known |= {score.trajectory_id: score for score in scores if score.reward_version == reward.version}
        else:
            others += 1
    open_ones = [trajectory for trajectory in own if trajectory.failure is None and trajectory.id not in known]
    outcomes = await judge_all(reward, open_ones)
    known |= {outcome.trajectory_id: outcome for outcome in outcomes if isinstance(outcome, Score)}
    valid = [(trajectory, value) for trajectory in own if (value := _reward(trajectory, known)) is not None]
    return Episodes(
        trajectories=tuple(trajectory for trajectory, _ in valid),
        returns=tuple(value for _, value in valid),
        excluded=ExcludedEpisodes(held_out=held_out, other_policy=others, failed=len(own) - len(valid)),
    )


def make_lesson(episodes: Episodes, settings: TrainingSettings | AlgorithmName) -> Lesson:
    """What an agent learns: by its algorithm (one with default options may be given by name) where that finds anything.

    Where reinforcement and preferences find no two episodes of a task to compare, it is fine-tuning on successes.
    Raises ``TrainingError`` that says what to do when neither is possible.
    """
    if not episodes.trajectories:
        raise TrainingError(
            f"there is nothing to train on: no valid episodes of this model are stored ({_counts(episodes.excluded)}); "
            "call run(...) first"
        )
    chosen = settings if isinstance(settings, TrainingSettings) else TrainingSettings(algorithm=settings)
    lesson = lesson_of(episodes, chosen)
    if not lesson.samples and lesson.excluded.tempered and not lesson.excluded.no_signal:
        raise TrainingError(of_tempered(lesson.excluded))
    if not lesson.samples and algorithm_of(chosen).kind != "imitation":
        lesson = lesson_of(episodes, chosen.as_fine_tuning())
    if lesson.samples:
        return lesson
    if lesson.excluded.no_tokens:
        raise TrainingError(
            "the recorded episodes hold no token ids; use a server that returns them (vLLM or `openhands-rl serve`) "
            "and run again"
        )
    raise TrainingError(
        f"nothing can be learnt from {len(episodes.trajectories)} episodes: no task has episodes with different "
        f"returns, and none succeeded (return > {chosen.imitate_above:g}); left out: {lesson.excluded.in_words()}. "
        "Collect more with run(..., batch_size=8), or on easier tasks"
    )


def lesson_of(episodes: Episodes, settings: TrainingSettings) -> Lesson:
    """What the algorithm of ``settings`` learns from the episodes; it may be nothing."""
    usable = _usable(episodes, settings)
    trajectories, rewards = usable.trajectories, usable.returns
    pairs: list[Pair] = []
    match algorithm_of(settings).kind:
        case "imitation":
            good = [trajectories[at] for at in imitated(trajectories, rewards, settings)]
            samples = [sample for trajectory in good for sample in samples_of(trajectory, need_logprobs=False)]
        case "preference":
            pairs = preference_pairs(trajectories, rewards, settings)
            samples = [sample for pair in pairs for sample in (*pair.chosen, *pair.rejected)]
        case "reinforcement":
            samples = credited_samples(trajectories, rewards, settings).samples
    used = len({sample.trajectory_id for sample in samples})
    return Lesson(
        algorithm=settings.algorithm,
        samples=tuple(samples),
        used=used,
        excluded=usable.excluded.model_copy(update={"no_signal": len(trajectories) - used}),
        pairs=tuple(pairs),
    )


def _usable(episodes: Episodes, settings: TrainingSettings) -> Episodes:
    """The episodes that the algorithm of ``settings`` may look at, in their groups, and why the others are not there.

    An episode that ran out of time after it had succeeded is a success: it may be imitated, but not compared.
    """
    kind = algorithm_of(settings).kind
    left_out: Counter[str] = Counter()
    kept: list[tuple[Trajectory, float]] = []
    for trajectory, value in zip(episodes.trajectories, episodes.returns, strict=True):
        if not is_recorded(trajectory, need_logprobs=needs_logprobs(settings)):
            left_out["no_tokens"] += 1
        elif trajectory.stop is StopReason.UNFINISHED or (kind != "imitation" and is_no_sample(trajectory)):
            left_out["unfinished"] += 1
        elif is_overlong(trajectory, settings):
            left_out["overlong"] += 1
        elif kind == "reinforcement" and is_tempered(trajectory):
            left_out["tempered"] += 1
        else:
            kept.append((regrouped(trajectory, kind), value))
    return Episodes(
        trajectories=tuple(trajectory for trajectory, _ in kept),
        returns=tuple(value for _, value in kept),
        excluded=episodes.excluded.model_copy(update=left_out),
    )


def teach(
    trainer: Trainer, lesson: Lesson, on_progress: OnProgress | None = None, *, run: Path | None = None
) -> TrainMetrics:
    """Train what the lesson holds; ``run`` is a directory for metrics and checkpoints. Raises ``TrainingError``."""
    match algorithm_of(TrainingSettings(algorithm=lesson.algorithm)).kind:
        case "imitation":
            return trainer.sft(lesson.samples, on_progress, run=run)
        case "preference":
            return trainer.prefer(lesson.pairs, on_progress, run=run)
        case "reinforcement":
            return trainer.reinforce(lesson.samples, on_progress, run=run)


def regrouped(trajectory: Trajectory, kind: Kind) -> Trajectory:
    """The episode in the group of everything that the same weights did with the same task, in whichever run.

    A baseline is the expected return of one policy on one task, and a preference should tell good from bad and not one
    way of sampling from another. So what is compared was also played by one strategy and sampled alike; the best
    episodes of a task may be of several.
    """
    task = trajectory.task
    key = [task.environment, task.id, task.instruction, trajectory.policy.served_name]
    if kind != "imitation":
        options = {name: value for name, value in trajectory.strategy.options.items() if name != "seed"}
        key += [trajectory.strategy.name, json.dumps(options, sort_keys=True), str(samplings(trajectory))]
    return trajectory.model_copy(update={"group_id": "\0".join(key)})


def of_tempered(excluded: ExcludedEpisodes) -> str:
    """What to do where all that could be compared was sampled otherwise than its logprobs say."""
    return (
        f"{excluded.tempered} episodes were sampled at another temperature than 1 or with a top_p below 1, but the "
        "recorded logprobs are those of temperature 1: play again with temperature = 1.0 and top_p = 1.0, or learn "
        'from these with algorithm = "dpo", "sft" or "rejection-sampling"'
    )


def _reward(trajectory: Trajectory, scores: Mapping[str, Score]) -> float | None:
    score = scores.get(trajectory.id)
    return None if score is None or trajectory.failure is not None else score.reward


def _is_own(policy: PolicyRef, base_model: str, adapter: str) -> bool:
    return policy.base_model == base_model and policy.adapter in (None, adapter)


def _counts(excluded: ExcludedEpisodes) -> str:
    held_out = f", {excluded.held_out} of held-out splits" if excluded.held_out else ""
    return f"{excluded.failed} failed, {excluded.other_policy} by other models{held_out}"
