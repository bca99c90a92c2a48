"""Gymnasium's spaces as text: what actions there are, which one a text is, and what an observation says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from openhands_rl_plugin.environments.gyms.episode import plain
from openhands_rl_plugin.environments.http.client import RefusedActionError

_COLOURED = re.compile(r"\x1b\[[\d;]*[1-9][\d;]*m(.*?)\x1b\[0?m", re.DOTALL)
_MOST_CHARACTERS = 128
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")


class ActionSpace:
    """The actions of a space, with ``names`` for those of a ``Discrete`` one, in their order."""

    def __init__(self, space: Any, names: Sequence[str] = ()) -> None:
        self._space = space
        self._kind = type(space).__name__
        start = int(getattr(space, "start", 0)) if self._kind == "Discrete" else 0
        self._first, self._count = start, int(space.n) if self._kind == "Discrete" else 0
        self._names = {name.lower(): start + at for at, name in enumerate(names[: self._count])}

    def language(self) -> str:
        """The description for the prompt."""
        if self._kind == "Discrete":
            if self._names:
                return ", ".join(f"{name} ({value})" for name, value in self._names.items())
            return f"a whole number from {self._first} to {self._first + self._count - 1}"
        if self._kind == "Text":
            characters = "".join(sorted(self._space.character_set))[:_MOST_CHARACTERS]
            return f"a text of {self._space.min_length} to {self._space.max_length} of the characters {characters!r}"
        return f"JSON of an element of {self._space}"

    def read(self, text: str) -> Any:
        """The element that ``text`` names. Raises ``RefusedActionError``, which describes the actions."""
        text = text.strip()
        if self._kind == "Text":
            action: Any = text
        elif self._kind == "Discrete":
            action = self._names.get(text.lower().strip("\"'.!"), _whole(text))
        else:
            action = _element(self._space, _json(text))
        if action is None or not self._space.contains(action):
            raise RefusedActionError(f"Invalid action: it must be {self.language()}.")
        return action


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _element(space: Any, value: Any) -> Any:
    """JSON as a value of ``space``: arrays where it has them, tuples and mappings part by part."""
    kind = type(space).__name__
    if kind == "Dict" and isinstance(value, dict) and value.keys() == space.spaces.keys():
        return {name: _element(part, value[name]) for name, part in space.spaces.items()}
    if kind == "Tuple" and isinstance(value, list) and len(value) == len(space.spaces):
        return tuple(_element(part, each) for part, each in zip(space.spaces, value, strict=True))
    if kind in ("Discrete", "Text"):
        return value
    if getattr(space, "shape", None) is not None and isinstance(value, list | int | float):
        import numpy

        try:
            found = numpy.asarray(value)
            # A fraction that an integer space would cut off is no element of it.
            kept = found.astype(space.dtype)
            return kept if (kept.shape == space.shape and (kept == found).all()) or space.dtype.kind == "f" else None
        except (TypeError, ValueError, OverflowError):
            return None
    return None


def as_text(value: Any) -> str:
    """An observation: text as it is, a mapping with one line a part, anything else as JSON."""
    found = plain(value)
    if isinstance(found, str):
        return found
    if isinstance(found, dict):
        return "\n".join(f"{name}: {as_text(each)}" for name, each in found.items())
    return json.dumps(found, ensure_ascii=False)


def without_colours(drawing: str) -> str:
    """A drawing for terminals as plain text: what is coloured, such as the player's cell, is put in brackets."""
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", drawing)).strip("\n")
