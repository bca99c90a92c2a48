"""What another engine than ``"local"`` lacks of ``[rl.training]``, said in one way."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel


def refused_keys(engine: str, training: BaseModel, names: Sequence[str]) -> str:
    """Which of the keys, that the engine has no counterpart for, is set, and to what it has to be; empty: none is."""
    values, fields = training.model_dump(), type(training).model_fields
    for name in names:
        if values[name] != (default := fields[name].default):
            said = f"{name} = {toml_value(values[name])}"
            return f'engine = "{engine}" has no {said}: set {toml_value(default)}, or engine = "local"'
    return ""


def toml_value(value: object) -> str:
    """A value as it is written in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"
