"""A run's directory belongs to one set of options and to one process at a time.

So a run is never resumed with other options, and two processes never execute the same stages.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.training import TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, describe
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.evals.runs.run_files import lock_folder
from openhands_rl_plugin.training.loop.facts import FACTS

OPTIONS = "options.json"
_RUN = "run_id"
CHECKOUTS, EVALUATION = "checkouts", "evaluation"
_FOLDERS = ("trainer", "training", "logs", CHECKOUTS, EVALUATION)
_FILES = ("state.json", OPTIONS, _RUN, FACTS, "report.html")
_SHOWN = 3


def check_alone() -> None:
    """Raise ``ConfigError`` in one of several processes of a launcher, each of which would run a loop of its own."""
    count = os.environ.get("WORLD_SIZE", "1")
    if count.isdecimal() and int(count) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {count}, and a loop is one process: start it without torchrun and accelerate launch (or "
            "unset WORLD_SIZE); [rl.training] nproc_per_node is the number of processes that it trains in"
        )


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep other processes from the run in ``directory`` until the block ends. Raises ``ConfigError``."""
    _make(directory)
    lock = lock_folder(directory, "another process runs here; wait for it to end, or choose another --run-dir")
    try:
        yield
    finally:
        os.close(lock)


def identity_of(
    settings: RLSettings, tasks: JsonObject, *, model: Path | None, timeout: float, start: str = ""
) -> JsonObject:
    """What identifies a run, for ``claim``: all settings but addresses, paths and concurrency; ``start``: a version."""
    where = {"env_port": True, "env_server_base": True, "max_workers": True, "executor": True, "verifier": True}
    kept = {"model", "adapter", "adapters_path"}
    serving = {name: True for name in type(settings.serving).model_fields if name not in kept}
    loop = {"patience": True, "save_total_limit": True}
    training = {"nproc_per_node": True}
    rl = settings.model_dump(mode="json", exclude={**where, "serving": serving, "loop": loop, "training": training})
    weights = str(model.resolve()) if model is not None else None
    return {"tasks": tasks, "timeout": timeout, "model": weights, "rl": rl, **({"start": start} if start else {})}


def claim(directory: Path, options: JsonObject) -> None:
    """Bind ``directory`` to ``options``. Raises ``ConfigError`` when it is bound to others, or cannot be made."""
    _make(directory)
    noted = directory / OPTIONS
    if not noted.exists():
        write_file(noted, json.dumps(options, indent=1))
    elif different := [*_differences(_renamed(noted_options(directory)), options, _usual())]:
        raise ConfigError(
            f"{directory} holds a run with other options ({'; '.join(different[:_SHOWN])}): give the same ones to "
            "resume it, another --run-dir, or --fresh to start over"
        )


def noted_options(directory: Path) -> JsonObject:
    """What ``directory`` is bound to; empty where that cannot be read."""
    try:
        found = json.loads((directory / OPTIONS).read_text())
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) else {}


def run_id_of(directory: Path, kind: str = "loop") -> str:
    """The id of the run in ``directory``, which begins with its ``kind``: created once, unique in a shared store."""
    noted = directory / _RUN
    if not noted.exists():
        write_file(noted, f"{kind}-{uuid.uuid4().hex[:12]}")
    return noted.read_text().strip()


def forget(directory: Path) -> None:
    """Delete the files that a run is resumed from; its episodes and adapters stay."""
    for name in _FOLDERS:
        shutil.rmtree(directory / name, ignore_errors=True)
    for name in _FILES:
        (directory / name).unlink(missing_ok=True)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be made ({describe(error)}): choose another --run-dir") from error


def _renamed(options: JsonObject) -> JsonObject:
    """The options of a run that an older version began, with today's names."""
    rl = options.get("rl")
    if isinstance(rl, dict) and isinstance(training := rl.get("training"), dict):
        return {**options, "rl": {**rl, "training": TrainingSettings.with_new_names(training)}}
    return options


def _usual() -> JsonObject:
    return {"rl": RLSettings().model_dump(mode="json")}


def _differences(before: object, now: object, usual: object, at: str = "") -> Iterator[str]:
    """``"training.seed: 0, now 1"`` for each value that differs. ``usual``: what was so before it could be set."""
    if isinstance(before, dict) and isinstance(now, dict):
        known = usual if isinstance(usual, dict) else {}
        for key in dict.fromkeys((*before, *now)):
            former = before.get(key, known.get(key) if key in now else None)
            yield from _differences(former, now.get(key), known.get(key), f"{at}.{key}" if at else key)
    elif before != now:
        yield f"{at}: {json.dumps(before):.40}, now {json.dumps(now):.40}"
