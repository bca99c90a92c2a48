"""A pytest plugin that writes the results of a test run as JSON. It imports nothing of this package.

``OPENHANDS_RL_REPORT`` names the file. Each failure has the line of the test, the values of its arguments and the
exception. With ``OPENHANDS_RL_COVERED`` set, executed lines are counted as well.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
import types

import pytest

_ROOT = os.getcwd()
_MOST_FAILURES, _MOST_TEXT = 60, 4_000
_SCALARS = (str, int, float, bool, bytes, type(None))
_outcomes: dict[str, str] = {}
_failures: dict[str, dict[str, object]] = {}
_broken: dict[str, str] = {}
_covered: dict[str, dict[int, int]] = {}
"""Path -> line -> how many tests ran it; ``ALWAYS`` where it ran before the first one."""
_running: list[str] = []
ALWAYS = 1_000_000


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("OPENHANDS_RL_COVERED") and hasattr(sys, "monitoring"):
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "openhands-rl")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, _on_line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)


def _on_line(code: types.CodeType, line: int) -> object:
    if code.co_filename.startswith(_ROOT):
        counts = _covered.setdefault(os.path.relpath(code.co_filename, _ROOT), {})
        counts[line] = counts.get(line, 0) + 1 if _running else ALWAYS
    return sys.monitoring.DISABLE


def pytest_runtest_logstart(nodeid: str) -> None:
    _running.append(nodeid)
    if os.environ.get("OPENHANDS_RL_COVERED") and hasattr(sys, "monitoring"):
        sys.monitoring.restart_events()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        said = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
        _broken[report.nodeid] = said[-1][:_MOST_TEXT] if said else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    before = _outcomes.get(item.nodeid)
    if report.when == "call":
        expected = hasattr(report, "wasxfail")
        _outcomes[item.nodeid] = ("xfailed" if report.skipped else "xpassed") if expected else report.outcome
    elif report.failed:
        _outcomes[item.nodeid] = "error"
    elif report.skipped and before is None:
        _outcomes[item.nodeid] = "skipped"
    if report.failed and call.excinfo is not None and len(_failures) < _MOST_FAILURES and item.nodeid not in _failures:
        _failures[item.nodeid] = _failure(item, call.excinfo.value)
    return report


def _failure(item: pytest.Item, error: BaseException) -> dict[str, object]:
    function = getattr(item, "function", None)
    found: dict[str, object] = {
        "error": type(error).__name__,
        "message": _text(error),
        "file": os.path.relpath(str(item.path), _ROOT),
        "line": 0,
        "values": {},
    }
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    at = error.__traceback__
    while at is not None and code is not None:
        if at.tb_frame.f_code is code:
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            values = {name: at.tb_frame.f_locals[name] for name in names if name in at.tb_frame.f_locals}
            found["line"] = at.tb_lineno
            plain = {name: repr(value) for name, value in values.items() if _is_plain(value)}
            found["values"] = {**plain, **_attributes(values.get("self"), code)}
        at = at.tb_next
    return found


def _attributes(case: object, code: types.CodeType) -> dict[str, str]:
    """The plain values and the classes that a test reads from ``self``; a class as ``module:Name``."""
    found: dict[str, str] = {}
    for name in code.co_names if case is not None else ():
        value = inspect.getattr_static(case, name, case)
        if isinstance(value, type):
            found[f"self.{name}"] = f"{value.__module__}:{value.__qualname__}"
        elif _is_plain(value):
            found[f"self.{name}"] = repr(value)
    return found


def _text(error: BaseException) -> str:
    """The message, also of an exception that the package under test has broken."""
    return "".join(traceback.format_exception_only(error)).strip().partition(": ")[2][:_MOST_TEXT]


def _is_plain(value: object, depth: int = 0) -> bool:
    if type(value) in _SCALARS:
        return len(repr(value)) <= 300
    if depth < 3 and isinstance(value, list | tuple) and type(value) in (list, tuple):
        return len(value) <= 12 and all(_is_plain(each, depth + 1) for each in value)
    if depth < 3 and type(value) is dict:
        return len(value) <= 12 and all(_is_plain(each, depth + 1) for pair in value.items() for each in pair)
    return False


def pytest_sessionfinish(session: pytest.Session) -> None:
    report = {
        "outcomes": _outcomes,
        "failures": _failures,
        "broken": _broken,
        "covered": _covered,
    }
    with open(os.environ["OPENHANDS_RL_REPORT"], "w", encoding="utf-8") as file:
        json.dump(report, file)
