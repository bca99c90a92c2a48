"""Which options of ``[rl.training]`` have an effect on which algorithm, so that one without is refused.

``imitate_above`` is not here: what reinforces or compares may end up as fine-tuning where it finds nothing to compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import BaseModel

AlgorithmName = Literal[
    "sft",
    "rejection-sampling",
    "reinforce++",
    "reinforce++-baseline",
    "rloo",
    "grpo",
    "dr-grpo",
    "dapo",
    "gspo",
    "cispo",
    "dpo",
]

IMITATING: tuple[AlgorithmName, ...] = ("sft", "rejection-sampling")
_ALL: tuple[AlgorithmName, ...] = get_args(AlgorithmName)
_REINFORCING: tuple[AlgorithmName, ...] = tuple(name for name in _ALL if name not in (*IMITATING, "dpo"))
_PPO: tuple[AlgorithmName, ...] = tuple(name for name in _REINFORCING if name not in ("gspo", "cispo"))


@dataclass(frozen=True)
class _Effect:
    """``on``: the algorithms that look at an option; ``others`` says what is true of all the others."""

    on: tuple[AlgorithmName, ...]
    others: str

    @property
    def remedy(self) -> str:
        if self.on == _REINFORCING:
            return "an algorithm that reinforces"
        if len(self.on) > len(_ALL) / 2:
            return "another algorithm than " + ", ".join(f'"{name}"' for name in _ALL if name not in self.on)
        return " or ".join(f'"{name}"' for name in self.on)


_EFFECTS: Mapping[str, _Effect] = {
    "clip_low": _Effect((*_PPO, "gspo"), "has cispo_low for its ratio, or no ratio"),
    "clip_high": _Effect(_REINFORCING, "has no ratio"),
    "negative_scale": _Effect(_REINFORCING, "has no advantages"),
    "dual_clip": _Effect(_PPO, "has no second bound of its ratio"),
    "cispo_low": _Effect(("cispo",), "has clip_low for its ratio, or no ratio"),
    "variance": _Effect(("reinforce++", "reinforce++-baseline"), "whitens nothing"),
    "std_epsilon": _Effect(("grpo", "dapo", "gspo", "cispo"), "divides by no standard deviation"),
    "aggregation": _Effect(tuple(name for name in _ALL if name != "dpo"), "counts every pair the same"),
    "kl": _Effect(_REINFORCING, "measures no divergence from the base model"),
    "kl_coefficient": _Effect(_REINFORCING, "measures no divergence from the base model"),
    "kl_in": _Effect(_REINFORCING, "measures no divergence from the base model"),
    "correction": _Effect(_REINFORCING, "has no importance weights"),
    "correction_level": _Effect(_REINFORCING, "has no importance weights"),
    "correction_low": _Effect(_REINFORCING, "has no importance weights"),
    "correction_high": _Effect(_REINFORCING, "has no importance weights"),
    "step_rewards": _Effect(_REINFORCING, "weights no turns"),
    "discount": _Effect(_REINFORCING, "weights no turns"),
    "state_weight": _Effect(_REINFORCING, "weights no turns"),
    "tree": _Effect((*_REINFORCING, "dpo"), "imitates whole episodes"),
    "tree_weight": _Effect(_REINFORCING, "has no advantages"),
    "tree_visits": _Effect((*_REINFORCING, "dpo"), "imitates whole episodes"),
    "keep_best": _Effect(("rejection-sampling",), "takes all that it can learn from"),
    "dpo_beta": _Effect(("dpo",), "compares no pairs"),
}

# Options of an option: the other one, and the values by which they have an effect.
_NEEDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "kl_coefficient": ("kl", ("k1", "k2", "k3")),
    "kl_in": ("kl", ("k1", "k2", "k3")),
    "correction_level": ("correction", ("truncate", "mask")),
    "correction_low": ("correction", ("mask",)),
    "correction_high": ("correction", ("truncate", "mask")),
    "tree_weight": ("tree", ("branches",)),
    "tree_visits": ("tree", ("branches",)),
}


def without_effect(settings: BaseModel, algorithm: AlgorithmName) -> Iterator[tuple[str, str]]:
    """The options that say something else than their default and that nothing would look at, and why not."""
    for name, effect in _EFFECTS.items():
        if not _is_set(settings, name):
            continue
        leave = f"leave {_toml(_default(settings, name))}"
        said = f"{name} = {_toml(_value(settings, name))} has no effect"
        if algorithm not in effect.on:
            yield (
                name,
                f'{said} on algorithm = "{algorithm}", which {effect.others}: {leave}, or choose {effect.remedy}',
            )
        elif name in _NEEDS and _value(settings, _NEEDS[name][0]) not in _NEEDS[name][1]:
            other, values = _NEEDS[name]
            wanted = " or ".join(map(_toml, values))
            yield name, f"{said} where {other} = {_toml(_value(settings, other))}: {leave}, or set {other} = {wanted}"
    aggregation = _value(settings, "aggregation")
    fixed = aggregation == "fixed" or (algorithm == "dr-grpo" and aggregation == "auto")
    if _is_set(settings, "fixed_length") and not fixed:
        said = f"fixed_length = {_toml(_value(settings, 'fixed_length'))} has no effect"
        yield "fixed_length", f'{said} where sequences count otherwise: leave 0, or set aggregation = "fixed"'


def _value(settings: BaseModel, name: str) -> object:
    return getattr(settings, name)


def _default(settings: BaseModel, name: str) -> object:
    return type(settings).model_fields[name].default


def _is_set(settings: BaseModel, name: str) -> bool:
    return _value(settings, name) != _default(settings, name)


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"
