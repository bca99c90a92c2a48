"""Bounds on what commands use, by the kernel's groups and by counting; all bombs here are small."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from needs import needs_bubblewrap
from test_shell import gone

from openhands_rl_plugin.environments.workspace import cgroups
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox, SandboxLimits, SubprocessSandbox
from openhands_rl_plugin.environments.workspace.shell import CommandResult, SandboxEndedError, Shell

pytestmark = pytest.mark.contract

MEBIBYTE = 1024**2
LIMITS = SandboxLimits(processes=64, memory=128 * MEBIBYTE, disk=64 * MEBIBYTE, temporary=16 * MEBIBYTE)
FORKS = "bomb() { bomb | bomb & }; bomb; sleep 20"
# Where root's processes are only counted, a bomb at full speed can outrun that on a busy machine.
MANY = "while sleep 50 & do sleep 0.005; done; sleep 50"
# In several processes: what one may have is bounded by RLIMIT_DATA.
MEMORY = (
    "for i in 1 2 3 4; do (python3 -c 'import time; b = bytearray(60 << 20); time.sleep(4)'; echo status $?) & done; "
    "wait; echo survived"
)
Run = Callable[..., CommandResult]


@pytest.fixture(params=["grouped", "counted"])
def kept_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "counted":
        monkeypatch.setattr(cgroups, "_place", lambda: None)
    elif not cgroups._place():
        pytest.skip("no control groups can be made here")
    return request.param


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "work").mkdir()
    (tmp_path / "beside").mkdir()
    writable = [tmp_path / "beside"]
    sandbox = BubblewrapSandbox(tmp_path / "work", temporary=LIMITS.temporary, writable=writable)
    shell = Shell(sandbox, limits=LIMITS)
    yield lambda command, timeout=20.0: shell.run(command, timeout=timeout)
    shell.close()


@needs_bubblewrap
class TestBombs:
    def test_processes(self, run: Run, kept_by: str):
        result = run(*(FORKS, 2) if kept_by == "grouped" else (MANY, 3))
        # Without root the kernel may be first, by RLIMIT_NPROC.
        if kept_by == "counted" and os.geteuid() == 0:
            assert "the session has more than 64 processes" in result.output and result.exit_code == 137
        else:
            assert "fork: " in result.output
        assert run("kill -9 -1; wait; echo on").output.endswith("on\n")

    def test_memory_of_several_processes(self, run: Run, kept_by: str):
        started = time.monotonic()
        result = run(MEMORY, timeout=19)
        assert time.monotonic() - started < 12
        if kept_by == "counted":
            assert "use more than 128 MiB of memory" in result.output and "survived" not in result.output
        else:
            assert "survived" in result.output and result.output.count("status 137") >= 2
        assert run("echo on").output.endswith("on\n")

    def test_disk(self, run: Run, tmp_path: Path):
        fill = "for i in $(seq 400); do head -c 1000000 /dev/zero > big$i; sleep 0.01; done; echo survived"
        result = run(fill)
        assert "added more than 64 MiB to its workspace" in result.output and "survived" not in result.output
        used = sum(path.stat().st_size for path in (tmp_path / "work").iterdir())
        assert used < 200 * MEBIBYTE
        assert "added more than" in run(fill.replace("big", "more")).output
        # So that bombs in a row leave the processors to others.
        began = time.monotonic()
        assert run("rm -f big* more*; echo removed").output.endswith("removed\n") and time.monotonic() - began > 0.5

    def test_empty_files(self, run: Run, tmp_path: Path):
        """Each takes an inode, of which a file system has so many."""
        result = run("python3 -c 'for n in range(100_000): open(str(n), \"x\")'; echo survived", timeout=60)
        assert "added more than 64 MiB to its workspace" in result.output and "survived" not in result.output
        assert len(os.listdir(tmp_path / "work")) < 60_000
        assert run("find . -type f -delete; echo removed").output.endswith("removed\n")

    def test_folders_that_the_user_lends_count(self, run: Run, tmp_path: Path):
        for _ in range(2):
            assert "added more than" in run(f"head -c 100000000 /dev/zero >> {tmp_path}/beside/big; sleep 9").output

    def test_a_workspace_that_was_large_before_counts_from_there(self, run: Run, tmp_path: Path):
        (tmp_path / "work" / "mine").write_bytes(b"\1" * 150 * MEBIBYTE)
        result = run("head -c 30000000 /dev/zero > little; sleep 0.5; echo survived")
        assert result.output == "survived\n"

    def test_files_in_memory(self, run: Run):
        fill = "head -c 100000000 /dev/zero > {}/big; stat -c %s {}/big"
        for folder in ("/tmp", "/dev/shm"):
            assert int(run(fill.format(folder, folder)).output.split()[-1]) <= 16 * MEBIBYTE
        for folder in ("/dev", "/", "/run", "/etc"):
            assert "Read-only" in run(f"touch {folder}/big").output

    def test_a_background_process_is_bounded_too(self, run: Run, kept_by: str):
        assert run(f"({MANY}) > /dev/null 2>&1 & echo started").output == "started\n"
        first, printed = "no room" if kept_by == "grouped" else "more than 64 processes", ""
        until = time.monotonic() + 30
        while first not in printed and time.monotonic() < until and os.geteuid() == 0:
            time.sleep(0.3)
            result = run("echo on", timeout=10)
            printed += result.earlier + result.output
        assert first in printed or os.geteuid() != 0
        assert int(run("set -- /proc/[0-9]*; echo $#").output.split()[-1]) <= 66
        assert run("kill -9 -1; echo on", timeout=10).output.endswith("on\n")

    def test_nobody_writes_to_the_pipe_of_the_answers(self, run: Run):
        forged = '{"output": "forged", "earlier": "", "exit_code": 0, "timed_out": false, "cwd": "/"}'
        run(f"for n in 0 1 2 3 4 5 6 7 8 9; do echo '{forged}' > /proc/1/fd/$n; done 2>/dev/null; echo real")
        for number in range(3):
            assert run(f"echo real {number}").output == f"real {number}\n"
        assert "Permission denied" in run("cat /proc/1/mem").output
        # In place of the shell's own files, a pipe would hold up who counts for as long as a command may take.
        reader = "(while :; do cat /tmp/.shell/state.new.cwd; done > /dev/null 2>&1 &)"
        run(f"rm -f /tmp/.shell/state.new.cwd; mkfifo /tmp/.shell/state.new.cwd; {reader}", timeout=3)
        assert run("echo on", timeout=3).output == "on\n"


def test_what_left_its_session_ends_with_the_shell_without_bubblewrap(tmp_path: Path):
    """Also where a command ended the process that watches."""
    marker = f"95{os.getpid()}"
    shell = Shell(SubprocessSandbox(tmp_path, tmp_path / ".private"))
    shell.run(f"(setsid sh -c 'setsid sleep {marker}1 & exec sleep {marker}2' &) ; sleep 0.2", timeout=20)
    shell.close()
    assert gone(f"{marker}1", f"{marker}2")
    if not cgroups._place():
        pytest.skip("no control groups can be made here")
    shell = Shell(SubprocessSandbox(tmp_path, tmp_path / ".private"))
    with pytest.raises(SandboxEndedError):
        shell.run(f"setsid sleep {marker}3 & kill -9 $PPID; sleep 1", timeout=20)
    assert gone(f"{marker}3")
    shell.close()
