"""Validation errors in words for the author of the input."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from pydantic import BaseModel, ValidationError

Location = tuple[str, ...]


def problems(error: ValidationError, model: type[BaseModel]) -> Iterator[tuple[Location, str]]:
    """Where each problem lies (keys only, without list indices) and what it is, on one line."""
    for one in error.errors(include_url=False):
        location = tuple(part for part in one["loc"] if isinstance(part, str))
        if one["type"] == "extra_forbidden":
            yield location, "unknown key;" + instead(location[-1], _model_at(model, location[:-1]).model_fields)
        elif one["type"] == "value_error":
            yield location, one["msg"].removeprefix("Value error, ")
        elif one["type"] == "missing":
            yield location, "is required"
        else:
            yield location, f"{one['msg'].replace('Input should', 'must')}, got {one['input']!r:.80}"


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """``unknown <what> 'nmae'; did you mean 'name'? available: ...``"""
    return f"unknown {what} {name!r};{instead(name, known)}"


def instead(name: str, known: Iterable[str]) -> str:
    """The nearest known name, and all of them."""
    available = sorted(known)
    nearest = difflib.get_close_matches(name, available, n=1, cutoff=0.5)
    hint = f" did you mean {nearest[0]!r}?" if nearest else ""
    return f"{hint} available: {', '.join(available) or 'none'}"


def _model_at(model: type[BaseModel], location: Location) -> type[BaseModel]:
    for key in location:
        annotation = model.model_fields[key].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return model
