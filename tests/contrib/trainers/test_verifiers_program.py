"""What stands between verifiers and the episodes that it starts, without verifiers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import openhands_rl_plugin
from openhands_rl_plugin import cli
from openhands_rl_plugin.apps.rollout.program import SECRET, VARIABLE, read_episode, rollout_command
from openhands_rl_plugin.apps.rollout.pythons import (
    UnfitReleaseError,
    check_probe,
    check_release,
    interpreter,
    probe,
)
from openhands_rl_plugin.contrib.trainers.verifiers.suite_tasks import suite_tasks
from openhands_rl_plugin.core.errors import ConfigError


def test_each_suite_says_how_its_tasks_are_played() -> None:
    local = suite_tasks("swe-local")
    assert len(local) >= 15 and len(suite_tasks("swe-local", "all")) > len(local)
    first = local[0]
    assert first.options == ("--task", first.id, "--suite", "swe-local") and "repository" in first.instruction
    repair = suite_tasks("repair-1")[0]
    assert repair.options == ("--task", repair.id, "--suite", "repair-1")
    shop = suite_tasks("webshop")[0]
    assert shop.options == ("--task", shop.id) and shop.id.startswith("webshop-") and shop.instruction
    assert [each.options for each in suite_tasks("environment", count=2)] == [("--task", "0"), ("--task", "1")]
    assert [each.id for each in suite_tasks("swe-local", "", 0, (local[2].id, first.id))] == [local[2].id, first.id]


def test_a_file_has_the_tasks_of_its_split(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [{"id": f"a{n}", "environment": "webshop", "instruction": "Buy.", "data": {"idx": n}} for n in range(2)]
    rows[1]["split"] = "heldout"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [each.id for each in suite_tasks(str(file))] == ["a0", "a1"]
    (held_out,) = suite_tasks(str(file), "heldout")
    assert held_out.options == ("--task", str(file), "--id", "a1") and held_out.instruction == "Buy."


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("swe-locl",), "did you mean 'swe-local'"),
        (("swe-local", "test"), "swe-local has no split 'test'; it has heldout, train, all"),
        (
            ("swe-local", "", 0, ("sdist__h11-0.16.0-0ff9ccd",)),
            "unknown task 'sdist__h11-0.16.0-0ff9ccd'; did you mean",
        ),
        (("environment",), "how many tasks has the environment"),
        (("missing.jsonl",), "missing.jsonl"),
    ],
)
def test_a_suite_that_is_not_there_is_one_line(given: tuple[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        suite_tasks(*given)
    assert said in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) <= 500


def test_rows_that_name_no_environment_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "?"}\n')
    with pytest.raises(ConfigError, match="row 1 has neither instance_id and base_commit nor id and environment"):
        suite_tasks(str(file))


def test_other_releases_of_verifiers_are_named_with_the_one_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnfitReleaseError, match=r"is not installed in this Python: pip install 'verifiers==0\.4"):
        check_release("verifiers", "0.4")
    about = tmp_path / "verifiers-0.1.14.dist-info/METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.1.14\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UnfitReleaseError, match=r"needs verifiers 0\.4 for this, and this Python has 0\.1\.14"):
        check_release("verifiers", "0.4")
    about.write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.4.3\n")
    check_release("verifiers", "0.4")


def test_the_python_that_plays_is_named_or_in_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert interpreter() == sys.executable
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    assert interpreter(sys.executable) == sys.executable
    with pytest.raises(ConfigError, match=r"none is no Python: make one with .*openhands_rl_plugin\[sdk\]"):
        interpreter()


def test_a_python_is_asked_what_it_has() -> None:
    done = subprocess.run(probe(sys.executable), capture_output=True, text=True, timeout=60)
    check_probe(sys.executable, done.returncode, done.stdout, done.stderr)
    ours = openhands_rl_plugin.__version__
    for found, said in (
        ([None, "1.58.0", None], "has no openhands_rl_plugin: make one with"),
        ([ours, None, None], "has no OpenHands: make one with"),
        (["0.0.1", "1.58.0", None], f"has openhands_rl_plugin 0.0.1, and this Python {ours}: install the same in both"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_probe("PY", 0, json.dumps(found), "")
    for code, out, err in ((1, "", "a\nno such option"), (0, "Hello", "no such option")):
        with pytest.raises(ConfigError, match=r"PY does not run \(no such option\): make one with"):
            check_probe("PY", code, out, err)


def test_a_failed_episode_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, "the rollout's")
    command = rollout_command("PY", ("--task", "webshop-3"), "http://127.0.0.1:1/v1", "policy", {}, tmp_path)
    assert cli.main(command[4:]) == 3
    assert str(read_episode(3, *capsys.readouterr())).startswith("infrastructure: no model server answers at http://")
    assert read_episode(-9, "", "a\nKilled") == "infrastructure: openhands-rl rollout ended with exit code -9: Killed"


def test_paths_are_those_of_verifiers_and_not_of_the_folder_that_an_episode_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = rollout_command("PY", (), "URL", "policy", {"config": Path("a.toml"), "network": True}, Path("store"))
    assert command[-6:] == ["--config", f"{tmp_path}/a.toml", "--network", "true", "--store", f"{tmp_path}/store"]
    assert rollout_command("PY", (), "URL", "policy", {})[-2:] == ["--store", "episodes"]
