"""The result of a check."""

from __future__ import annotations

from enum import StrEnum

from openhands_rl_plugin.core.types import Frozen


class Level(StrEnum):
    """``warn``: something optional does not work. ``fail``: something necessary does not work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(Frozen):
    """One line: what was checked, the result, and the remedy."""

    level: Level
    what: str
    said: str
    remedy: str = ""


def ok(what: str, said: str) -> Finding:
    """It works."""
    return Finding(level=Level.OK, what=what, said=said)


def warn(what: str, said: str, remedy: str) -> Finding:
    """Something optional does not work."""
    return Finding(level=Level.WARN, what=what, said=said, remedy=remedy)


def fail(what: str, said: str, remedy: str) -> Finding:
    """Something necessary does not work."""
    return Finding(level=Level.FAIL, what=what, said=said, remedy=remedy)
