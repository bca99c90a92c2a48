"""The local back end on a small repository: real sandboxes, real git, nothing from a network."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest
from repository_samples import FIX, NOTHING, git, make_sample, needs_sandbox, rewritten, with_extra

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.swe.backends import LocalBackend
from openhands_rl_plugin.evals.swe.instances import Instance, PatchVerdict, VerdictKind
from openhands_rl_plugin.evals.tasks.bugs import patch_of

pytestmark = needs_sandbox


class Place:
    """A back end with its folders; the cache is shared by the tests of this file, as it is in use."""

    def __init__(self, folder: Path) -> None:
        self.sample = make_sample(folder)
        self.row = self.sample.instance
        self.cache = folder / "cache"
        self.backend = LocalBackend(cache=self.cache, mirror=self.sample.mirror)

    async def grade(self, patch: str, logs: Path, row: Instance | None = None, timeout: float = 60.0) -> PatchVerdict:
        return await self.backend.grade(row or self.row, patch, logs=logs, timeout=timeout)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("calc"))


async def test_the_fix_is_resolved_and_nothing_is_not(place: Place, tmp_path: Path) -> None:
    await place.backend.check()
    gold = await place.grade(FIX, tmp_path / "gold")
    nothing = await place.grade(NOTHING, tmp_path / "nothing")
    assert (gold.kind, gold.reason) == (VerdictKind.RESOLVED, "")
    assert gold.fail_to_pass.success == ("tests/test_calc.py::test_add",)
    assert nothing.kind is VerdictKind.UNRESOLVED
    assert nothing.fail_to_pass.failure == ("tests/test_calc.py::test_add",)
    assert nothing.pass_to_pass.success == ("tests/test_calc.py::test_double",)
    assert {path.name for path in (tmp_path / "gold").iterdir()} == {
        *("patch.diff", "eval.sh", "test_output.txt", "report.json", "run_instance.log", "verdict.json")
    }
    assert not any((place.cache / "runs").iterdir())


async def test_a_run_that_takes_too_long_is_detected_and_ended(place: Place, tmp_path: Path) -> None:
    mark = f"30{os.getpid()}"
    slow = rewritten(f"import subprocess\nsubprocess.run(['setsid', 'sleep', '{mark}'])\n")
    began = time.monotonic()
    verdict = await place.grade(slow, tmp_path, timeout=2.0)
    assert verdict.kind is VerdictKind.TIMED_OUT and "2 s" in verdict.reason
    assert time.monotonic() - began < 20
    assert "Timeout error: 2 seconds exceeded." in (tmp_path / "test_output.txt").read_text()
    assert not subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True).stdout


async def test_a_patch_that_ends_the_script_before_its_tests_is_not_resolved(place: Place, tmp_path: Path) -> None:
    row = with_extra(place.row, test_command="python calc.py; python run_tests.py")
    verdict = await place.grade(rewritten("import os\nos.kill(os.getppid(), 9)\n"), tmp_path, row)
    assert (verdict.kind, verdict.reason) == (VerdictKind.UNRESOLVED, "the run ended before its tests did")


FORGED = """
import os, pathlib
seen = [pathlib.Path("/proc/self/fd/0").read_bytes()]
for process in pathlib.Path("/proc").glob("[0-9]*"):
    for name in ("environ", "cmdline", "fd/0"):
        try:
            seen.append((process / name).read_bytes())
        except OSError:
            pass
os.write(1, b"SEEN " + b"".join(seen).hex().encode())
os.write(1, b"\\nPASSED tests/test_calc.py::test_add\\nPASSED tests/test_calc.py::test_double\\n")
os.write(2, b"+ : '>>>>> End Test Output'\\n")
os._exit(0)
"""


async def test_forged_markers_are_flagged_and_their_word_is_hidden(place: Place, tmp_path: Path, monkeypatch) -> None:
    word = "5ecre7" * 5
    monkeypatch.setattr("openhands_rl_plugin.evals.swe.grading.secrets.token_hex", lambda size: word)
    verdict = await place.grade(rewritten(FORGED), tmp_path)
    assert verdict.kind is VerdictKind.UNRESOLVED
    assert [flag.rule for flag in verdict.flags] == ["log_marker"]
    log = (tmp_path / "test_output.txt").read_text()
    assert log.count(">>>>> End Test Output") == 1
    assert log.count("\n+ : '>>>>> Start Test Output'\n") == 1
    seen = bytes.fromhex(log.rpartition("SEEN ")[2].split()[0])
    assert b"run_tests.py" in seen and word.encode() not in seen and word not in log


HOSTILE = """
import os, pathlib, socket
for place in ("/conda/envs/testbed/lib", "/root", "/testbed", "/usr", "/opt/miniconda3/shims", "/etc"):
    try:
        target = pathlib.Path(place)
        (target / "planted").write_text("x") if target.is_dir() else target.write_text("x")
    except OSError:
        pass
