"""What each ``[rl.training] engine`` can do: settings are refused by it,."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

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


_OURS_ALONE = (
    "method",
    "lora_variant",
    "adapt_experts",
    "router_aux_loss_coef",
    "kl",
    "entropy_coefficient",
    "max_tokens_per_micro_batch",
    "sharding",
    "nproc_per_node",
    "context_parallel_size",
)

ENGINES: Mapping[str, Engine] = {
    "local": Engine(),
    "tinker": Engine(
        # Versions whose protocol is known: older ones send JSON, which SkyRL 0.4 refuses.
        requires="tinker>=0.25,<0.39",
        title="the client of the Tinker API",
        # The service answers with logprobs and nothing else.
        lacks=(*_OURS_ALONE, "gradient_checkpointing", "dtype", "keep_token_notes"),
        only=(
            # The service's own; a request cannot change it (thinkingmachines.ai/blog/lora, SkyRL's ``api.py``).
            Only("lora_alpha", (32,), 'trains with lora_alpha = 32 only: set that, or engine = "local"'),
            Only(
                "target_modules",
                (ATTENTION, MLP, (*ATTENTION, *MLP)),
                f"adapts all of {', '.join(ATTENTION)}, all of {', '.join(MLP)}, or both: set target_modules to that, "
                'or engine = "local"',
            ),
        ),
        temperatures="1",
        here=False,
    ),
}


def refused_by_engine(name: str, training: BaseModel) -> str:
    """What of ``[rl.training]`` the engine cannot do, and what to set, in one line; empty where it can do all."""
    engine, values, fields = ENGINES[name], training.model_dump(), type(training).model_fields
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
