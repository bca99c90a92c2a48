"""The statement of a localization task: the message of its commit without what names the places of the fix."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import NamedTuple

from openhands_rl_plugin.core.records import Places

GAP = "[...]"
"""What stands in the place of a name."""

_LEAST_WORDS = 5
_SHORTEST_NAME = 3
_LONGEST = 4000
_FIX = re.compile(
    r"\b(?:fix(?:es|ed|ing)?|bug(?:s|fix(?:es)?)?|regressions?|crash(?:es|ed|ing)?|errors?|exceptions?|incorrect(?:ly)?"
    r"|wrong(?:ly)?|fail(?:s|ed|ing|ure)?|broken|breaks?|correct(?:s|ed|ly)?|handle(?:s|d)?|properly|prevents?"
    r"|avoids?|leaks?|issue|raises?)\b",
    re.IGNORECASE,
)
_TRAILER = re.compile(r"(?:[A-Z][\w-]+-by|Change-Id|Reviewed-on|Co-authored-by):", re.IGNORECASE)
_ADDRESS = re.compile(r"\b(?:https?|git|ssh)://\S+|\S+@\S+\.\w+")
_WORD = re.compile(r"\w+")


class Statement(NamedTuple):
    """A statement, and how many times a place was named in the message."""

    text: str
    taken_out: int


def is_fix(message: str) -> bool:
    """Whether a message says that something was wrong."""
    return _FIX.search(message) is not None


def statement_of(message: str, fix: Places) -> Statement | None:
    """The message without trailers, addresses and names of the fix; ``None`` where it then says nothing.

    Out go, as whole words in any case: the paths of the fix's files, their names with and without ending, the names of
    their folders, and every part of the names of its classes and functions.
    """
    lines = [line for line in message.strip().splitlines() if not _TRAILER.match(line.strip())]
    text = _ADDRESS.sub(GAP, "\n".join(lines).strip()[:_LONGEST])
    names = sorted(_names(fix), key=lambda name: (-len(name), name))
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, names))})(?!\w)", re.IGNORECASE)
    text, taken_out = pattern.subn(GAP, text)
    text = re.sub(rf"{re.escape(GAP)}(?:[./:]+(?:py\b)?{re.escape(GAP)})+", GAP, text)
    said = [word for word in _WORD.findall(text.replace(GAP, " ")) if not word.isdigit()]
    return Statement(text, taken_out) if len(said) >= _LEAST_WORDS else None


def _names(fix: Places) -> Iterable[str]:
    """What would name a place. Names that are too short to tell are left out, as are ``__init__`` and its like."""
    found = {*fix.files}
    for path in map(PurePosixPath, fix.files):
        found |= {path.name, path.stem, *path.parent.parts}
    for place in (*fix.modules, *fix.functions):
        name = place.partition("::")[2]
        found |= {name, *name.split(".")}
    return [name for name in found if len(name) >= _SHORTEST_NAME and name.strip("_.")]
