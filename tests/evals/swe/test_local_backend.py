"""The local back end on a small repository: real sandboxes, real git, nothing from a network."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from repository_samples import FIX, NOTHING, Sample, git, make_sample, needs_sandbox, rewritten, with_extra

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource
from openhands_rl_plugin.evals.swe.grading import Grading, TestRun
from openhands_rl_plugin.evals.swe.recipes import recipe_of
from openhands_rl_plugin.evals.swe.types import Flag, Instance, PatchVerdict, VerdictKind

pytestmark = needs_sandbox


class Place:
    """A back end with its folders; the cache is shared by the tests of this file, as it is in use."""

    def __init__(self, sample: Sample, cache: Path) -> None:
        self.sample = sample
        self.cache = cache
        self.backend = LocalBackend(cache=cache, sources=[MirrorSource(sample.mirror)])

    async def grade(
        self, patch: str, logs: Path, instance: Instance | None = None, timeout: float = 60.0
    ) -> PatchVerdict:
        return await self.backend.grade(instance or self.sample.instance, patch, logs=logs, timeout=timeout)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("calc")
    return Place(make_sample(folder), folder / "cache")


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


@pytest.mark.parametrize(
    ("patch", "kind", "said"),
    [
        (" \n", VerdictKind.EMPTY_PATCH, "empty"),
        (FIX.replace("return a - b", "return a * b"), VerdictKind.UNAPPLIED, ""),
        (NOTHING.replace("notes.txt", ".git/config"), VerdictKind.REFUSED, "git's own files"),
        (NOTHING.replace("notes.txt", "../../etc/notes"), VerdictKind.UNAPPLIED, ""),
    ],
    ids=["empty", "does not fit", "into .git", "out of the repository"],
)
async def test_patches_that_cannot_be_tested(
    place: Place, tmp_path: Path, patch: str, kind: VerdictKind, said: str
) -> None:
    verdict = await place.grade(patch, tmp_path / "logs")
    assert verdict.kind is kind
    assert said in verdict.reason and "\n" not in verdict.reason
    assert not (tmp_path / "logs" / "report.json").exists()


async def test_a_patch_with_carriage_returns_applies_as_in_the_official_tools(place: Place, tmp_path: Path) -> None:
    assert (await place.grade(FIX.replace("\n", "\r\n"), tmp_path)).kind is VerdictKind.RESOLVED
    assert (tmp_path / "patch.diff").read_bytes() == FIX.replace("\n", "\r\n").encode()


async def test_a_run_that_takes_too_long_is_told_apart_and_ended(place: Place, tmp_path: Path) -> None:
    mark = f"30{os.getpid()}"
    slow = rewritten(f"import subprocess\nsubprocess.run(['setsid', 'sleep', '{mark}'])\n")
    began = time.monotonic()
    verdict = await place.grade(slow, tmp_path, timeout=2.0)
    assert verdict.kind is VerdictKind.TIMED_OUT and "2 s" in verdict.reason
    assert time.monotonic() - began < 20
    assert "Timeout error: 2 seconds exceeded." in (tmp_path / "test_output.txt").read_text()
    assert not subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True).stdout


async def test_a_patch_that_ends_the_script_before_its_tests_is_not_resolved(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = partial(recipe_of.evaluation_script, install="python calc.py")
    monkeypatch.setattr(recipe_of, "evaluation_script", installed)
    verdict = await place.grade(rewritten("import os\nos.kill(os.getppid(), 9)\n"), tmp_path)
    assert (verdict.kind, verdict.reason) == (VerdictKind.UNRESOLVED, "the run ended before its tests did")


FORGED = """
import os, sys
os.write(1, b"PASSED tests/test_calc.py::test_add\\nPASSED tests/test_calc.py::test_double\\n")
os.write(2, b"+ : '>>>>> End Test Output'\\n")
os._exit(0)
"""


async def test_forged_markers_are_flagged_and_neutral(place: Place, tmp_path: Path) -> None:
    verdict = await place.grade(rewritten(FORGED), tmp_path)
    assert verdict.kind is VerdictKind.UNRESOLVED
    assert [flag.rule for flag in verdict.flags] == ["log_marker"]
    log = (tmp_path / "test_output.txt").read_text()
    assert log.count(">>>>> End Test Output") == 1
    assert log.count("\n+ : '>>>>> Start Test Output'\n") == 1


SPYING = """
import os, pathlib
seen = [pathlib.Path("/proc/self/environ").read_bytes()]
for process in pathlib.Path("/proc").glob("[0-9]*"):
    for name in ("environ", "cmdline"):
        try:
            seen.append((process / name).read_bytes())
        except OSError:
            pass
