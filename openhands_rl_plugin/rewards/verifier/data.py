"""A verifier's training and evaluation data: labelled episodes, split by task, balanced by class. No torch."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from openhands_rl_plugin.config.rl import VerifierSettings
from openhands_rl_plugin.core.arrays import Floats, Ids, Mask
from openhands_rl_plugin.core.errors import CaughtFailure, TrainingError, boundary
from openhands_rl_plugin.core.judgements import resolved
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, TrajectoryFilter
from openhands_rl_plugin.core.types import FailureKind, Sample, Score, Trajectory
from openhands_rl_plugin.rewards.verifier.card import task_digest
from openhands_rl_plugin.rewards.verifier.prompt import VerifierPrompts
from openhands_rl_plugin.rollout.scoring import JudgesLabels, known_score
from openhands_rl_plugin.training.data.dataset import listed

# Sums of step rewards such as 10 x 0.1 must not miss the threshold by a rounding error.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Labelled:
    """An episode, its task, and whether it solved the task."""

    trajectory_id: str
    task: str
    success: bool


@dataclass(frozen=True)
class VerifierExample:
    """A labelled episode as token ids: the prompt, followed by the label's token."""

    label: Labelled
    prompt: tuple[int, ...]
    answer: int
    truncated: bool

    def sample(self) -> Sample:
        """The training sequence; the loss mask covers the label's token only."""
        count = len(self.prompt)
        return Sample(
            trajectory_id=self.label.trajectory_id,
            leaf=0,
            input_ids=Ids((*self.prompt, self.answer)),
            mask=Mask((False,) * count + (True,)),
            logprobs=Floats((0.0,) * (count + 1)),
        )


OF_HELD_OUT_SPLITS = "held out (of evaluation splits: name one with --split)"
"""Policies that use the verifier are evaluated on them."""
FAILED = "failed (an error of the run, which says nothing about the policy)"
UNLABELLED = "without a label (grade them, or name a reward whose scores are labels with --label)"
BALANCE = "more failures than --negatives wants for each success"


@dataclass(frozen=True)
class VerifierDataset:
    """Training and held-out examples; no task has episodes in both. ``left_out``: how many episodes are not used, by
    why."""

    training: tuple[VerifierExample, ...]
    held_out: tuple[VerifierExample, ...]
    left_out: Counter[str]

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The training sequences."""
        return tuple(example.sample() for example in self.training)

    @property
    def units(self) -> int:
        """How many of what ``batch_size`` counts there are."""
        return len(self.training)

    def lines(self) -> list[str]:
        """What is trained on and what is not, for a user."""
        causes = listed([f"{count} {why}" for why, count in self.left_out.items()])
        return [f"training: {_counts(self.training)}; left out:{causes}", f"held out: {_counts(self.held_out)}"]


def _counts(examples: Sequence[VerifierExample]) -> str:
    good, tasks = sum(each.label.success for each in examples), {each.label.task for each in examples}
    truncated = sum(each.truncated for each in examples)
    return f"{good} successes and {len(examples) - good} failures of {len(tasks)} tasks, {truncated} truncated"


def task_of(trajectory: Trajectory) -> str:
    """The key of an episode's task, the same across policies and runs."""
    return f"{trajectory.task.environment}\0{trajectory.task.id}"


async def verifier_dataset(
    storage: TrajectoryStorage,
    where: TrajectoryFilter,
    prompts: VerifierPrompts,
    settings: VerifierSettings,
    *,
    reward: Reward | None,
    seed: int,
    taught: frozenset[str] = frozenset(),
) -> VerifierDataset:
    """The matching episodes, labelled, split and balanced.

    ``reward``: that of ``settings.label``; ``None`` for the evidence. ``taught``: as for ``split_by_task``.

    The store is read twice, so that only the selected episodes are rendered. Raises ``TrainingError`` when there are
    too few.
    """
    labelled: list[Labelled] = []
    left_out: Counter[str] = Counter()
    async for trajectory, scores in storage.find(where):
        if where.only_measures(trajectory.task.split):
            left_out[OF_HELD_OUT_SPLITS] += 1
            continue
        labels = await storage.labels([trajectory.id]) if isinstance(reward, JudgesLabels) else ()
        success = await label_of(trajectory, scores, settings, reward, labels)
        if success is None:
            left_out[UNLABELLED if trajectory.failure is None else FAILED] += 1
        else:
            labelled.append(Labelled(trajectory.id, task_of(trajectory), success))
    training, held_out = split_by_task(labelled, settings, seed, taught)
    kept = balanced(training, settings, seed)
    wanted = {one.trajectory_id: one for one in (*kept, *held_out)}
    examples: dict[str, VerifierExample] = {}
    async for trajectory, _ in storage.find(where):
        if (label := wanted.get(trajectory.id)) is not None:
            prompt = prompts.of(trajectory)
            answer = prompts.yes if label.success else prompts.no
            examples[trajectory.id] = VerifierExample(label, prompt.ids, answer, prompt.truncated)
    return VerifierDataset(
        training=tuple(examples[one.trajectory_id] for one in kept if one.trajectory_id in examples),
        held_out=tuple(examples[one.trajectory_id] for one in held_out if one.trajectory_id in examples),
        left_out=left_out + Counter({BALANCE: len(training) - len(kept)}),
    )


