"""A pytest plugin that writes the results of a test run as JSON. It imports nothing of this package.

``OPENHANDS_RL_REPORT`` names the file. Each failure has the exception and pytest's output. With
``OPENHANDS_RL_COVERED`` set, executed lines are counted as well.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import types

import pytest

_ROOT = os.getcwd()
_MOST_FAILURES, _MOST_TEXT = 60, 4_000
_outcomes: dict[str, str] = {}
_failures: dict[str, dict[str, str]] = {}
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
        errors = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
        _broken[report.nodeid] = errors[-1][:_MOST_TEXT] if errors else ""


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
        error = call.excinfo.value
        found = {"error": type(error).__name__, "message": _text(error), "output": _output(report.longreprtext)}
        _failures[item.nodeid] = found
    return report


def _output(text: str) -> str:
    """The lines of the test and of the error, as pytest prints them, without those of the code that the test calls."""
    own, _, called = text.partition("\n_ _ _")
    return "\n".join([own.rstrip(), *(line for line in called.splitlines() if line.startswith("E "))])[-_MOST_TEXT:]


def _text(error: BaseException) -> str:
    """The message, also of an exception that the package under test has broken."""
    return "".join(traceback.format_exception_only(error)).strip().partition(": ")[2][:_MOST_TEXT]


def pytest_sessionfinish(session: pytest.Session) -> None:
    report = {"outcomes": _outcomes, "failures": _failures, "broken": _broken, "covered": _covered}
    with open(os.environ["OPENHANDS_RL_REPORT"], "w", encoding="utf-8") as file:
        json.dump(report, file)
