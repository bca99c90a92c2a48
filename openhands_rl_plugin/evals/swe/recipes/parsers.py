"""Log parsers: log text -> status of each test. Local ones, and those of the ``swebench`` package by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from openhands_rl_plugin.core.errors import ConfigError

Statuses = dict[str, str]
"""Test -> PASSED, FAILED, ERROR, SKIPPED or XFAIL."""
Parser = Callable[[str], Statuses]

STATUSES = ("FAILED", "PASSED", "SKIPPED", "ERROR", "XFAIL")

_COLOUR = re.compile(r"\[(\d+)m")
_CONTROL = str.maketrans("", "", "".join(map(chr, range(1, 32))))
_PROGRESS = re.compile(r"FAILED\s*\[.*?\]")


def parse_pytest(log: str) -> Statuses:
    """The summary of ``pytest -rA``: the status, then the test up to the first blank."""
    return dict(found for line in log.split("\n") if (found := _summary_line(line)) is not None)


def parse_pytest_pydantic(log: str) -> Statuses:
    """pydantic's runs: colours in the summary, a percentage after FAILED, and lines that end with the status."""
    found: Statuses = {}
    for raw in log.split("\n"):
        line = _PROGRESS.sub("FAILED", _COLOUR.sub("", raw).translate(_CONTROL))
        if (summary := _summary_line(line)) is not None:
            found[summary[0]] = summary[1]
        elif not line.startswith(STATUSES) and line.endswith(STATUSES) and len(words := line.split()) > 1:
            found[words[0]] = words[1]
    return found


def _summary_line(line: str) -> tuple[str, str] | None:
    """The test and its status; ``None`` for a line that does not begin with a status and a test."""
    if not line.startswith(STATUSES):
        return None
    words = (line.replace(" - ", " ") if line.startswith("FAILED") else line).split()
    return (words[1], words[0]) if len(words) > 1 else None


_OWN: Mapping[str, Parser] = {"pytest": parse_pytest, "pytest_pydantic": parse_pytest_pydantic}


def parser_of(name: str) -> Parser:
    """The parser of a recipe. Raises ``ConfigError`` for an unknown one, ``MissingExtraError`` without ``swebench``."""
    if name in _OWN:
        return _OWN[name]
    from openhands_rl_plugin.evals.swe.recipes.swe_bench import swebench

    official = getattr(swebench("log_parsers.python"), name, None) if name.startswith("parse_log_") else None
    if official is None:
        raise ConfigError(f"unknown log_parser {name!r}; own ones: {', '.join(_OWN)}, and those of swebench 4.1.0")
    return lambda log: official(log, None)
