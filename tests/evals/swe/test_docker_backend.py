"""The Docker back end as far as it can be seen without a daemon: what it asks the ``docker`` program for.

The program here is a small script that writes down how it was called and runs ``exec`` on this machine.
"""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
from repository_samples import FIX, instance, with_extra

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.backends import DockerBackend
from openhands_rl_plugin.evals.swe.instances import VerdictKind

pytestmark = pytest.mark.contract

ROW = with_extra(instance("c0ffee"), image="swebench/sweb.eval.x86_64.a_1776_b-1:latest")

PROGRAM = """\
import json, os, re, sys
words = sys.argv[1:]
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(words) + "\\n")
failing = os.environ.get("FAILING", "")
if failing and words[0] == failing:
    print(f"docker: {failing} does not work", file=sys.stderr)
    sys.exit(1)
if words[:2] == ["image", "inspect"]:
    sys.exit(1)
if words[0] == "inspect":
    print(os.environ.get("RUNNING", "true"))
if words[0] == "exec":
    if any("git apply --verbose" in word for word in words):
        mark = re.search(r"echo (\\w{16});", " ".join(words))[1]
        print(mark, "Applied patch calc.py cleanly.", "", mark, sep="\\n")
    elif "/bin/bash" in words:
        word = sys.stdin.readline().strip()
        print(f"+{word} : '>>>>> Start Test Output'")
        print("PASSED tests/test_calc.py::test_add\\nPASSED tests/test_calc.py::test_double")
        if "FULL" in os.environ:
            print("No space left on device")
        if "RUNNING" in os.environ or failing == "inspect":
            sys.exit(137)
        print(f"+{word} : '>>>>> End Test Output'")
    elif any("/dev/zero" in word for word in words):
        sys.exit(1)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch) -> Path:
    program = tmp_path / "docker"
    program.write_text(f"#!{sys.executable} -IS\n{PROGRAM}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return program


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


async def test_a_container_lives_for_one_patch(program: Path, tmp_path: Path) -> None:
    verdict = await DockerBackend(program=str(program)).grade(ROW, FIX, logs=tmp_path / "logs", timeout=30.0)
    assert verdict.kind is VerdictKind.RESOLVED
    made = calls(tmp_path)
    assert [words[0] for words in made][:3] == ["image", "pull", "run"]
    assert made[1] == ["pull", "--quiet", "--platform", "linux/amd64", ROW.extra["image"]]
    assert made[-1][:3] == ["rm", "--force", "--volumes"]
    name = made[2][made[2].index("--name") + 1]
    assert all(name in " ".join(words) for words in made[2:])
    assert "--network none" in " ".join(made[2]) and made[2][-2:] == [ROW.extra["image"], "86400"]
    assert all(words[:4] == ["exec", "--interactive", "--user", "root"] for words in made if words[0] == "exec")
    log = (tmp_path / "logs" / "test_output.txt").read_text()
    assert log.startswith("+ : '>>>>> Start Test Output'\n")


@pytest.mark.parametrize(
    ("variables", "kind", "why"),
    [
        ({"FAILING": "pull"}, VerdictKind.INFRASTRUCTURE, "pull swebench/"),
        ({"FAILING": "inspect"}, VerdictKind.INFRASTRUCTURE, "the container engine was lost during"),
        ({"FULL": "1"}, VerdictKind.INFRASTRUCTURE, "no space is left where the tests run"),
        ({"RUNNING": "false"}, VerdictKind.UNRESOLVED, "the run ended before its tests did"),
    ],
)
async def test_what_fails_around_a_patch_is_infrastructure_and_what_it_ends_is_not(
    program: Path, tmp_path: Path, monkeypatch, variables: dict[str, str], kind: VerdictKind, why: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    verdict = await DockerBackend(program=str(program)).grade(ROW, FIX, logs=tmp_path / "logs", timeout=30.0)
    assert verdict.kind is kind and why in verdict.reason


async def test_what_is_missing_is_one_clear_line(program: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FAILING", "version")
    with pytest.raises(ConfigError, match=r"no Docker daemon \(docker: version does not work\); .*--backend local"):
        await DockerBackend(program=str(program)).check()
    verdict = await DockerBackend(program=str(program)).grade(instance("c0ffee"), FIX, logs=tmp_path, timeout=30.0)
    assert verdict.reason == "someone__calc-1: its row names no image; use --backend local"
