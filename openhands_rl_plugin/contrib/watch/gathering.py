"""How new episodes are judged, which of them a candidate may learn from, and by which algorithm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import AlgorithmName, RLSettings, TrainingSettings
from openhands_rl_plugin.config.success import success_rule
from openhands_rl_plugin.contrib.watch.journal import State
from openhands_rl_plugin.contrib.watch.settings import watch_settings
from openhands_rl_plugin.core.errors import ConfigError, GraderError, RLError, StorageError, TrainingError
from openhands_rl_plugin.core.judgements import OPINION, Preferences, consensus, labels_of, scores_of
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import HELD_OUT_SPLITS, Label, TrajectoryFilter, TrajectorySummary
from openhands_rl_plugin.core.types import Failure, Score, Trajectory
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.rollout.scoring import JudgesLabels, known_score, rescore
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.data.dataset import (
    Episodes,
    ExcludedEpisodes,
    TrainingDataset,
    build_dataset,
    load_episodes,
)
from openhands_rl_plugin.training.loop.plan import PolicyLineage
from openhands_rl_plugin.training.verifier.card import Calibration, VerifierCard
from openhands_rl_plugin.training.verifier.report import LEAST_CALIBRATED

DIVIDED = "labels contradict each other"
UNDECIDED = "the verifier is not certain"
UNJUDGED = "nobody has judged it"
AWAY = "the judge is away"
_AT_ONCE = 64
_LONGEST_REASON = 120


@dataclass(frozen=True)
class Judgement:
    """``value``: the reward that is learnt from. ``good``: whether it is a success. ``by``: who said so."""

    value: float
    good: bool
    by: str


@dataclass(frozen=True)
class Judged:
    """Episode -> judgement; ``open``: why others have none -> how many. ``away``: what kept the judge from judging."""

    known: Mapping[str, Judgement] = field(default_factory=dict)
    open: Mapping[str, int] = field(default_factory=dict)
    away: str = ""


class KnownReward:
    """A reward that only says what is known already; its scores are never stored."""

    version = "watch-1"

    def __init__(self, known: Mapping[str, float]) -> None:
        self._known = known

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Raises ``GraderError``: of this one nothing is known."""
        raise GraderError(UNJUDGED)

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
            f"[rl.reward] adapter: the scores of {directory} are no calibrated probabilities, and nobody would look "
            "at what they let in: train it with `openhands-rl train --verifier --calibration platt`, with "
            f"{LEAST_CALIBRATED} held-out episodes of both outcomes"
        )


class EpisodeJudge:
    """Judges stored episodes once each; what people say is read anew each time."""

    def __init__(self, settings: RLSettings, storage: TrajectoryStorage) -> None:
        self._settings = settings
        self._storage = storage
        self._reward: Reward = make_reward(settings.reward)
        self._said: dict[str, Judgement | str] = {}
        self._why: dict[str, str] = {}
        self._last: dict[str, Score | None] = {}
        """The newest score of what was judged: another one may say otherwise."""

    async def judge(self, ids: Sequence[str]) -> Judged:
        """What is known of these episodes, which have ended without a failure. Raises ``StorageError``.

        Where the judge is away, the others are judged, and these the next time.
        """
        known: dict[str, Judgement] = {}
        reasons: Counter[str] = Counter()
        away = ""
        for some in batched(ids, _AT_ONCE):
            labels = await self._labels(some)
            divided = {each for each, said in labels.items() if (found := consensus(said)) and found.value is None}
            by_people = {each: _by_people(said) for each, said in labels.items() if each not in divided}
            told = {each: found for each, found in by_people.items() if found is not None}
            others = [each for each in some if each not in told and each not in divided]
            scores = await scores_of(self._storage, others)
            changed = [each for each in others if self._last.get(each) != _newest_score(scores, each)]
            away = await self._by_reward([each for each in others if each not in self._said or each in changed]) or away
            for each in some:
                found = DIVIDED if each in divided else told.get(each) or self._said.get(each) or self._why[each]
                if isinstance(found, Judgement):
                    known[each] = found
                else:
                    reasons[found] += 1
        return Judged(known, dict(reasons), away)

    async def _labels(self, ids: Sequence[str]) -> dict[str, list[Label]]:
        of: dict[str, list[Label]] = {}
        for label in await labels_of(self._storage, ids):
            of.setdefault(label.trajectory_id, []).append(label)
        return of

    async def _by_reward(self, ids: Sequence[str]) -> str:
        """Let the reward judge these, and keep what it says; returns why it could not."""
        self._why |= dict.fromkeys(ids, UNJUDGED)
        for each in ids:
            self._said.pop(each, None)
        if not ids or isinstance(self._reward, JudgesLabels):
            return ""
        where, away = TrajectoryFilter(ids=tuple(ids)), ""
        try:
            report = await rescore(self._storage, self._reward, where, sub_agents=False)
            self._why |= {each: _reason(failure) for each, failure in report.unscored}
        except StorageError:
            raise
        except RLError as error:
            away = str(error).splitlines()[0]
            self._why |= dict.fromkeys(ids, AWAY)
        async for trajectory, scores in self._storage.find(where):
            score = known_score(self._reward, trajectory, scores)
            self._last[trajectory.id] = scores[-1] if scores else None
            if score is not None and score.reward is not None:
                self._said[trajectory.id] = self._decided(trajectory, score)
        return away

    def _decided(self, trajectory: Trajectory, score: Score) -> Judgement | str:
        assert score.reward is not None, "the caller has looked"
        value, by = score.reward, score.reward_version
        if by.startswith(OPINION):
            sure = watch_settings(self._settings).certainty
            decided = value >= sure or value <= 1 - sure
            return Judgement(value, value >= sure, by) if decided else UNDECIDED
        rule = success_rule(trajectory.task.environment, self._settings.reward)
        return Judgement(value, rule.holds(value, trajectory.stop), by)


