"""A run's directory belongs to one set of options, so that a run is never continued as another one."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from openhands_rl_plugin.errors import ConfigError, describe
from openhands_rl_plugin.types import JsonObject

OPTIONS = "options.json"
_RUN = "run_id"
CHECKOUTS, EVALUATION = "checkouts", "evaluation"
_FOLDERS = ("trainer", "training", "logs", CHECKOUTS, EVALUATION)
_FILES = ("state.json", OPTIONS, _RUN)
_SHOWN = 3


def claim(directory: Path, options: JsonObject) -> None:
    """Bind ``directory`` to ``options``. Raises ``ConfigError`` when it is bound to others, or cannot be made."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made ({describe(error)}): choose another --run-dir") from error
    noted = directory / OPTIONS
    if not noted.exists():
        _write(noted, json.dumps(options, indent=1))
    elif different := [*_differences(_read(noted), options)]:
        raise ConfigError(
            f"{directory} holds a run with other options ({'; '.join(different[:_SHOWN])}): give the same ones to "
            "resume it, another --run-dir, or --fresh to start over"
        )


def run_id_of(directory: Path) -> str:
    """The id of the run in ``directory``, made once; no other run of a shared store has it."""
    noted = directory / _RUN
    if not noted.exists():
        _write(noted, f"loop-{uuid.uuid4().hex[:12]}")
    return noted.read_text().strip()


def forget(directory: Path) -> None:
    """Delete what a run needs to go on, and only that: its episodes and adapters stay."""
    for name in _FOLDERS:
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in _FILES:
        (directory / name).unlink(missing_ok=True)


def _read(file: Path) -> JsonObject:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) else {}


def _write(file: Path, text: str) -> None:
    fresh = file.with_name(f".{file.name}.new")
    fresh.write_text(text)
    os.replace(fresh, file)


def _differences(before: object, now: object, at: str = "") -> Iterator[str]:
    """``"training.seed: 0, now 1"`` for each value that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*before, *now)):
            yield from _differences(before.get(key), now.get(key), f"{at}.{key}" if at else key)
    elif before != now:
        yield f"{at}: {json.dumps(before):.40}, now {json.dumps(now):.40}"