async def label_of(
    trajectory: Trajectory,
    scores: Sequence[Score],
    settings: VerifierSettings,
    reward: Reward | None,
    labels: Sequence[Label] = (),
) -> bool | None:
    """Whether the episode solved its task; ``None`` when it failed or its outcome is unknown.

    With a reward the label is its known score, or, without one, the reward computed now; of one that ``JudgesLabels``
    what follows from ``labels`` now. Scores of verifiers are never labels.
    """
    if trajectory.failure is not None:
        return None
    if reward is None:
        return resolved(trajectory, scores)
    if isinstance(reward, JudgesLabels):
        known = reward.from_labels(trajectory.id, labels)
    else:
        known = known_score(reward, trajectory, scores)
    try:
        with boundary(FailureKind.GRADER, f"label {reward.version}"):
            value = (known or await reward(trajectory)).reward
    except CaughtFailure:
        return None
    return None if value is None else value >= 1 - _ROUNDING


def split_by_task(
    examples: Sequence[Labelled], settings: VerifierSettings, seed: int, taught: frozenset[str] = frozenset()
) -> tuple[tuple[Labelled, ...], tuple[Labelled, ...]]:
    """The examples to train on, and those to hold out: of about ``settings.held_out`` of the tasks all episodes.

    ``taught``: digests of the tasks that the parent verifier was trained on, with whatever seed or store; none of them
    is held out, and the share is taken from the others. The side of any other task depends on its name and the seed
    only, so it does not change when the store grows, except that with very few tasks one is moved to an empty side.
    Raises ``TrainingError`` when there are fewer than two tasks, or all are ``taught``.
    """
    places = {example.task: _place(example.task, seed) for example in examples}
    if len(places) < 2:
        raise TrainingError(
            f"{len(places)} task(s) have labelled episodes; a verifier needs at least two: one to train on and one to "
            "hold out; see [rl.verifier] label, and --split where all are of a held-out split"
        )
    unseen = sorted((task for task in places if task_digest(task) not in taught), key=places.__getitem__)
    if not unseen:
        raise TrainingError(
            f"no task is left to hold out: all {len(places)} are in the training data of the parent verifier; collect "
            "episodes of other tasks, or start over with --from base"
        )
    drawn = sum(places[task] < settings.held_out for task in unseen)
    share = round(settings.held_out * len(places)) if len(unseen) < len(places) else 0
    held = set(unseen[: min(max(drawn, share, 1), len(places) - 1)])
    training = tuple(example for example in examples if example.task not in held)
    return training, tuple(example for example in examples if example.task in held)


def balanced(examples: Sequence[Labelled], settings: VerifierSettings, seed: int) -> tuple[Labelled, ...]:
    """``settings.negatives`` failures for every success, sampled with the seed; 0 keeps all.

    All successes are kept. Raises ``TrainingError`` where one of the classes is missing.
    """
    positives = [example for example in examples if example.success]
    negatives = [example for example in examples if not example.success]
    if not positives or not negatives:
        missing = "solved its task" if negatives else "failed to solve its task"
        raise TrainingError(
            f"no episode to train on {missing}, but a verifier needs both classes; collect more, or see [rl.verifier] "
            "label"
        )
    wanted = round(settings.negatives * len(positives)) if settings.negatives else len(negatives)
    if wanted < len(negatives):
        ordered = sorted(negatives, key=lambda example: example.trajectory_id)
        kept = {example.trajectory_id for example in random.Random(f"negatives:{seed}").sample(ordered, max(1, wanted))}
        return tuple(example for example in examples if example.success or example.trajectory_id in kept)
    return tuple(examples)


def _place(task: str, seed: int) -> float:
    """A pseudo-random number in [0, 1) from the task and the seed."""
    digest = hashlib.sha256(f"{seed}\0{task}".encode()).digest()
    return int.from_bytes(digest[:7], "big") / 2**56
