"""Which stored episodes a candidate may learn from, whether they are enough, and which algorithm follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from openhands_rl_plugin.apps.watch.judging import Judgement, KnownReward
from openhands_rl_plugin.apps.watch.state import State
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import HELD_OUT_SPLITS, TrajectoryFilter, TrajectorySummary
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.data.dataset import TrainingDataset, build_dataset, load_episodes

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
        current = adapters.get(current).parent
    return tuple(names)


async def candidates(
    storage: TrajectoryStorage, settings: RLSettings, state: State, lineage: tuple[str, ...]
) -> tuple[str, ...]:
    """Ids of the episodes that may be learnt from, oldest first: ended without a failure, not of tasks that only
    measure, sampled by the base model or by a version in ``lineage``, and not learnt from yet. Raises ``StorageError``.
    """
    allowed = {settings.serving.model, *lineage}

    def may(summary: TrajectorySummary) -> bool:
        own = summary.policy.base_model == settings.serving.model and summary.policy.served_name in allowed
        return own and summary.split not in HELD_OUT_SPLITS and summary.id not in state.learnt

    found = [each.id async for each in storage.summaries(TrajectoryFilter(failed=False)) if may(each)]
    return tuple(found[-_LOOKED_AT * settings.watch.max_episodes :])


async def material(
    storage: TrajectoryStorage, settings: RLSettings, known: Mapping[str, Judgement]
) -> tuple[Material | None, str]:
    """The best that can be trained now, or ``None`` and why not. Raises ``StorageError``."""
    successes = [name for name, judgement in known.items() if judgement.good][-settings.watch.max_episodes :]
    if not successes:
        return None, f"none of {len(known)} judged episodes is a success"
    chosen = settings.training.as_fine_tuning().model_copy(update={"imitate_above": 0.5})
    values = dict.fromkeys(successes, 1.0)
    dataset = await dataset_of(storage, settings, chosen, values)
    least = settings.watch.min_successes
    if dataset.used < least:
        left = dataset.excluded.in_words()
        return None, f"{dataset.used} successes can be imitated, {least} are needed; left out: {left}"
    return Material(chosen, values, f"{dataset.used} successes to imitate"), ""


async def dataset_of(
    storage: TrajectoryStorage, settings: RLSettings, training: TrainingSettings, values: Mapping[str, float]
) -> TrainingDataset:
    """The dataset of these episodes. The same ids and values give the same one, in whatever process."""
    episodes = await load_episodes(
        storage,
        TrajectoryFilter(ids=tuple(values)),
        base_model=settings.serving.model,
        adapter=settings.serving.adapter,
        reward=KnownReward(values),
    )
    return build_dataset(episodes, training)