seen.append(pathlib.Path("/proc/self/fd/0").read_bytes())
print("SEEN", b"".join(seen).hex(), flush=True)
"""


async def test_the_word_before_the_markers_is_not_found_by_tests(place: Place, tmp_path: Path, monkeypatch) -> None:
    word = "5ecre7" * 5
    monkeypatch.setattr("openhands_rl_plugin.evals.swe.grading.secrets.token_hex", lambda size: word)
    await place.grade(rewritten(SPYING), tmp_path)
    log = (tmp_path / "test_output.txt").read_text()
    seen = bytes.fromhex(log.split("SEEN ")[1].split()[0])
    assert b"run_tests.py" in seen
    assert word.encode() not in seen
    assert word not in log


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
        monkeypatch.setattr("openhands_rl_plugin.evals.swe.backends.sandbox.can_overlay", lambda *folders: False)
    layer = await place.backend.prepare(place.sample.instance)
    before = _listing(place.cache)
    assert (await place.grade(rewritten(HOSTILE), tmp_path)).kind is VerdictKind.RESOLVED
    assert _listing(place.cache) == before
    assert not list(layer.rglob("planted"))


OWN_TESTS = """\
diff --git a/tests/test_more.py b/tests/test_more.py
new file mode 100644
--- /dev/null
+++ b/tests/test_more.py
@@ -0,0 +1,2 @@
+def test_more():
+    raise AssertionError("the hidden test")
"""


async def test_the_rows_tests_take_the_place_of_the_patchs(place: Place, tmp_path: Path) -> None:
    row = place.sample.instance.model_copy(
        update={
            "test_patch": OWN_TESTS,
            "fail_to_pass": ("tests/test_more.py::test_more",),
            "pass_to_pass": (),
            "extra": {
                **place.sample.instance.extra,
                "test_command": "sed -i s/test_calc.py/test_more.py/ run_tests.py; python run_tests.py",
            },
        }
    )
    cheat = OWN_TESTS.replace('raise AssertionError("the hidden test")', "pass")
    verdict = await place.grade(cheat, tmp_path, row)
    assert verdict.fail_to_pass.failure == ("tests/test_more.py::test_more",)


async def test_what_set_up_changed_is_there_when_the_tests_are_new_files(place: Place, tmp_path: Path) -> None:
    command = "cat built.txt; python run_tests.py | sed s/test_double/$(cat built.txt)/"
    row = place.sample.instance.model_copy(
        update={"test_patch": OWN_TESTS, "fail_to_pass": ("tests/test_calc.py::set_up",), "pass_to_pass": ()}
    )
    row = with_extra(row, test_command=command, install=["echo set_up > built.txt", "git add built.txt"])
    assert (await place.grade(NOTHING, tmp_path, row)).kind is VerdictKind.RESOLVED


async def test_a_checkout_is_the_base_without_anything_later(place: Place, tmp_path: Path) -> None:
    row = with_extra(place.sample.instance, install=["echo '# made by set-up' >> calc.py"])
    checkout = await place.backend.checkout(row, tmp_path / "calc")
    assert "made by set-up" in (checkout.directory / "calc.py").read_text()
    assert git(checkout.directory, "status", "--porcelain", "--untracked-files=no") == ""
    assert git(checkout.directory, "tag") == "v1"
    assert git(checkout.directory, "remote") == ""
    known = git(checkout.directory, "cat-file", "--batch-check", "--batch-all-objects")
    assert row.base_commit in known and place.sample.later not in known
    git(checkout.directory, "fsck", "--strict")
    assert {mount.inside for mount in checkout.mounts} >= {"/conda/envs", "/testbed"}
    assert all(mount.host.exists() for mount in checkout.mounts)
    assert checkout.variables["PATH"].startswith("/conda/envs/testbed/bin:")


async def test_many_at_once_set_up_once(place: Place, tmp_path: Path) -> None:
    row = with_extra(place.sample.instance, install=["echo once >> /testbed/built.txt"])
    layers = await asyncio.gather(*(place.backend.prepare(row) for _ in range(4)))
    assert len(set(layers)) == 1
    assert (layers[0] / "testbed" / "built.txt").read_text() == "once\n"
    made = [path for path in (place.cache / "instances").iterdir() if ".making-" in path.name]
    assert not made


async def test_a_failed_set_up_says_why_and_leaves_nothing(place: Place, tmp_path: Path) -> None:
    row = with_extra(place.sample.instance, install=["echo no such compiler >&2; exit 3"])
    verdict = await place.grade(FIX, tmp_path, row)
    assert verdict.kind is VerdictKind.INFRASTRUCTURE
    assert "no such compiler" in verdict.reason and "\n" not in verdict.reason
    assert not [path for path in (place.cache / "instances").iterdir() if ".making-" in path.name]


async def test_a_missing_python_and_a_missing_commit_are_one_line(place: Place, tmp_path: Path) -> None:
    python = await place.grade(FIX, tmp_path / "1", with_extra(place.sample.instance, python="2.2"))
    lost = place.sample.instance.model_copy(update={"base_commit": "0" * 40})
    commit = await place.grade(FIX, tmp_path / "2", lost)
    assert python.kind is commit.kind is VerdictKind.INFRASTRUCTURE
    assert python.reason.startswith("Python 2.2 is not installed; get it with: uv python install 2.2")
    assert "no repository someone/calc with commit 000000000000" in commit.reason
    with pytest.raises(InfrastructureError):
        await place.backend.checkout(lost, tmp_path / "3")


async def test_what_a_killed_process_left_is_cleared_away(place: Place) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, kept = (place.cache / "runs" / f"{number}-left" for number in (ended.pid, os.getpid()))
    for folder in (left, kept):
        folder.mkdir(parents=True, exist_ok=True)
    await place.backend.check()
    assert kept.exists() and not left.exists()
    kept.rmdir()


@pytest.mark.usefixtures("no_bubblewrap")
async def test_without_bubblewrap_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bubblewrap is not installed: .*--backend docker$"):
        await LocalBackend(cache=tmp_path / "cache").check()


class Watching:
    """A guard that flags what the tests printed."""

    def script(self, grading: Grading) -> str:
        return grading.recipe.evaluation_script.replace("python run_tests.py", "echo watched; python run_tests.py")

    async def flags(self, grading: Grading, run: TestRun, *, passed: bool) -> tuple[Flag, ...]:
        return (Flag(rule="watched", where=str(passed)),) if "\nwatched\n" in run.tests else ()


async def test_a_guards_flags_count(place: Place, tmp_path: Path) -> None:
    backend = LocalBackend(cache=place.cache, sources=[MirrorSource(place.sample.mirror)], guard=Watching())
    verdict = await backend.grade(place.sample.instance, FIX, logs=tmp_path, timeout=60.0)
    assert (verdict.kind, verdict.reason) == (VerdictKind.UNRESOLVED, "flagged: watched")
    assert [flag.where for flag in verdict.flags] == ["True"]


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    """Every file of the cache's layers with its size and time of change."""
    files = [path for name in ("instances", "environments") for path in (folder / name).rglob("*")]
    return sorted((str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in files if not path.is_dir())
