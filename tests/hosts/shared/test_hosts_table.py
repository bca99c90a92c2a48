"""docs/hosts.md is what the tests show: a run with another result fails, and one that is told to writes it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hosts_table
import pytest
from hosts_table import CAPABILITIES, LACKS, MARK, TABLE, WRITE, HostsTable, host_at_hand, read_table, table_text

HOST = "V1 1.21.0"
HOOKS, STREAMS = "hooks", "streaming"


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run in an environment with ``HOST``, and a table of its own, that says yes and no."""
    monkeypatch.setattr(hosts_table, "TABLE", tmp_path / "hosts.md")
    monkeypatch.setattr(hosts_table, "host_at_hand", lambda: HOST)
    monkeypatch.delenv(WRITE, raising=False)
    (tmp_path / "hosts.md").write_text(table_text({HOST: {HOOKS: "yes", STREAMS: "no"}, "V0 1.6.0": {HOOKS: "no"}}))
    return SimpleNamespace(config=object(), exitstatus=0)


def report(what: str, outcome: Any, reason: str = "") -> pytest.TestReport:
    said: Any = ("file", 1, f"Skipped: {reason}") if reason else None
    return pytest.TestReport("test", ("file", 1, ""), {}, outcome, said, "call", user_properties=[(MARK, what)])


def finished(session: Any, *reports: pytest.TestReport) -> dict[str, str]:
    table = HostsTable()
    for each in reports:
        table.pytest_runtest_logreport(each)
    table.pytest_sessionfinish(session)
    return read_table(hosts_table.TABLE.read_text())[HOST]


@pytest.mark.parametrize(
    ("what", "outcome", "reason", "fails"),
    [
        (HOOKS, "passed", "", False),
        (STREAMS, "passed", "", True),
        ("images", "passed", "", True),
        (HOOKS, "skipped", "an SDK before 1.23 has none", True),
        (STREAMS, "skipped", "an SDK before 1.23 has none", False),
        (HOOKS, "skipped", "bubblewrap is not installed", False),
        (HOOKS, "failed", "", False),
    ],
)
def test_a_run_fails_where_the_table_says_something_else(
    session: Any, what: str, outcome: str, reason: str, fails: bool
) -> None:
    before = finished(session)
    assert finished(session, report(what, outcome, reason)) == before
    assert bool(session.exitstatus) is fails


def test_a_run_that_is_told_to_writes_its_own_column(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WRITE, "1")
    column = finished(session, report(STREAMS, "passed"), report(HOOKS, "failed"), report("images", "passed"))
    assert (column[STREAMS], column[HOOKS], column["images"]) == ("yes", "yes", "yes") and not session.exitstatus
    assert read_table(hosts_table.TABLE.read_text())["V0 1.6.0"][HOOKS] == "no"


def test_the_page_has_every_row_and_a_column_of_this_host() -> None:
    columns = read_table(TABLE.read_text(encoding="utf-8"))
    assert table_text(columns) == TABLE.read_text(encoding="utf-8")
    assert all(tuple(column) == CAPABILITIES for column in columns.values())
    assert {"V0 1.6.0", "V1 1.58.0"} <= set(columns)
    lacking = {(name[:2], what) for name, column in columns.items() for what, cell in column.items() if cell == "no"}
    assert lacking == set(LACKS), "every no has its reason"
    here = host_at_hand()
    assert here is None or here not in ("V0 1.6.0", "V1 1.58.0") or "yes" in columns[here].values()
