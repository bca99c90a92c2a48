"""docs/hosts.md: what works on which host and version, by the tests that are marked ``shows("...")``.

A run of the tests compares what it saw with the column of its own host and version, and fails where the table is out
of date. ``OPENHANDS_RL_WRITE_HOSTS=1`` writes the column instead.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

TABLE = Path(__file__).parents[3] / "docs/hosts.md"
WRITE = "OPENHANDS_RL_WRITE_HOSTS"
MARK = "shows"
YES, NO, UNSEEN = "yes", "no", "-"

CAPABILITIES = (
    "every completion with token ids and logprobs",
    "each prompt extends the one before",
    "BestOfN",
    "search in forks: MCTS, ToT",
    "sandboxed workspace",
    "environments rolled out by a runner",
    "many sessions in one process",
    "worker processes",
    "kept after a killed process",
    "the stock agent, recorded",
    "condensers, summaries recorded",
    "condensation on request (/compact)",
    "parallel tool calls",
    "streaming",
    "async runs, interrupted",
    "confirmations and rejections",
    "security analyzer",
    "hooks",
    "MCP tools",
    "images",
    "resumed conversations",
    "rewards by a command",
    "rewards as critics",
    "export as the host's own events",
    "openhands-rl run",
    "agent server",
)

LACKS = {
    ("V0", "streaming"): "its agents ask for whole answers",
    ("V0", "async runs, interrupted"): "its controller has no `arun`; a user's stop ends a decision, as its tests show",
    ("V0", "hooks"): "it has none",
    ("V0", "rewards as critics"): "nothing in its package calls a critic",
    ("V0", "agent server"): "the server is the SDK's",
    ("V1", "async runs, interrupted"): "`arun` came with SDK 1.23",
    ("V1", "agent server"): "before SDK 1.49 its requests name no other agent than the stock one",
}
"""Why a host, or some of its releases, cannot do a thing. Of V0, which has one release, no test needs to say so."""

# How a test says that it is skipped because of the release, not of the machine.
_OF_THE_RELEASE = re.compile(r"\b(?:SDK|server) (?:before|without)\b")

_HEAD = """# What works on which OpenHands

Written by the tests: `yes` where those that show it pass with this release, `no` where the release itself has no
such thing (why stands below), `-` where no test of this host shows it. `.ci/sdk-matrix` runs them with the releases of
the SDK. A run with another result than its column fails.

"""


def host_at_hand() -> str | None:
    """The column of this environment; ``None`` without OpenHands."""
    for package, host in (("openhands-ai", "V0"), ("openhands-sdk", "V1")):
        try:
            return f"{host} {version(package)}"
        except PackageNotFoundError:
            continue
    return None


def read_table(text: str) -> dict[str, dict[str, str]]:
    """Column -> capability -> cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    if not rows:
        return {}
    return {column: {row[0]: row[at] for row in rows[2:]} for at, column in enumerate(rows[0]) if at}


def table_text(columns: dict[str, dict[str, str]]) -> str:
    """The page."""
    names = sorted(columns, key=lambda name: (name[:2], [int(part) for part in name.split()[1].split(".")]))
    rows = [["", *names], ["---"] * (len(names) + 1)]
    rows += [[what, *(_cell(columns[name], name, what) for name in names)] for what in CAPABILITIES]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    lacking = {(name[:2], row[0]) for row in rows[2:] for name, cell in zip(names, row[1:], strict=True) if cell == NO}
    why = [f"- {what}, {host}: {reason}.\n" for (host, what), reason in LACKS.items() if (host, what) in lacking]
    return f"{_HEAD}{table}\n{''.join(why)}" if why else _HEAD + table


def _cell(column: dict[str, str], name: str, what: str) -> str:
    found = column.get(what, UNSEEN)
    return NO if found == UNSEEN and name.startswith("V0") and ("V0", what) in LACKS else found


class HostsTable:
    """A pytest plugin. With xdist, the process that hears of all tests compares."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}
        self._wrong: list[str] = []

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Pass the marks on to the reports."""
        for item in items:
            for mark in item.iter_markers(MARK):
                if mark.args[0] not in CAPABILITIES:
                    raise pytest.UsageError(f"{item.nodeid}: {mark.args[0]!r} is no row of docs/hosts.md")
                item.user_properties.append((MARK, mark.args[0]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Remember what a test showed."""
        for name, what in report.user_properties:
            if name != MARK:
                continue
            if report.skipped and isinstance(report.longrepr, tuple) and _OF_THE_RELEASE.search(report.longrepr[2]):
                self._seen.setdefault(str(what), set()).add(NO)
            elif report.failed:
                self._seen.setdefault(str(what), set()).add("failed")
            elif report.when == "call" and report.passed:
                self._seen.setdefault(str(what), set()).add(YES)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Compare, or write."""
        host = host_at_hand()
        if hasattr(session.config, "workerinput") or host is None or not self._seen:
            return
        # Of several tests one may need more than the release has.
        seen = {what: YES if YES in found else NO for what, found in self._seen.items() if "failed" not in found}
        columns = read_table(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
        column = columns.setdefault(host, {})
        if os.environ.get(WRITE):
            column.update(seen)
            TABLE.write_text(table_text(columns), encoding="utf-8")
        elif column:
            self._wrong = [f"{what}: {found}" for what, found in seen.items() if column.get(what, UNSEEN) != found]
            if self._wrong:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what is out of date."""
        for line in self._wrong:
            outdated = f"docs/hosts.md is out of date for {host_at_hand()}: {line} ({WRITE}=1 writes it)"
            terminalreporter.write_line(outdated)
