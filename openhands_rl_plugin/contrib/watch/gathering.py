"""How new episodes are judged, which of them a candidate may learn from, and by which algorithm."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path

from openhands_rl_plugin.config.build import make_reward, success_rule
from openhands_rl_plugin.config.rl import AlgorithmName, RLSettings, TrainingSettings
from openhands_rl_plugin.contrib.watch.journal import State
from openhands_rl_plugin.contrib.watch.settings import watch_settings
from openhands_rl_plugin.core.errors import ConfigError, GraderError, StorageError
from openhands_rl_plugin.core.judgements import OPINION, Preferences, consensus, preferences
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import HELD_OUT_SPLITS, Label, TrajectoryFilter, TrajectorySummary
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.rewards.verifier.card import LEAST_CALIBRATED, Calibration, VerifierCard
from openhands_rl_plugin.rollout.scoring import AT_ONCE, UNLABELLED, JudgesLabels, known_score, rescore
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.data.dataset import Episodes, TrainingDataset, causes_of
from openhands_rl_plugin.training.learn import build_dataset, load_episodes
from openhands_rl_plugin.training.loop.plan import is_too_stale

DIVIDED = "labels contradict each other"
UNDECIDED = "the verifier is not certain"
_LONGEST_REASON = 120


@dataclass(frozen=True)
class Judgement:
    """``value``: the reward that is learnt from. ``good``: whether it is a success. ``by``: who judged it."""

    value: float
    good: bool
    by: str


@dataclass(frozen=True)
class Judged:
    """Episode -> judgement; ``open``: why others have none -> how many. ``preferred``: what people prefer of each
    two."""

    known: Mapping[str, Judgement]
    open: Mapping[str, int]
    preferred: Preferences


class KnownReward:
    """A reward that only says what is known already; its scores are never stored."""

    version = "watch-1"

    def __init__(self, known: Mapping[str, float]) -> None:
        self._known = known

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Raises ``GraderError``: of this one nothing is known."""
        raise GraderError(UNLABELLED)

    def from_record(self, trajectory: Trajectory, scores: Sequence[Score]) -> Score | None:
        """As in ``known_score``."""
        if trajectory.failure is not None or trajectory.id not in self._known:
            return None
        return Score(trajectory_id=trajectory.id, reward=self._known[trajectory.id], reward_version=self.version)


def check_calibrated(settings: RLSettings) -> None:
    """Raise ``ConfigError`` for a verifier whose scores are no calibrated probabilities."""
    if settings.reward.name != "verifier":
        return
    directory = Path(str(settings.reward.options.get("adapter", ""))).expanduser()
    if VerifierCard.load(directory).calibration == Calibration():
        raise ConfigError(
            f"[rl.reward] adapter: the scores of {directory} are no calibrated probabilities: train it with "
            f"`train --verifier --set verifier.calibration=platt` on {LEAST_CALIBRATED} held-out episodes or more"
        )


async def judge(settings: RLSettings, storage: TrajectoryStorage, ids: Sequence[str]) -> Judged:
    """Labels and rewards of these episodes, which ended without a failure. Raises the errors of the reward."""
    labels = await storage.labels(ids)
    of: dict[str, list[Label]] = defaultdict(list)
    for label in labels:
        of[label.trajectory_id].append(label)
    found: dict[str, Judgement | str] = dict.fromkeys(ids, UNLABELLED)
    for each in ids:
        if (people := consensus(of[each])) is not None:
            value = people.value
            found[each] = DIVIDED if value is None else Judgement(value, value >= 1, "people")
    reward, where = make_reward(settings.reward), [each for each in ids if found[each] == UNLABELLED]
    for some in () if isinstance(reward, JudgesLabels) else batched(where, AT_ONCE):
        report = await rescore(storage, reward, TrajectoryFilter(ids=some), sub_agents=False)
        for each, failure in report.unscored:
            found[each] = failure.message.removeprefix("GraderError: ").splitlines()[0][:_LONGEST_REASON]
        async for trajectory, scores in storage.find(TrajectoryFilter(ids=some)):
            score = known_score(reward, trajectory, scores)
            if score is not None and score.reward is not None:
                found[trajectory.id] = _decide(settings, trajectory, score.reward, score.reward_version)
    known = {each: it for each, it in found.items() if isinstance(it, Judgement)}
    return Judged(known, Counter(it for it in found.values() if isinstance(it, str)), preferences(labels))


def _decide(settings: RLSettings, trajectory: Trajectory, value: float, by: str) -> Judgement | str:
    if not by.startswith(OPINION):
        rule = success_rule(trajectory.task.environment, settings.reward)
        return Judgement(value, rule.holds(value, trajectory.stop), by)
    sure = watch_settings(settings).certainty
    return Judgement(value, value >= sure, by) if value >= sure or value <= 1 - sure else UNDECIDED


_LOOKED_AT = 4
"""Episodes that are looked at for each one that may be trained on: the newest ones."""


@dataclass(frozen=True)
class Material:
    """Training data for a candidate: ``episodes`` (id -> value), and ``settings``; ``because``: the reason for them."""

    settings: TrainingSettings
    episodes: Mapping[str, float]
    because: str


