"""The published suite, as it lies in the package."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.evals.runs.suites import local_rows
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.evals.tasks.gate import TasksLineage, read_lineage
from openhands_rl_plugin.evals.tasks.make import changed_lines, leaks

FILE = local_rows()


@pytest.fixture(scope="module")
def suite() -> tuple[Instance, ...]:
    return read_instances(FILE)


@pytest.fixture(scope="module")
def lineage() -> TasksLineage:
    found = read_lineage(FILE)
    assert found is not None
    return found


def test_no_report_shows_the_fix(suite: tuple[Instance, ...], lineage: TasksLineage) -> None:
    for each in suite:
        assert not leaks(each.problem_statement, each.patch), each.instance_id
        assert "diff --git" not in each.problem_statement and "@@" not in each.problem_statement
        assert changed_lines(each.patch)


def test_every_task_has_its_lineage(suite: tuple[Instance, ...], lineage: TasksLineage) -> None:
    assert lineage.checked
    for each, known in zip(suite, lineage.tasks, strict=True):
        assert known.instance_id == each.instance_id
        assert known.check is not None and known.check.oracle == known.check.repeats > known.check.no_op == 0
    assert len({known.modifier for known in lineage.tasks}) >= 13
