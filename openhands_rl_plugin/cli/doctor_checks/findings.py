"""What a check says."""

from __future__ import annotations

from enum import StrEnum

from openhands_rl_plugin.core.types import Frozen


class Level(StrEnum):
    """How bad it is: ``fail`` does not work, ``warn`` will do for some uses."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(Frozen):
    """One line: what was looked at, what was seen, and what to do about it."""

    level: Level
    what: str
    said: str
    remedy: str = ""


def ok(what: str, said: str) -> Finding:
    """All is well."""
    return Finding(level=Level.OK, what=what, said=said)


def warn(what: str, said: str, remedy: str) -> Finding:
    """Something does not work that not everybody needs."""
    return Finding(level=Level.WARN, what=what, said=said, remedy=remedy)


def fail(what: str, said: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(level=Level.FAIL, what=what, said=said, remedy=remedy)