def chain(adapters: AdapterStore, current: str | None) -> tuple[str, ...]:
    """The version in use and those that it was trained from, the newest first."""
    names: list[str] = []
    while current is not None and current not in names:
        names.append(current)
        try:
            current = adapters.get(current).parent
        except StorageError:
            break  # retention removed it; what it was trained from is older still
    return tuple(names)


async def candidates(
    storage: TrajectoryStorage,
    settings: RLSettings,
    state: State,
    lineage: tuple[str, ...],
    measured: Collection[tuple[str, str]] = (),
) -> tuple[str, ...]:
    """Ids of the episodes that may be learnt from, oldest first: ended without a failure, not of tasks that only
    measure, sampled by the base model or by a version in ``lineage``, and not learnt from yet. Raises ``StorageError``.

    ``measured``: environment and id of each task of the held-out suite, which users may have given, too.
    """
    allowed = {settings.serving.model, *lineage}

    def may(summary: TrajectorySummary) -> bool:
        own = summary.policy.base_model == settings.serving.model and summary.policy.served_name in allowed
        measures = summary.split in HELD_OUT_SPLITS or (summary.environment, summary.task_id) in measured
        return own and not measures and summary.id not in state.learnt

    found = [each.id async for each in storage.summaries(TrajectoryFilter(failed=False)) if may(each)]
    return tuple(found[-_LOOKED_AT * watch_settings(settings).max_episodes :])


async def material(
    storage: TrajectoryStorage, settings: RLSettings, judged: Judged, lineage: Sequence[str]
) -> tuple[Material | None, str]:
    """The best that can be trained now, or ``None`` and why not. Raises ``StorageError``.

    What ``[rl.training]`` names comes first, if it learns by comparing attempts at one task: of policies that are at
    most ``[rl.loop] max_staleness`` versions behind. Then what people preferred, then the successes.
    """
    watch, training, missing = watch_settings(settings), settings.training, list[str]()
    kind = algorithm_of(training).kind
    if kind == "reinforcement":
        values = {each: judged.known[each].value for each in [*judged.known][-watch.max_episodes :]}
        names, most = (settings.serving.model, *reversed(lineage)), settings.loop.max_staleness
        episodes = (await _episodes(storage, settings, values)).trajectories
        fresh = [each.id for each in episodes if not is_too_stale(each, names, most)]
        values = {each: values[each] for each in fresh}
        dataset = await dataset_of(storage, settings, training, values)
        if dataset.used >= watch.min_used:
            return Material(training, values, f"{dataset.used} episodes that can be compared"), ""
        # Without token ids no algorithm that compares learns, whatever the rewards are.
        left = causes_of({"no_tokens": dataset.excluded["no_tokens"]})
        excluded = f"; left out: {left[0]}" if left else ""
        missing.append(f"{dataset.used} episodes can be compared with others of their task{excluded}")
    pairs = [both for both, better in judged.preferred.items() if better is not None]
    if kind != "imitation" and pairs:
        chosen = training_for(training, "dpo")
        values = dict.fromkeys(sorted(set[str]().union(*pairs[-watch.max_episodes // 2 :])), 0.0)
        count = len((await dataset_of(storage, settings, chosen, values)).pairs)
        missing.append(f"{count} pairs in which people preferred one")
        if count >= watch.min_used:
            return Material(chosen, values, missing[-1]), ""
    chosen = training_for(training, training.algorithm if kind == "imitation" else "sft")
    successes = [name for name, each in judged.known.items() if each.good]
    values = dict.fromkeys(successes[-watch.max_episodes :], 1.0)
    dataset = await dataset_of(storage, settings, chosen, values)
    if dataset.used >= watch.min_used:
        return Material(chosen, values, f"{dataset.used} successes to imitate"), ""
    causes = causes_of(dataset.excluded)
    excluded = f"; left out: {', '.join(causes)}" if causes else ""
    missing.append(f"{dataset.used} successes can be imitated, {watch.min_used} are needed{excluded}")
    return None, "; ".join(missing)


def training_for(settings: TrainingSettings, name: AlgorithmName) -> TrainingSettings:
    """``[rl.training]`` with the algorithm of a round, whose values are 1.0 for what is imitated."""
    chosen = settings if name == settings.algorithm else settings.model_copy(update={"algorithm": name})
    if name == "dpo" and chosen.tree == "proposals":
        chosen = chosen.model_copy(update={"tree": "path"})  # those are of a policy gradient
    return chosen.model_copy(update={"imitate_above": 0.5}) if algorithm_of(chosen).kind == "imitation" else chosen


async def dataset_of(
    storage: TrajectoryStorage, settings: RLSettings, training: TrainingSettings, values: Mapping[str, float]
) -> TrainingDataset:
    """The dataset of these episodes. The same ids, values and labels give the same one, in whatever process."""
    return build_dataset(await _episodes(storage, settings, values), training)


async def _episodes(storage: TrajectoryStorage, settings: RLSettings, values: Mapping[str, float]) -> Episodes:
    return await load_episodes(
        storage,
        TrajectoryFilter(ids=tuple(values)),
        base_model=settings.serving.model,
        adapter=settings.serving.adapter,
        reward=KnownReward(values),
    )
