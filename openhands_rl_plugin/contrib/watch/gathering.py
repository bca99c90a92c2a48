"""Which stored episodes a candidate may learn from, whether they are enough, and which algorithm follows from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from openhands_rl_plugin.config.rl import AlgorithmName, RLSettings, TrainingSettings
from openhands_rl_plugin.contrib.watch.judging import Judgement, KnownReward
from openhands_rl_plugin.contrib.watch.settings import watch_settings
from openhands_rl_plugin.contrib.watch.state import State
from openhands_rl_plugin.core.errors import StorageError, TrainingError
from openhands_rl_plugin.core.judgements import Preferences
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import HELD_OUT_SPLITS, TrajectoryFilter, TrajectorySummary
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.data.dataset import (
    Episodes,
    ExcludedEpisodes,
    TrainingDataset,
    build_dataset,
    load_episodes,
)
from openhands_rl_plugin.training.loop.lineage import PolicyLineage

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
