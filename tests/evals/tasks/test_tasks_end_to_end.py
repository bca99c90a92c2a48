"""One package of our own: bugs are put into it, the tasks are made twice and pass the gate in real sandboxes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from broken_repository import CODE, commit, units_repository
from needs import needs_bubblewrap

from openhands_rl_plugin import cli
from openhands_rl_plugin.evals.swe.instances import read_instances
from openhands_rl_plugin.evals.tasks.make import MADE_BY, leaks

pytestmark = pytest.mark.contract


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return units_repository(tmp_path / "units")


@needs_bubblewrap
def test_tests_that_are_missing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "units"
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    commit(folder, "first", units=CODE)
    assert cli.main(["tasks", "make", str(folder), "--out", str(tmp_path / "x.jsonl"), "--per-package", "1"]) == 1
    assert "error: units: 0 of 0 tests pass twice" in capsys.readouterr().err


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_made_twice_checked_and_found_wanting(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache, file, again = tmp_path / "cache", tmp_path / "tasks.jsonl", tmp_path / "again.jsonl"
    words = ["--per-package", "4", "--seed", "5", "--cache", str(cache)]
    assert cli.main(["tasks", "make", str(repository), "--out", str(file), *words]) == 0, capsys.readouterr().err
    tasks = read_instances(file)
    assert len(tasks) == 4
    made_by = [task.extra[MADE_BY] for task in tasks]
    assert made_by.count("reopen_fix") == 1
    for task in tasks:
        assert 1 <= len(task.fail_to_pass) <= 6 and task.pass_to_pass and not leaks(task.problem_statement, task.patch)
    fix = tasks[made_by.index("reopen_fix")]
    assert fix.fail_to_pass == ("test_units.py::test_total[texts2-4]",)
    assert "+        if own == unit and number > 0:" in fix.patch and "total(" in fix.problem_statement
    assert "AssertionError: assert 3 == 4" in fix.problem_statement
    assert cli.main(["tasks", "make", str(repository), "--out", str(again), *words]) == 0
    assert again.read_bytes() == file.read_bytes()
    assert cli.main(["tasks", "check", str(file), "--repeats", "1", "--cache", str(cache)]) == 0, capsys.readouterr()
    assert cli.main(["tasks", "list", str(file)]) == 0
    assert "reopen_fix" in capsys.readouterr().out
