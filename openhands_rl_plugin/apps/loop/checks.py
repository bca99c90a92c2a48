"""What has to hold before a run begins: settings that go together, and a folder that no other run has."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path

from pydantic import JsonValue

from openhands_rl_plugin.config.build import make_reward, make_strategy
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.rollout.scoring import refuse_labels
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.loop.plan import FACTS


def check_trainable(settings: RLSettings) -> None:
    """Raise ``ConfigError`` for settings that a loop cannot train with, or whose adapter could not be served."""
    refuse_labels(make_reward(settings.reward), "nobody labels while a loop runs")
    training = settings.training
    training.check_servable()
    kind, searches = algorithm_of(training).kind, getattr(make_strategy(settings), "selects", False)
    if kind == "preference":
        raise ConfigError(
            f'[rl.training] algorithm = "{training.algorithm}" learns from pairs, which a loop does not make: choose '
            '"reinforce++-baseline", "grpo" or another one, or train on stored episodes with `openhands-rl train`'
        )
    # What a search considered is compared with each other, in every episode.
    proposals = training.tree == "proposals" and searches
    if (
        settings.loop.samples_per_task < 2
        and algorithm_of(training).estimator.grouped
        and kind == "reinforcement"
        and not proposals
    ):
        raise ConfigError(
            f'[rl.loop] samples_per_task = 1: algorithm = "{training.algorithm}" compares the episodes of a task: set '
            "2 or more"
        )
    if kind == "reinforcement" and training.tree == "path" and searches:
        raise ConfigError(
            f'[rl] rollout_strategy = "{settings.rollout_strategy}" chooses among what the policy sampled, so its '
            'episodes are no samples of the policy: set [rl.training] tree = "proposals", or act '
            "without a search (StandardReAct)"
        )


def evaluated_by(settings: RLSettings) -> RLSettings | None:
    """The settings that held-out tasks are rolled out with, where ``evaluation_strategy`` makes them others."""
    name = settings.loop.evaluation_strategy
    if not name or (name, {}) == (settings.rollout_strategy, settings.strategy):
        return None
    return settings.model_copy(update={"rollout_strategy": name, "strategy": {}})


OPTIONS = "options.json"
_RUN = "run_id"
CHECKOUTS, EVALUATION = "checkouts", "evaluation"
_FOLDERS = ("trainer", "training", "logs", CHECKOUTS, EVALUATION)
_FILES = ("state.json", OPTIONS, _RUN, FACTS, "report.html")


def identity_of(
    settings: RLSettings, tasks: JsonObject, *, model: Path | None, timeout: float, start: str = ""
) -> JsonObject:
    """The identity of a run, for ``claim``: all settings but addresses, paths and concurrency; ``start``: a version."""
    where = {"env_port": True, "env_server_base": True, "max_workers": True, "executor": True, "verifier": True}
    kept = {"model", "adapter", "adapters_path"}
    serving = {name: True for name in type(settings.serving).model_fields if name not in kept}
    loop = {"patience": True}
    rl = settings.model_dump(mode="json", exclude={**where, "serving": serving, "loop": loop})
    weights = str(model.resolve()) if model is not None else None
    return {"tasks": tasks, "timeout": timeout, "model": weights, "rl": rl, **({"start": start} if start else {})}


def claim(directory: Path, options: JsonObject) -> None:
    """Bind ``directory`` to ``options``. Raises ``ConfigError`` when it is bound to others."""
    directory.mkdir(parents=True, exist_ok=True)
    noted = directory / OPTIONS
    if not noted.exists():
        write_file(noted, json.dumps(options, indent=1))
    elif others := _differences(json.loads(noted.read_text()), options):
        raise ConfigError(
            f"{directory} holds a run with other options ({', '.join(others)}; see {OPTIONS} there): give the same "
            "ones to resume it, another --run-dir, or --fresh to start over"
        )


def _differences(one: JsonValue, other: JsonValue, name: str = "") -> list[str]:
    """The names of the keys with different values, such as ``rl.training.seed``."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return [] if one == other else [name]
    pairs = [(f"{name}.{key}".lstrip("."), one.get(key), other.get(key)) for key in sorted({*one, *other})]
    return [each for key, value, its in pairs for each in _differences(value, its, key)]


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
