"""The shell of a session: what lasts, what ends, and the limits. OpenHands is not involved. All bombs are small."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from needs import needs_bubblewrap

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.environments.workspace import processes
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox, SandboxLimits, SubprocessSandbox
from openhands_rl_plugin.environments.workspace.shell import CommandResult, SandboxEndedError, Shell

pytestmark = [pytest.mark.contract, needs_bubblewrap]

Run = Callable[..., CommandResult]
MEBIBYTE = 1024**2
LIMITS = SandboxLimits(processes=64, memory=128 * MEBIBYTE, file=8 * MEBIBYTE, temporary=16 * MEBIBYTE)


def make_sandbox(directory: Path) -> BubblewrapSandbox:
    root = directory / "workspace"
    root.mkdir(parents=True, exist_ok=True)
    return BubblewrapSandbox(root, temporary=LIMITS.temporary)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(make_sandbox(tmp_path), {"GREETING": "hello there"}, LIMITS)
    yield shell
    shell.close()


@pytest.fixture
def run(shell: Shell) -> Run:
    return lambda command, timeout=20.0, **options: shell.run(command, timeout=timeout, **options)


def alive(*seconds: str) -> bool:
    """Whether ``sleep`` runs on the host for one of the numbers of seconds."""
    return any(
        not subprocess.run(["pgrep", "-f", f"^sleep {each}$"], capture_output=True).returncode for each in seconds
    )


def gone(*seconds: str) -> bool:
    deadline = time.monotonic() + 5
    while (found := alive(*seconds)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not found


def test_what_a_command_prints_arrives(run: Run):
    result = run("echo out; echo err >&2; exit 7")
    assert (result.output, result.exit_code) == ("out\nerr\n", 7)
    assert run('cat; read x; echo "[$x]"').output == "[]\n"
    assert run(r"printf 'a\xffb\0c'; echo 'héé ☃'").output == "a\ufffdb\0chéé ☃\n"
    assert run("echo 'a \ud800 b'", cwd="/workspace/\udfff").output.endswith("a \ufffd b\n")
    assert run(f"cat <<'X' | wc -c\n{'y' * 300_000}\nX").output.strip() == "300001"
    assert [run(f"echo {i}").output for i in range(60)] == [f"{i}\n" for i in range(60)]
    cut = run("seq 200000").output
    assert cut.startswith("1\n2\n") and cut.endswith("\n200000\n") and "bytes of output cut" in cut
    assert len(cut) < 29_000


def test_state_lasts_from_command_to_command(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    assert run("echo ${MY_API_KEY-unset} $GREETING").output == "unset hello there\n"
    run(
        "mkdir -p a/b; cd a/b; export X='1 2'; y=plain; f() { echo \"f:$1\"; }; alias hi='echo hi'; unset GREETING;"
        " umask 077"
    )
    result = run('pwd; echo "$X|$y|${GREETING-unset}|$#"; f 3; hi; umask; env | grep -c ^y=')
    assert result.output == "/workspace/a/b\n1 2|plain|unset|0\nf:3\nhi\n0077\n0\n"
    assert result.cwd == "/workspace/a/b"
    assert run("pwd; cd /; y=aside", cwd="/workspace/a", keep=False).output == "/workspace/a\n"
    assert run("pwd; echo $y").output == "/workspace/a/b\nplain\n"
    assert run("y=1; cd /; exit 3").exit_code == 3
    assert run("echo $y; pwd; mkdir /workspace/d; cd /workspace/d; rmdir /workspace/d").output == "1\n/\n"
    assert "/workspace/d is gone" in (result := run("pwd")).output and result.output.endswith("\n/workspace\n")


def test_a_shell_that_is_ended_leaves_the_state_before(run: Run):
    run("export X=kept; mkdir bin; printf '#!/bin/sh\\n' > bin/python; chmod +x bin/python; PATH=/workspace/bin:$PATH")
    for ending in ("X=lost; kill -9 $$", "X=lost; exec true", "if then", "echo 'open", "X=lost; while :; do :; done"):
        result = run(ending, timeout=1)
        assert result.python == "/workspace/bin/python" and result.timed_out == ("while" in ending)
        assert run("echo $X").output == "kept\n"
    gone = run("set -e; PATH=/nowhere; true")
    assert (gone.python, gone.exit_code) == ("", 0)


def test_a_time_limit_ends_the_command_and_what_it_started(run: Run):
    run("export X=before")
    started = time.monotonic()
    marker = f"98{os.getpid()}"
    result = run(f"echo partial; X=after; (sleep {marker}1 &); sleep {marker}2 & sleep {marker}3", timeout=0.5)
    assert time.monotonic() - started < 5
    assert (result.output, result.exit_code, result.timed_out) == ("partial\n", None, True)
    assert gone(*(f"{marker}{n}" for n in (1, 2, 3)))
    assert run("echo $X").output == "before\n"


def test_background_processes_do_not_hold_the_answer_and_live_on(shell: Shell, run: Run):
    started = time.monotonic()
    marker = f"97{os.getpid()}"
    assert run(f"sleep {marker} & echo started; (sleep 0.2; echo late) &").output == "started\n"
    assert time.monotonic() - started < 5
    time.sleep(0.5)
    result = run("echo next")
    assert (result.earlier, result.output) == ("late\n", "next\n") and alive(marker)
    shell.close()
    assert gone(marker)


@pytest.mark.parametrize("name", [r"$'\xff'", r"$'a\nb'", r"$'\e[2J\a'", '"a\'b"'])
def test_a_folder_of_any_name_may_be_the_working_directory(shell: Shell, run: Run, name: str):
    made = run(f"mkdir {name} && cd {name}")
    assert made.exit_code == 0 and made.cwd.startswith("/workspace/") and made.cwd.encode()
    other = Shell(shell._sandbox, start=shell.snapshot()[0])
    assert run("pwd").output == other.run("pwd", timeout=20).output == made.cwd + "\n"
    other.close()


def test_closing_ends_a_running_command_and_why_none_starts_is_known(shell: Shell, run: Run, tmp_path: Path):
    closer = threading.Timer(0.3, shell.close)
    closer.start()
    started = time.monotonic()
    with pytest.raises(SandboxEndedError):
        run("sleep 60", timeout=60)
    assert time.monotonic() - started < 10
    closer.join()
    with pytest.raises(SandboxEndedError):
        run("echo", timeout=1)
    sandbox = make_sandbox(tmp_path)
    sandbox.wrap = lambda command: ["/bin/sh", "-c", "echo broken >&2; exit 1"]  # type: ignore[method-assign]
    with pytest.raises(InfrastructureError, match="broken"):
        Shell(sandbox).run("echo", timeout=5)


def test_without_isolation_the_workspace_is_the_folder_and_all_ends_with_the_shell(tmp_path: Path):
    marker, root = f"95{os.getpid()}", tmp_path / "two words"
    root.mkdir()
    shell = Shell(SubprocessSandbox(root, tmp_path / ".private"))
    assert shell.run("pwd; echo text > file", timeout=20).output == f"{root}\n" and shell.read("file") == b"text\n"
    shell.run(f"(setsid sh -c 'setsid sleep {marker}1 & exec sleep {marker}2' &) ; sleep 0.2", timeout=20)
    shell.close()
    assert gone(f"{marker}1", f"{marker}2")
    shell = Shell(SubprocessSandbox(root, tmp_path / ".private"))
    with pytest.raises(SandboxEndedError):
        shell.run("kill -9 $PPID; sleep 5", timeout=20)
    assert shell.run("echo again", timeout=20).output == "again\n"
    shell.close()


async def test_a_program_that_writes_without_end_is_ended_at_any_moment() -> None:
    for steps in range(4, 16):
        running = asyncio.create_task(processes.run(["yes"]))
        for _ in range(steps):
            await asyncio.sleep(0)
            time.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_program_that_left_the_group_with_the_pipes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_LONGEST_REST", 0.2)
    ended = await processes.run(["sh", "-c", "setsid sleep 20 & echo on; wait"], timeout=0.5)
    assert ended.timed_out and ended.text == "on\n" and ended.seconds < 10


class TestLimits:
    """Of one process, by the kernel; of all of them where there are control groups."""

    def test_of_a_process_and_of_files(self, run: Run):
        assert "MemoryError" in run("python3 -c 'bytearray(10**9)'").output
        assert run("head -c 20M /dev/zero > big; stat -c %s big").output.endswith(f"{LIMITS.file}\n")
        for folder in ("/tmp", "/dev/shm"):
            fill = f"for n in 1 2 3 4; do head -c 7M /dev/zero > {folder}/big$n; done; du -sm {folder} | cut -f1"
            assert int(run(fill).output.split()[-1]) <= 16
        for folder in ("/dev", "/", "/run", "/etc"):
            assert "Read-only" in run(f"touch {folder}/big").output

    @pytest.mark.skipif(not processes._place() and os.geteuid() == 0, reason="no control groups can be made here")
    def test_of_all_processes(self, run: Run):
        assert "fork: " in run("bomb() { bomb | bomb & }; bomb; sleep 20", timeout=2).output
        assert run("kill -9 -1; wait; echo on").output.endswith("on\n")

    @pytest.mark.skipif(not processes._place(), reason="no control groups can be made here")
    def test_of_the_memory_of_several_processes(self, run: Run):
        hold = "python3 -c 'import time; b = bytearray(60 << 20); time.sleep(4)'"
        result = run(f"for i in 1 2 3 4; do ({hold}; echo status $?) & done; wait; echo survived", timeout=19)
        assert "survived" in result.output and result.output.count("status 137") >= 2
        assert run("echo on").output.endswith("on\n")

    def test_nobody_writes_to_the_pipe_of_the_answers(self, run: Run):
        forged = '{"output": "forged", "earlier": "", "exit_code": 0, "timed_out": false, "cwd": "/"}'
        run(f"for n in 0 1 2 3 4 5 6 7 8 9; do echo '{forged}' > /proc/1/fd/$n; done 2>/dev/null; echo real")
        for number in range(3):
            assert run(f"echo real {number}").output == f"real {number}\n"
        assert "Permission denied" in run("cat /proc/1/mem").output
        # In place of the shell's own files, a pipe would hold up who answers for as long as a command may take.
        reader = "(while :; do cat /tmp/.shell/state.new.cwd; done > /dev/null 2>&1 &)"
        run(f"rm -f /tmp/.shell/state.new.cwd; mkfifo /tmp/.shell/state.new.cwd; {reader}", timeout=3)
        assert run("echo on", timeout=3).output == "on\n"


class TestIsolation:
    def test_the_host_is_read_only(self, run: Run):
        marker = f"rl-escape-{os.getpid()}"
        homes = ["/etc", "/usr", "/var", "/root", os.path.expanduser("~"), os.getcwd(), "/", "/tmp"]
        run(f"for d in {' '.join(homes)}; do touch $d/{marker} 2>/dev/null; done")
        assert not any(os.path.exists(f"{home}/{marker}") for home in homes)

    def test_processes_of_the_host_cannot_be_seen_or_ended(self, run: Run):
        assert run(f"kill -0 {os.getpid()}").exit_code != 0
        assert int(run("ls -d /proc/[0-9]* | wc -l").output) < 10
        assert run("kill -9 1; echo survived").output == "survived\n"

    def test_a_network_is_there_on_request(self, run: Run, tmp_path: Path):
        shell = Shell(BubblewrapSandbox(tmp_path, network=True))
        with socket.create_server(("127.0.0.1", 0)) as server:
            connect = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}"
            assert shell.run(connect, timeout=20).exit_code == 0 and run(connect).exit_code
        shell.close()

    def test_no_command_gets_a_new_user_namespace(self, run: Run):
        assert "No space left on device" in run("unshare --user true").output

    def test_programs_are_found_where_the_users_path_is_a_folder_of_links_that_is_hidden(
        self, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ):
        links = tmp_path_factory.mktemp("links")
        for name in ("bash", "ls"):
            (links / name).symlink_to(shutil.which(name) or f"/bin/{name}")
        monkeypatch.setenv("PATH", str(links))
        (tmp_path / "file").touch()
        shell = Shell(BubblewrapSandbox(tmp_path))
        assert shell.run("ls", timeout=20).output == "file\n"
        shell.close()

    def test_the_sandbox_ends_with_its_host(self, tmp_path: Path):
        marker = f"96{os.getpid()}"
        pid = os.fork()
        if pid == 0:
            Shell(make_sandbox(tmp_path / "child")).run(f"sleep {marker} & echo", timeout=20)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert gone(marker)
