"""What the watch may spend in a day, and what it keeps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.contrib.watch.candidate import ROUND
from openhands_rl_plugin.contrib.watch.journal import Entry, WatchStep
from openhands_rl_plugin.contrib.watch.settings import WatchSettings
from openhands_rl_plugin.contrib.watch.state import State
from openhands_rl_plugin.core.errors import InfrastructureError, StorageError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.models.adapters.store import AdapterStore

_DAY = 86_400.0
_GIGABYTE = 1e9
_PLAYED = (WatchStep.MEASURED, WatchStep.REPLAYED)


class Spent(Frozen):
    """In the last 24 hours: tokens of held-out and replayed episodes, and hours of training."""

    tokens: float
    hours: float


class OverBudget(InfrastructureError):
    """Nothing is wrong: the day's budget is spent, or the disk is too full to begin something."""


def spent(entries: Sequence[Entry], now: float) -> Spent:
    """What the journal says of the last 24 hours before ``now`` (Unix seconds)."""
    recent = [each for each in entries if each.at > now - _DAY]
    tokens = sum(_number(each, "tokens") for each in recent if each.step in _PLAYED)
    seconds = sum(_number(each, "seconds") for each in recent if each.step is WatchStep.TRAINED)
    return Spent(tokens=tokens, hours=seconds / 3600)


def check_budget(settings: WatchSettings, entries: Sequence[Entry], place: Path) -> None:
    """Raise ``OverBudget`` where nothing that costs something may begin now; ``place``: the folder of the versions."""
    used = spent(entries, time.time())
    later = "; it goes on when less than that was spent in 24 hours"
    if settings.tokens_per_day and used.tokens >= settings.tokens_per_day:
        raise OverBudget(f"{used.tokens:,.0f} tokens of tokens_per_day = {settings.tokens_per_day:,} are spent{later}")
    if settings.hours_per_day and used.hours >= settings.hours_per_day:
        raise OverBudget(f"{used.hours:.2f} hours of hours_per_day = {settings.hours_per_day:g} are spent{later}")
    free = shutil.disk_usage(place if place.exists() else place.parent).free / _GIGABYTE
    if free < settings.min_free_gb:
        raise OverBudget(f"{free:.1f} GB are free at {place}, min_free_gb = {settings.min_free_gb:g}: free some space")


def remove_older(settings: WatchSettings, state: State, adapters: AdapterStore, name: str) -> tuple[str, ...]:
    """Remove versions that the watch made, all but the newest ``keep_versions``, the one in use and the last ones that
    were admitted, to which a rollback may go. Returns the names. Raises ``StorageError``."""
    current = adapters.current(name)
    kept = {*state.admitted[-settings.keep_versions :], *([current.name] if current is not None else [])}
    kept |= {state.round.candidate, state.round.parent or ""} if state.round is not None else set()
    made = [each for each in adapters.versions(name) if ROUND in each.metrics]
    gone: list[str] = []
    for each in made[: -settings.keep_versions]:
        if each.name not in kept:
            adapters.remove(each.name)
            gone.append(each.name)
    return tuple(gone)


def remove_training(folder: Path, number: int) -> None:
    """Remove checkpoints and metrics of a round that is over. Raises ``StorageError``."""
    try:
        shutil.rmtree(training_folder(folder, number))
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"{training_folder(folder, number)} cannot be removed: {error}") from error


def training_folder(folder: Path, number: int) -> Path:
    """Where a round's training keeps its checkpoints."""
    return folder / "training" / f"round-{number:04d}"


def _number(entry: Entry, name: str) -> float:
    value = entry.figures.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
