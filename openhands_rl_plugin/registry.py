"""Names -> classes: a built-in table, then entry points of installed packages, then ``"module:Class"``.

Plugins are known as strings only, so asking for one imports that one and nothing else. A guest package joins with

    [project.entry-points."openhands_rl_plugin.strategies"]
    MyStrategy = "my_package.strategies:MyStrategy"
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Literal

from openhands_rl_plugin.errors import ConfigError, describe

Kind = Literal["strategies", "environments", "engines", "storages", "rewards"]

BUILTINS: Mapping[Kind, Mapping[str, str]] = {
    "strategies": {"StandardReAct": "openhands_rl_plugin.strategies.react:StandardReActStrategy"},
    "environments": {
        "agentgym": "openhands_rl_plugin.environments.agentgym:AgentGymClient",
        "web": "openhands_rl_plugin.environments.http:WebEnvClient",
        "webshop": "openhands_rl_plugin.environments.http:WebEnvClient",
    },
    "engines": {
        "openai": "openhands_rl_plugin.engines.openai:OpenAIEngine",
        "transformers": "openhands_rl_plugin.engines.transformers:TransformersEngine",
    },
    "storages": {"file": "openhands_rl_plugin.storages.file:FileTrajectoryStorage"},
    "rewards": {
        "return": "openhands_rl_plugin.rewards.outcome:ReturnReward",
        "success": "openhands_rl_plugin.rewards.outcome:SuccessReward",
    },
}

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z")


def names(kind: Kind) -> tuple[str, ...]:
    """Every name of a kind that can be asked for, without importing any of them."""
    return tuple(sorted({*BUILTINS[kind], *_guests(kind)}))


def check(kind: Kind, name: str) -> None:
    """Raise ``ConfigError`` unless something answers to ``name``. Imports nothing."""
    _target(kind, name)


def load(kind: Kind, name: str) -> type:
    """The class behind ``name``. Raises ``ConfigError`` for an unknown name or a target that cannot be imported."""
    target = _target(kind, name)
    module_name, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{_singular(kind)} {name!r} cannot be loaded from {target}: {describe(error)}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{_singular(kind)} {name!r}: {target} is not a class")
    return found


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """``unknown <what> 'nmae'; did you mean 'name'? available: ...``"""
    available = sorted(known)
    nearest = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    hint = f" did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {what} {name!r};{hint} available: {', '.join(available)}"


def _target(kind: Kind, name: str) -> str:
    if (builtin := BUILTINS[kind].get(name)) is not None:
        return builtin
    if (guest := _guests(kind).get(name)) is not None:
        return guest.value
    if _TARGET.match(name):
        return name
    raise ConfigError(unknown_name(_singular(kind), name, names(kind)) + ', or "module:Class"')


def _guests(kind: Kind) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"openhands_rl_plugin.{kind}")}


def _singular(kind: Kind) -> str:
    return {"strategies": "strategy"}.get(kind, kind.removesuffix("s"))