def _newest_score(scores: Mapping[str, Sequence[Score]], identity: str) -> Score | None:
    found = scores.get(identity, ())
    return found[-1] if found else None


def _reason(failure: Failure) -> str:
    return failure.message.removeprefix("GraderError: ").splitlines()[0][:_LONGEST_REASON]


def _by_people(labels: Sequence[Label]) -> Judgement | None:
    said = consensus(labels)
    return None if said is None or said.value is None else Judgement(said.value, said.value >= 1, "people")


_ALGORITHM: TypeAdapter[AlgorithmName] = TypeAdapter(AlgorithmName)
_LOOKED_AT = 4
"""Episodes that are looked at for each one that may be trained on: the newest ones."""


@dataclass(frozen=True)
class Material:
    """What a candidate could be trained on now: ``episodes``, id -> value, by ``settings``; ``because``: why so."""

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
    storage: TrajectoryStorage,
    settings: RLSettings,
    known: Mapping[str, Judgement],
    preferred: Preferences,
    lineage: Sequence[str],
) -> tuple[Material | None, str]:
    """The best that can be trained now, or ``None`` and why not. Raises ``StorageError``.

    What ``[rl.training]`` names comes first, if it learns by comparing attempts at one task: of policies that are at
    most ``[rl.loop] max_staleness`` versions behind. Then what people preferred, then the successes.
    """
    kind = algorithm_of(settings.training).kind
    told: list[str] = []
    if kind == "reinforcement":
        found, why = await _compared(storage, settings, known, lineage)
        if found is not None:
            return found, ""
        told.append(why)
    if kind != "imitation" and (pairs := _pairs(preferred)):
        found, why = await _preferred(storage, settings, pairs)
        if found is not None:
            return found, ""
        told.append(why)
    found, why = await _imitated(storage, settings, known)
    return found, "; ".join([*told, why] if found is None else [])


async def _compared(
    storage: TrajectoryStorage, settings: RLSettings, known: Mapping[str, Judgement], lineage: Sequence[str]
) -> tuple[Material | None, str]:
    values = {name: known[name].value for name in _newest(known, settings)}
    episodes = await _episodes(storage, settings, values)
    policies, most = PolicyLineage((settings.serving.model, *reversed(lineage))), settings.loop.max_staleness
    fresh = {each.id: values[each.id] for each in episodes.trajectories if not policies.is_too_stale(each, most)}
    dataset = await dataset_of(storage, settings, settings.training, fresh)
    if dataset.used < watch_settings(settings).min_used:
        return None, f"{dataset.used} episodes can be compared with others of their task{_without_ids(dataset)}"
    return Material(settings.training, fresh, f"{dataset.used} episodes that can be compared"), ""


def _without_ids(dataset: TrainingDataset) -> str:
    """What keeps all algorithms that compare from learning, whatever the rewards are."""
    found = ExcludedEpisodes(no_tokens=dataset.excluded.no_tokens)
    return f"; left out: {found.in_words()}" if found.no_tokens else ""


async def _preferred(
    storage: TrajectoryStorage, settings: RLSettings, pairs: Sequence[frozenset[str]]
) -> tuple[Material | None, str]:
    chosen = training_for(settings.training, "dpo")
    values = dict.fromkeys(
        sorted({name for both in pairs[-watch_settings(settings).max_episodes // 2 :] for name in both}), 0.0
    )
    dataset = await dataset_of(storage, settings, chosen, values)
    if len(dataset.pairs) < watch_settings(settings).min_used:
        return None, f"{len(dataset.pairs)} pairs in which people preferred one"
    return Material(chosen, values, f"{len(dataset.pairs)} pairs in which people preferred one"), ""


async def _imitated(
    storage: TrajectoryStorage, settings: RLSettings, known: Mapping[str, Judgement]
) -> tuple[Material | None, str]:
    imitates = algorithm_of(settings.training).kind == "imitation"
    chosen = training_for(settings.training, settings.training.algorithm if imitates else "sft")
    values = dict.fromkeys(_newest({name: each for name, each in known.items() if each.good}, settings), 1.0)
    dataset = await dataset_of(storage, settings, chosen, values)
    if dataset.used < watch_settings(settings).min_used:
        left = f"; left out: {dataset.excluded.in_words()}" if dataset.excluded.causes() else ""
        return None, f"{dataset.used} successes can be imitated, {watch_settings(settings).min_used} are needed{left}"
    return Material(chosen, values, f"{dataset.used} successes to imitate"), ""


def training_for(settings: TrainingSettings, algorithm: str) -> TrainingSettings:
    """``[rl.training]`` with the algorithm of a round, whose values are 1.0 for what is imitated. A name that this
    version does not know is a ``TrainingError``."""
    try:
        name = _ALGORITHM.validate_python(algorithm)
    except ValidationError as error:
        raise TrainingError(f"the algorithm {algorithm!r} of the journal is unknown to this version") from error
    chosen = settings if name == settings.algorithm else settings.as_algorithm(name)
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


def _newest(known: Mapping[str, Judgement], settings: RLSettings) -> list[str]:
    return list(known)[-watch_settings(settings).max_episodes :]


def _pairs(preferred: Preferences) -> list[frozenset[str]]:
    return [both for both, better in preferred.items() if better is not None]
