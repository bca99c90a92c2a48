"""The shell of a session, in both kinds of sandbox. OpenHands is not involved."""

from __future__ import annotations

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

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.environments.workspace.sandbox import (
    BubblewrapSandbox,
    Sandbox,
    SandboxLimits,
    SubprocessSandbox,
)
from openhands_rl_plugin.environments.workspace.shell import CommandResult, SandboxEndedError, Shell

pytestmark = pytest.mark.contract

Run = Callable[..., CommandResult]


def make_sandbox(kind: str, directory: Path) -> Sandbox:
    root = directory / "workspace"
    root.mkdir(parents=True, exist_ok=True)
    return BubblewrapSandbox(root) if kind == "bubblewrap" else SubprocessSandbox(root, directory)


@pytest.fixture(params=["subprocess", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(make_sandbox(request.param, tmp_path), {"GREETING": "hello there"})
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


def test_workspace_has_its_name_inside(run: Run):
    run("echo text > /workspace/file; mkdir -p /workspace/dir")
    result = run("cat /workspace/file; cd /workspace/dir; pwd; ls -d $PWD; echo /workspaces /x/workspace")
    assert result.output == "text\n/workspace/dir\n/workspace/dir\n/workspaces /x/workspace\n"


def test_a_time_limit_ends_the_command_and_all_it_started(run: Run):
    run("export X=before")
    started = time.monotonic()
    marker = f"98{os.getpid()}"
    result = run(f"echo partial; X=after; (sleep {marker}1 &); setsid sleep {marker}2 & sleep {marker}3", timeout=0.5)
    assert time.monotonic() - started < 5
    assert (result.output, result.exit_code, result.timed_out) == ("partial\n", None, True)
    assert gone(*(f"{marker}{n}" for n in (1, 2, 3)))
    assert run("echo $X").output == "before\n"


def test_background_processes_do_not_hold_the_answer_and_live_on(shell: Shell, run: Run):
    started = time.monotonic()
    marker = f"97{os.getpid()}"
    assert run(f"sleep {marker} & echo started; (sleep 0.2; echo late) &").output == "started\n"
    assert time.monotonic() - started < 5
    run("sleep 60", timeout=0.4)
    assert alive(marker)
    result = run("echo next")
    assert (result.earlier, result.output) == ("", "next\n")  # it came beside the command before
    shell.close()
    assert gone(marker)


def test_late_output_of_a_background_process_is_not_lost(run: Run):
    assert run("(sleep 0.2; echo late) & echo now").output == "now\n"
    time.sleep(0.5)
    result = run("echo next")
    assert (result.earlier, result.output) == ("late\n", "next\n")


@pytest.mark.parametrize("name", [r"$'\xff'", r"$'a\nb'", r"$'\e[2J\a'", '"a\'b"'])
def test_a_folder_of_any_name_may_be_the_working_directory(shell: Shell, run: Run, name: str):
    made = run(f"mkdir {name} && cd {name}")
    assert made.exit_code == 0 and made.cwd.startswith("/workspace/") and made.cwd.encode()
    other = Shell(shell._sandbox, start=shell.snapshot().cwd)
    assert run("pwd").output == other.run("pwd", timeout=20).output == made.cwd + "\n"
    other.close()


@pytest.mark.parametrize("kind", ["subprocess", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def test_memory_is_bounded_and_closing_ends_a_running_command(kind: str, tmp_path: Path):
    shell = Shell(make_sandbox(kind, tmp_path), limits=SandboxLimits(memory=200 * 1024 * 1024))
    assert "MemoryError" in shell.run("python3 -c 'bytearray(10**9)'", timeout=20).output
    closer = threading.Timer(0.3, shell.close)
    closer.start()
    started = time.monotonic()
    with pytest.raises(SandboxEndedError):
        shell.run("sleep 60", timeout=60)
    assert time.monotonic() - started < 10
    closer.join()
    with pytest.raises(SandboxEndedError):
        shell.run("echo", timeout=1)


def test_a_sandbox_that_ended_is_replaced_and_one_that_cannot_start_says_why(tmp_path: Path):
    sandbox = make_sandbox("subprocess", tmp_path)
    shell = Shell(sandbox)
    with pytest.raises(SandboxEndedError):
        shell.run("kill -9 $PPID; sleep 5", timeout=20)
    assert shell.run("echo again", timeout=20).output == "again\n"
    shell.close()
    sandbox.wrap = lambda command: ["/bin/sh", "-c", "echo broken >&2; exit 1"]  # type: ignore[method-assign]
    with pytest.raises(InfrastructureError, match="broken"):
        Shell(sandbox).run("echo", timeout=5)
    with pytest.raises(ConfigError, match="without blanks"):
        SubprocessSandbox(tmp_path / "two words", tmp_path)


@needs_bubblewrap
class TestBubblewrap:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Iterator[Run]:
        shell = Shell(make_sandbox("bubblewrap", tmp_path / "mine"))
        yield lambda command, timeout=20.0: shell.run(command, timeout=timeout)
        shell.close()

    def test_the_host_is_read_only(self, run: Run):
        marker = f"rl-escape-{os.getpid()}"
        homes = ["/etc", "/usr", "/var", "/root", os.path.expanduser("~"), os.getcwd(), "/", "/tmp"]
        run(f"for d in {' '.join(homes)}; do touch $d/{marker} 2>/dev/null; done")
        assert not any(os.path.exists(f"{home}/{marker}") for home in homes)

    def test_processes_of_the_host_cannot_be_seen_or_ended(self, run: Run):
        assert run(f"kill -0 {os.getpid()}").exit_code != 0
        assert int(run("ls -d /proc/[0-9]* | wc -l").output) < 10
        assert run("kill -9 1; echo survived").output == "survived\n"

    @pytest.mark.parametrize("network", [False, True])
    def test_a_network_is_there_on_request(self, network: bool, tmp_path: Path):
        shell = Shell(BubblewrapSandbox(tmp_path, network=network))
        with socket.create_server(("127.0.0.1", 0)) as server:
            connect = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}"
            assert (shell.run(connect, timeout=20).exit_code == 0) == network
        shell.close()

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
            Shell(make_sandbox("bubblewrap", tmp_path / "child")).run(f"sleep {marker} & echo", timeout=20)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert gone(marker)
