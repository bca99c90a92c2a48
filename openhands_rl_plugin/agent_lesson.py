"""What ``RLAgent.train`` learns from: which of the stored episodes, by which algorithm, with what weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from openhands_rl_plugin.errors import TrainingError
from openhands_rl_plugin.protocols import TrajectoryStorage
from openhands_rl_plugin.records import TrajectoryFilter
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.scoring import scored_rewards
from openhands_rl_plugin.training.advantages import group_advantages
from openhands_rl_plugin.training.batch import samples_of
from openhands_rl_plugin.types import Adapter, Frozen, PolicyRef, Sample, Trajectory

Algorithm = Literal["sft", "reinforce++-baseline"]


class ExcludedEpisodes(Frozen):
    """Stored episodes that were not trained on, by reason.

    ``other_policy``: sampled from another model or another agent's adapter; ``failed``: no valid return;
    ``no_tokens``: the ids (or, for reinforcement learning, logprobs) were not recorded; ``no_signal``: no other episode
    of the task with another return, or, for fine-tuning, no success.
    """

    other_policy: int = 0
    failed: int = 0
    no_tokens: int = 0
    no_signal: int = 0


class TrainReport(Frozen):
    """What one call of ``RLAgent.train`` did; ``used`` counts episodes, ``metrics`` are those of the optimiser."""

    algorithm: Algorithm
    adapter: Adapter
    used: int
    excluded: ExcludedEpisodes
    metrics: dict[str, float]


@dataclass(frozen=True)
class Episodes:
    """Valid episodes of one policy with their returns, and how many stored ones were left out on the way."""

    trajectories: tuple[Trajectory, ...]
    returns: tuple[float, ...]
    excluded: ExcludedEpisodes


@dataclass(frozen=True)
class Lesson:
    """Weighted training sequences and where they come from."""

    algorithm: Algorithm
    samples: tuple[Sample, ...]
    used: int
    excluded: ExcludedEpisodes


async def collected_episodes(
    storage: TrajectoryStorage, where: TrajectoryFilter, *, base_model: str, adapter: str
) -> Episodes:
    """The stored episodes that ``base_model`` sampled, alone or below any version of ``adapter``."""
    own: list[Trajectory] = []
    others = 0
    async for trajectory, _ in storage.find(where):
        if _is_own(trajectory.policy, base_model, adapter):
            own.append(trajectory)
        else:
            others += 1
    rewards = await scored_rewards(ReturnReward(), own)
    valid = [(trajectory, reward) for trajectory, reward in zip(own, rewards, strict=True) if reward is not None]
    return Episodes(
        trajectories=tuple(trajectory for trajectory, _ in valid),
        returns=tuple(reward for _, reward in valid),
        excluded=ExcludedEpisodes(other_policy=others, failed=len(own) - len(valid)),
    )


def make_lesson(episodes: Episodes, algorithm: Algorithm) -> Lesson:
    """Reinforcement learning where episodes of one task differ in their returns, else fine-tuning on successes.

    Raises ``TrainingError`` that says what to do when neither is possible.
    """
    if not episodes.trajectories:
        raise TrainingError(
            f"there is nothing to train on: no valid episodes of this model are stored ({_counts(episodes.excluded)}); "
            "call run(...) first"
        )
    lesson = _reinforcement(episodes) if algorithm == "reinforce++-baseline" else None
    if lesson is None or not lesson.samples:
        lesson = _fine_tuning(episodes)
    if lesson.samples:
        return lesson
    if lesson.excluded.no_tokens:
        raise TrainingError(
            "the recorded episodes hold no token ids; use a server that returns them (vLLM or `openhands-rl serve`) "
            "and run again"
        )
    raise TrainingError(
        f"nothing can be learnt from {len(episodes.trajectories)} episodes: no task has episodes with different "
        "returns, and none succeeded (return > 0). Collect more with run(..., batch_size=8), on easier tasks or at a "
        "higher [rl.sampling] temperature"
    )


def _reinforcement(episodes: Episodes) -> Lesson:
    trainable = [
        (_regrouped(trajectory), reward)
        for trajectory, reward in zip(episodes.trajectories, episodes.returns, strict=True)
        if _recorded(trajectory, need_logprobs=True)
    ]
    baseline = group_advantages([trajectory for trajectory, _ in trainable], [reward for _, reward in trainable])
    weighted = [
        (trajectory, advantage)
        for (trajectory, _), advantage in zip(trainable, baseline.advantages, strict=True)
        if advantage is not None
    ]
    samples = [sample for trajectory, advantage in weighted for sample in samples_of(trajectory, advantage)]
    return _lesson(episodes, "reinforce++-baseline", samples, used=len(weighted), recorded=len(trainable))


def _fine_tuning(episodes: Episodes) -> Lesson:
    recorded = [
        (trajectory, reward)
        for trajectory, reward in zip(episodes.trajectories, episodes.returns, strict=True)
        if _recorded(trajectory, need_logprobs=False)
    ]
    successes = [trajectory for trajectory, reward in recorded if reward > 0]
    samples = [sample for trajectory in successes for sample in samples_of(trajectory, need_logprobs=False)]
    return _lesson(episodes, "sft", samples, used=len(successes), recorded=len(recorded))


def _lesson(episodes: Episodes, algorithm: Algorithm, samples: Sequence[Sample], *, used: int, recorded: int) -> Lesson:
    counts = {"no_tokens": len(episodes.trajectories) - recorded, "no_signal": recorded - used}
    excluded = episodes.excluded.model_copy(update=counts)
    return Lesson(algorithm=algorithm, samples=tuple(samples), used=used, excluded=excluded)


def _regrouped(trajectory: Trajectory) -> Trajectory:
    """The episode in the group of everything that the same weights did with the same task, in whichever run.

    A baseline is the expected return of one policy on one task; episodes of another version would shift it.
    """
    task = trajectory.task
    key = "\0".join((task.environment, task.id, task.instruction, trajectory.policy.served_name))
    return trajectory.model_copy(update={"group_id": key})


def _recorded(trajectory: Trajectory, *, need_logprobs: bool) -> bool:
    try:
        return bool(samples_of(trajectory, need_logprobs=need_logprobs))
    except TrainingError:
        return False


def _is_own(policy: PolicyRef, base_model: str, adapter: str) -> bool:
    return policy.base_model == base_model and policy.adapter in (None, adapter)


def _counts(excluded: ExcludedEpisodes) -> str:
    return f"{excluded.failed} failed, {excluded.other_policy} by other models"
