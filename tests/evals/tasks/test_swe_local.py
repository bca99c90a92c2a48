"""The published suite, as it lies in the package."""

from __future__ import annotations

from openhands_rl_plugin.evals.runs.suites import local_rows
from openhands_rl_plugin.evals.swe.instances import read_instances
from openhands_rl_plugin.evals.tasks.make import changed_lines, leaks


def test_no_report_shows_the_fix() -> None:
    for each in read_instances(local_rows()):
        assert not leaks(each.problem_statement, each.patch), each.instance_id
        assert "diff --git" not in each.problem_statement and "@@" not in each.problem_statement
        assert changed_lines(each.patch)
