"""What each ``[rl.training] engine`` can do: settings are refused by it,."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from openhands_rl_plugin.config import registry

Temperatures = Literal["of each answer", "1"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Only:
    """The values of a key that an engine can have.

    ``why``: what follows the engine's name, with what to set. Sequences are compared without their order.
    """

    key: str
    values: tuple[object, ...]
    why: str

    def holds(self, values: Mapping[str, object]) -> bool:
        """Whether these settings are within it."""
        return _unordered(values[self.key]) in map(_unordered, self.values)


@dataclass(frozen=True)
class Engine:
    """What trains an adapter.

    ``requires``: its package with the versions that are known, as pip has it, and ``title``: that in words. ``lacks``:
    keys of ``[rl.training]`` that it has no counterpart for, which have to be at their defaults. ``here``: whether it
    trains on this machine.
    """

    requires: str = ""
    title: str = ""
    lacks: tuple[str, ...] = ()
    only: tuple[Only, ...] = ()
    temperatures: Temperatures = "of each answer"
    here: bool = True

    @property
    def package(self) -> str:
        """The name of the package."""
        return self.requires.partition(">")[0]


OURS_ALONE = (
    "method",
    "lora_variant",
    "adapt_experts",
    "router_aux_loss_coef",
    "kl",
    "entropy_coefficient",
    "max_tokens_per_micro_batch",
    "sharding",
    "nproc_per_node",
)

LOCAL = "local"


def engine_named(name: str) -> Engine:
    """What the engine of that name can do. Raises ``ConfigError``.

    Other packages add engines with the entry points ``openhands_rl_plugin.training_engines``. They name modules with
    ``LIMITS``, an ``Engine``, and ``make_trainer(training, settings, base_model, adapter)``.
    """
    return Engine() if name == LOCAL else registry.find("training_engines", name).LIMITS


def refused_by_engine(name: str, training: BaseModel) -> str:
    """What of ``[rl.training]`` the engine cannot do, and what to set, in one line; empty where it can do all."""
    engine, values, fields = engine_named(name), training.model_dump(), type(training).model_fields
    for key in engine.lacks:
        if values[key] != (default := fields[key].default):
            return f'engine = "{name}" has no {_setting(key, values)}: set {toml_value(default)}, or engine = "local"'
    return next((f'engine = "{name}" {each.why}' for each in engine.only if not each.holds(values)), "")


def toml_value(value: object) -> str:
    """A value as it is written in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"


def _setting(key: str, values: Mapping[str, object]) -> str:
    return f"{key} = {toml_value(values[key])}"


def _unordered(value: object) -> object:
    return frozenset(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