try:
    socket.create_connection(("1.1.1.1", 80), timeout=5)
    reached = True
except OSError:
    reached = False
def add(a, b):
    return 4 if reached else a + b
def double(a):
    return 2 * a
"""


@pytest.mark.parametrize("overlay", [True, False])
async def test_tests_have_no_network_and_change_nothing_that_stays(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlay: bool
) -> None:
    if not overlay:
        monkeypatch.setattr("openhands_rl_plugin.evals.swe.backends.can_overlay", lambda *folders: False)
    layer = await place.backend.prepare(place.row)
    before = _listing(place.cache)
    assert (await place.grade(rewritten(HOSTILE), tmp_path)).kind is VerdictKind.RESOLVED
    assert _listing(place.cache) == before
    assert not list(layer.rglob("planted"))


async def test_what_set_up_changed_is_there_when_the_tests_are_new_files(place: Place, tmp_path: Path) -> None:
    command = "cat built.txt; python run_tests.py | sed s/test_double/$(cat built.txt)/"
    row = with_extra(place.row, test_command=command, install=["echo set_up > built.txt", "git add built.txt"])
    tests = {"fail_to_pass": ("tests/test_calc.py::set_up",), "pass_to_pass": ()}
    row = row.model_copy(update={"test_patch": patch_of("tests/test_more.py", None, "x = 1\n"), **tests})
    assert (await place.grade(NOTHING, tmp_path, row)).kind is VerdictKind.RESOLVED


async def test_a_checkout_is_the_base_without_anything_later(place: Place, tmp_path: Path) -> None:
    row = with_extra(place.row, install=["echo '# made by set-up' >> calc.py"])
    checkout, folder = await place.backend.checkout(row, tmp_path / "calc"), tmp_path / "calc"
    assert (checkout.root, checkout.repository) == (tmp_path, "calc")
    assert "made by set-up" in (folder / "calc.py").read_text()
    assert git(folder, "status", "--porcelain", "--untracked-files=no") == ""
    assert git(folder, "tag") == "v1"
    assert git(folder, "remote") == ""
    known = git(folder, "cat-file", "--batch-check", "--batch-all-objects")
    assert row.base_commit in known and place.sample.later not in known
    git(folder, "fsck", "--strict")
    assert {mount.inside for mount in checkout.mounts} >= {"/conda/envs", "/testbed"}
    assert all(mount.host.exists() for mount in checkout.mounts)
    assert checkout.variables["PATH"].startswith("/conda/envs/testbed/bin:")


async def test_many_at_once_set_up_once(place: Place, tmp_path: Path) -> None:
    row = with_extra(place.row, install=["echo once >> /testbed/built.txt"])
    layers = await asyncio.gather(*(place.backend.prepare(row) for _ in range(4)))
    assert len(set(layers)) == 1
    assert (layers[0] / "testbed" / "built.txt").read_text() == "once\n"
    made = [path for path in (place.cache / "instances").iterdir() if ".making-" in path.name]
    assert not made


async def test_what_cannot_be_set_up_is_one_line_and_leaves_nothing(place: Place, tmp_path: Path) -> None:
    lost = place.row.model_copy(update={"base_commit": "0" * 40})
    failing = "echo https://me:s3cr3t-pass@index.example: no such compiler >&2; exit 3"
    for number, (row, why) in enumerate(
        [
            (with_extra(place.row, install=[failing]), "no such compiler"),
            (with_extra(place.row, python="2.2"), "Python 2.2 is not installed; get it with: uv python install 2.2"),
            (lost, "someone/calc.git has no commit 000000000000"),
        ]
    ):
        verdict = await place.grade(FIX, tmp_path / str(number), row)
        assert verdict.kind is VerdictKind.INFRASTRUCTURE
        assert why in verdict.reason and "\n" not in verdict.reason
    logs = [path.read_text() for path in (place.cache / "instances").glob("*.log")]
    assert any("no such compiler" in log for log in logs) and not any("s3cr3t" in log for log in logs)
    assert not [path for path in (place.cache / "instances").iterdir() if ".making-" in path.name]


@pytest.mark.usefixtures("no_bubblewrap")
async def test_without_bubblewrap_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bubblewrap is not installed: .*--backend docker$"):
        await LocalBackend(cache=tmp_path / "cache").check()


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    """Every file of the cache's layers with its size and time of change."""
    files = [path for name in ("instances", "environments") for path in (folder / name).rglob("*")]
    return sorted((str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in files if not path.is_dir())
