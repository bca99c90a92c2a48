"""Notes the arguments of a package's functions while its tests and doctests run. It imports nothing of this package.

``recorder.py GIVEN RESULT``: ``GIVEN`` is JSON, ``{"modules", "tests", "seconds"}``: names of modules, pytest's
arguments and the time for all. ``RESULT`` becomes ``{"calls", "broken", "late"}``: ``path:function`` -> list of calls,
each ``[positional, keywords]`` with the text of literals; files of tests that could not be imported -> why; whether
time was up.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import json
import math
import os
import signal
import sys
from types import CodeType, FrameType
from typing import Any

MOST_CALLS, MOST_SEEN, LONGEST = 40, 2000, 140
_LONGEST_REASON = 200
_LATE: list[int] = []
"""Not empty when time is up."""
_ATOMS = (str, bytes, int, bool, type(None))


def literal(value: Any, depth: int = 0) -> bool:
    """Whether ``repr`` of a value is a literal that gives it again."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is float:
        return math.isfinite(value)
    if depth > 4 or kind not in (list, tuple, dict, set) or len(value) > 40:
        return False
    if kind is set and not value:
        return False
    parts = [*value, *value.values()] if kind is dict else value
    return all(literal(part, depth + 1) for part in parts)


class CallRecorder:
    """Notes the calls of module-level functions whose file is below ``folder``."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.join(os.path.realpath(folder), "")
        self.calls: dict[str, dict[str, None]] = {}
        self.seen: dict[CodeType, int] = {}

    def started(self, code: CodeType, offset: int) -> object:
        """The callback for the start of a function."""
        disable = sys.monitoring.DISABLE
        if code.co_qualname != code.co_name or not code.co_filename.startswith(self.folder):
            return disable
        seen = self.seen[code] = self.seen.get(code, 0) + 1
        if seen > MOST_SEEN or code.co_name.startswith(("test_", "<", "__")):
            return disable
        frame = sys._getframe(1)
        function = frame.f_globals.get(code.co_name)
        if getattr(function, "__code__", None) is not code:
            return None
        calls = self.calls.setdefault(f"{code.co_filename[len(self.folder) :]}:{code.co_name}", {})
        if len(calls) < MOST_CALLS and (text := _call(code, frame, function)) is not None:
            calls.setdefault(text)
        return None


def _call(code: CodeType, frame: FrameType, function: Any) -> str | None:
    """The arguments as they would be written; defaults are left out."""
    names, values = code.co_varnames, frame.f_locals
    plain, total = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    defaults = dict(zip(reversed(names[:plain]), reversed(function.__defaults__ or ()), strict=False))
    keyword_defaults = function.__kwdefaults__ or {}
    positional, keywords = [], {}
    rest = values[names[total]] if code.co_flags & 4 else ()
    others = values[names[total + bool(code.co_flags & 4)]] if code.co_flags & 8 else {}
    given = [*names[:plain], *names[plain:total]]
    if not all(literal(values.get(name, max)) for name in given) or not (literal(rest) and literal(others)):
        return None
    for at, name in enumerate(names[:plain]):
        usual = name in defaults and literal(defaults[name]) and repr(defaults[name]) == repr(values[name])
        if usual and not rest:
            continue
        if at == len(positional):
            positional.append(values[name])
        elif at < code.co_posonlyargcount:
            return None
        else:
            keywords[name] = values[name]
    for name in names[plain:total]:
        if repr(keyword_defaults.get(name, max)) != repr(values[name]):
            keywords[name] = values[name]
    text = json.dumps(
        [[repr(each) for each in (*positional, *rest)], {k: repr(v) for k, v in (keywords | others).items()}]
    )
    return text if len(text) <= LONGEST else None


def main(given: str, result: str) -> None:
    """Run doctests of the modules, then pytest, and write what was recorded, also when time is up."""
    with open(given, encoding="utf-8") as file:
        wanted = json.load(file)
    recorder = CallRecorder(os.getcwd())
    sys.monitoring.use_tool_id(3, "recorder")
    sys.monitoring.register_callback(3, sys.monitoring.events.PY_START, recorder.started)
    sys.monitoring.set_events(3, sys.monitoring.events.PY_START)
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(wanted["seconds"])
    broken: dict[str, str] = {}
    with contextlib.suppress(BaseException):
        _run(wanted["modules"], wanted["tests"], broken)
    signal.alarm(0)
    sys.monitoring.set_events(3, 0)
    calls = {name: [json.loads(each) for each in found] for name, found in recorder.calls.items()}
    with open(result, "w", encoding="utf-8") as file:
        json.dump({"calls": calls, "broken": broken, "late": bool(_LATE)}, file)
    os._exit(0)  # threads that tests left would keep it


def _stop(number: int, frame: object) -> None:
    _LATE.append(number)
    raise KeyboardInterrupt


def _run(modules: list[str], tests: list[str], broken: dict[str, str]) -> None:
    for name in modules:
        with contextlib.suppress(Exception, SystemExit), contextlib.redirect_stdout(io.StringIO()):
            doctest.testmod(importlib.import_module(name), report=False)
    if tests:
        import pytest

        words = ["-q", "--maxfail=300", "-o", "addopts=", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        pytest.main([*words, *tests], plugins=[_Broken(broken)])


class _Broken:
    """A plugin of pytest that notes which files could not be collected."""

    def __init__(self, found: dict[str, str]) -> None:
        self._found = found

    def pytest_collectreport(self, report: Any) -> None:
        """A file was collected, or not."""
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.strip()]
            self._found[report.nodeid] = lines[-1].removeprefix("E").strip()[:_LONGEST_REASON] if lines else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
