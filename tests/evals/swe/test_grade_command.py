"""``openhands-rl grade``: many predictions, resumed, interrupted, with the official tools' files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from repository_samples import FIX, NOTHING, Sample, make_sample, needs_sandbox, rewritten, with_extra

from openhands_rl_plugin import cli
from openhands_rl_plugin.evals.swe.instances import row_of


class Place:
    """A sample with its rows in a file; the cache is shared by the tests of this file."""

    def __init__(self, sample: Sample, folder: Path) -> None:
        self.sample = sample
        self.folder = folder
        rows = [sample.instance.model_copy(update={"instance_id": f"someone__calc-{number}"}) for number in range(1, 8)]
        rows.append(with_extra(sample.instance.model_copy(update={"instance_id": "someone__calc-8"}), python="2.2"))
        self.rows = folder / "rows.jsonl"
        self.rows.write_text("".join(json.dumps(row_of(row)) + "\n" for row in rows))

    def words(self, predictions: Path | str, out: Path, *more: str) -> list[str]:
        where = ["--mirror", str(self.sample.mirror), "--cache", str(self.folder / "cache")]
        return ["grade", str(predictions), "--instances", str(self.rows), "--out", str(out), *where, *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("graded")
    return Place(make_sample(folder), folder)


def write(file: Path, *rows: dict) -> Path:
    file.write_text("".join(json.dumps({"model_name_or_path": "org/m", **row}) + "\n" for row in rows))
    return file


MIXED: list[dict[str, object]] = [
    {"instance_id": "someone__calc-1", "model_patch": FIX},
    {"instance_id": "someone__calc-2", "model_patch": NOTHING},
    {"instance_id": "someone__calc-3", "model_patch": ""},
    {"instance_id": "someone__calc-4", "model_patch": FIX.replace("a - b", "a / b")},
    {"instance_id": "someone__calc-5", "model_patch": "words"},
    {"instance_id": "someone__calc-7", "model_patch": rewritten("import time\ntime.sleep(60)\n")},
    {"instance_id": "someone__calc-8", "model_patch": FIX},
    {"instance_id": "someone__calc-2", "model_patch": FIX, "model_name_or_path": "two"},
    {"instance_id": "nobody__nothing-1", "model_patch": FIX},
]


@needs_sandbox
def test_every_prediction_gets_what_it_deserves(place: Place, tmp_path: Path, capsys, monkeypatch) -> None:
    out = tmp_path / "out"
    file = write(tmp_path / "p.jsonl", *MIXED)
    words = place.words(file, out, "--run-id", "r1", "--workers", "2", "--timeout", "3")
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(
        "2 resolved, 1 unresolved, 1 empty patch, 1 unapplied, 1 timed out, 1 refused, 1 infrastructure\n"
    )
    assert "1 of 8 have no verdict: Python 2.2 is not installed; get it with" in shown.err
    report = json.loads((out / "org__m.r1.json").read_text())
    assert report["schema_version"] == 2
    assert report["resolved_ids"] == ["someone__calc-1"] and report["unresolved_ids"] == ["someone__calc-2"]
    assert report["empty_patch_ids"] == ["someone__calc-3"]
    assert report["error_ids"] == [f"someone__calc-{number}" for number in (4, 5, 7, 8)]
    assert json.loads((out / "two.r1.json").read_text())["resolved_ids"] == ["someone__calc-2"]
    logs = out / "logs" / "run_evaluation" / "r1" / "org__m"
    own = json.loads((logs / "someone__calc-1" / "report.json").read_text())["someone__calc-1"]
    assert own["resolved"] and own["tests_status"]["FAIL_TO_PASS"]["success"] == ["tests/test_calc.py::test_add"]
    assert json.loads((logs / "someone__calc-2" / "verdict.json").read_text())["reason"] == "1 of 1 F2P failed"
    assert (out / "org__m.r1.json").stat().st_mode & 0o777 == 0o600

    before = {path: path.stat().st_mtime_ns for path in out.rglob("test_output.txt")}
    assert cli.main(words) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("test_output.txt")} == before
    assert json.loads((out / "org__m.r1.json").read_text()) == report
    assert cli.main([*words, "--ids", "someone__calc-8"]) == 1

    if find_spec("swebench") is None:
        return  # `make test-peers` has it
    from swebench.harness import reporting

    monkeypatch.chdir(out)
    rows = [json.loads(line) for line in place.rows.read_text().splitlines()]
    given = {str(row["instance_id"]): {"model_name_or_path": "org/m", **row} for row in MIXED[:7]}
    assert json.loads(Path(reporting.make_run_report(given, rows, "r1")).read_text()) == report


@needs_sandbox
def test_an_interrupted_run_goes_on_where_it_stopped(place: Place, tmp_path: Path) -> None:
    mark = f"40{os.getpid()}"
    slow = rewritten(f"import subprocess\nsubprocess.run(['sleep', '{mark}'])\n")
    rows = [
        {"instance_id": "someone__calc-1", "model_patch": FIX},
        {"instance_id": "someone__calc-2", "model_patch": slow},
    ]
    predictions = write(tmp_path / "p.jsonl", *rows)
    words = place.words(predictions, tmp_path / "out")
    process = subprocess.Popen(
        [sys.executable, "-m", "openhands_rl_plugin.cli", *words], stderr=subprocess.PIPE, text=True
    )
    for _ in range(600):
        if subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True).stdout:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted; the same command continues where it stopped" in printed
    assert not subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True).stdout
    assert not any((place.folder / "cache" / "runs").iterdir())
    report = json.loads((tmp_path / "out" / "org__m.run.json").read_text())
    assert report["completed_ids"] == ["someone__calc-1"]
    write(predictions, rows[0], {"instance_id": "someone__calc-2", "model_patch": NOTHING})
    assert cli.main(words) == 0
    report = json.loads((tmp_path / "out" / "org__m.run.json").read_text())
    assert report["completed_ids"] == ["someone__calc-1", "someone__calc-2"]


def test_a_run_id_names_no_other_folder(place: Place, tmp_path: Path, capsys) -> None:
    assert cli.main(place.words("gold", tmp_path / "out", "--run-id", "../x")) == 1
    assert "--run-id '../x'" in capsys.readouterr().err
