"""One package of our own: bugs are put into it, the tasks are made twice and pass the gate in real sandboxes."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from broken_repository import CODE, commit, units_repository
from needs import needs_bubblewrap

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.evals.runs.backends import make_backend
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.tasks import make
from openhands_rl_plugin.evals.tasks.gate import read_lineage, require_checked
from openhands_rl_plugin.evals.tasks.make import leaks
from openhands_rl_plugin.evals.tasks.source import TaskRepositories

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
    tasks, lineage = read_instances(file), read_lineage(file)
    assert len(tasks) == 4 and lineage is not None
    made_by = [task.modifier for task in lineage.tasks]
    assert made_by.count("reopen_fix") == 1
    for task in tasks:
        assert 1 <= len(task.fail_to_pass) <= 6 and task.pass_to_pass and not leaks(task.problem_statement, task.patch)
    fix = tasks[made_by.index("reopen_fix")]
    assert fix.fail_to_pass == ("test_units.py::test_total[texts2-4]",)
    assert "+        if own == unit and number > 0:" in fix.patch and "total(" in fix.problem_statement
    assert (
        fix.problem_statement.startswith("Tests of units fail")
        and "AssertionError: assert 3 == 4" in fix.problem_statement
    )

    assert cli.main(["tasks", "make", str(repository), "--out", str(again), *words]) == 0
    assert again.read_bytes() == file.read_bytes()
    with pytest.raises(ConfigError, match="did not pass the quality gate"):
        require_checked(file)

    assert cli.main(["tasks", "check", str(file), "--repeats", "1", "--cache", str(cache)]) == 0, capsys.readouterr()
    assert require_checked(file) == tasks
    assert cli.main(["tasks", "list", str(file)]) == 0
    assert "reopen_fix" in capsys.readouterr().out

    file.write_text(file.read_text() + "\n")
    with pytest.raises(ConfigError, match="has changed since"):
        require_checked(file)


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_goes_on_where_it_was(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, tried = make.try_change, []

    async def counted(prepared: make.Prepared, key: str, *change: Any) -> make.TriedBug:
        if len(tried) == 2:
            raise KeyboardInterrupt
        tried.append(key)
        return await real(prepared, key, *change)

    monkeypatch.setattr(make, "try_change", counted)
    words = [str(repository), "--per-package", "3", "--seed", "5", "--cache", str(tmp_path / "cache")]
    killed = tmp_path / "killed.jsonl"
    assert cli.main(["tasks", "make", *words, "--out", str(killed)]) == 130
    first = tried.copy()
    monkeypatch.setattr(make, "try_change", lambda *given: (tried.append(given[1]), real(*given))[1])
    assert cli.main(["tasks", "make", *words, "--out", str(killed)]) == 0
    assert len(tried) == len(set(tried)) > len(first)


def test_a_row_that_was_changed_has_no_repository(repository: Path, tmp_path: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True)
    row = {
        "instance_id": "git__units-1",
        "repo": "git/units",
        "base_commit": "0" * 40,
        "PASS_TO_PASS": ["tests/test_units.py::test_units"],
        "source": {"git": str(repository), "commit": head.stdout.strip(), "label": "units"},
    }
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (instance,) = read_instances(file)
    with pytest.raises(InfrastructureError, match="has been changed"):
        asyncio.run(TaskRepositories(tmp_path / "cache").find(instance))
    assert make_backend("local", cache=tmp_path / "cache").name == "local"
