"""The scripted oracle of repair tasks: what it does to the file, in every task."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from openhands_rl_plugin.config.host import TOOLS
from openhands_rl_plugin.contrib.repair.oracle import RepairOracle, fixed_text, oracle_plan, serve_oracle
from openhands_rl_plugin.contrib.repair.rows import RUN_TESTS, repair_instances, repository_files, spec_of
from openhands_rl_plugin.contrib.repair.suites import RepairBackend
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.instances import Instance

V0 = TOOLS["v0"]


@pytest.fixture(scope="module")
def instances() -> tuple[Instance, ...]:
    return repair_instances(1, "train")


def test_an_edit_that_does_not_repair_is_undone(instances: tuple[Instance, ...], tmp_path: Path):
    exactly = 0
    for at, each in enumerate(instances[:6]):
        spec = spec_of(each)
        folder = tmp_path / str(at)
        checkout = asyncio.run(RepairBackend().checkout(each, folder))
        for call in oracle_plan(each, V0, 1):
            if "--edit" in call.text:
                command = re.findall(r"<parameter=command>(.*?)</parameter>", call.text, re.DOTALL)[0]
                environment = {"PATH": os.environ["PATH"], **checkout.variables}
                done = subprocess.run(
                    ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
                )
                passed = done.returncode == 0
                assert (passed or call.errs) and done.stdout.startswith("0 failed, ") == passed
                line = spec.files[spec.path].split("\n")[spec.line - 1].strip()
                again = f"Undone. Line {spec.line} of {spec.path}:\n{line}\n"
                assert done.stdout.endswith(again) != passed and "FAILED" not in done.stdout
                assert ((folder / spec.path).read_text() == spec.files[spec.path]) != passed, done.stdout
                if passed:
                    break
        exactly += (folder / spec.path).read_text().rstrip("\n") == fixed_text(each).rstrip("\n")
    assert exactly >= 5  # another edit may repair, too


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("2s/2/1/", "0 failed, 1 passed\n"),
        ("2s/2/3/", "1 failed, 0 passed\nUndone. Line 2 of m.py:\nreturn a + 2\n"),
        ("2s/2/2)/", "SyntaxError: unmatched ')' (m.py, line 2)\nUndone. Line 2 of m.py:\nreturn a + 2\n"),
        ("2s/re.*/while 1: pass/", "the tests did not end\nUndone. Line 2 of m.py:\nreturn a + 2\n"),
        ("1,2s/2/3/", "1 failed, 0 passed\nUndone. Line 1 of m.py:\ndef f(a):\nLine 2 of m.py:\nreturn a + 2\n"),
    ],
)
def test_an_edit_reports_its_result_and_shows_its_lines_again(script: str, expected: str, tmp_path: Path):
    runner = repository_files(spec_of(repair_instances(1, "train")[0]))[RUN_TESTS]
    text = "def f(a):\n    return a + 2\n"
    (tmp_path / RUN_TESTS).write_text(runner.replace("alarm(20)", "alarm(1)"))
    (tmp_path / "m.py").write_text(text)
    (tmp_path / "test_f.py").write_text("from m import f\n\ndef test_1():\n    assert f(1) == 2\n")
    command = [sys.executable, "-B", RUN_TESTS, "--edit", "m.py"]
    done = subprocess.run(
        command, cwd=tmp_path, input=script + "\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == expected.format(tmp_path) and done.returncode == ("Undone" in expected)
    assert ((tmp_path / "m.py").read_text() == text) == ("Undone" in expected)


def test_it_is_served_as_a_model_is(instances: tuple[Instance, ...]):
    with serve_oracle(RepairOracle(instances[:2], V0)) as url:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": instances[0].problem_statement}]})
        kind = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{url}/chat/completions", body.encode(), kind)
        with urllib.request.urlopen(asked, timeout=20) as answer:
            content = json.load(answer)["choices"][0]["message"]["content"]
    assert content == oracle_plan(instances[0], V0, 0)[0].text
    with pytest.raises(ConfigError, match="does not know the task"):
        RepairOracle((), V0).answer([{"role": "user", "content": "hello"}])
