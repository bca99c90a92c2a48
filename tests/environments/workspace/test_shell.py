"""The shell of a session, in both kinds of sandbox. OpenHands is not involved."""

from __future__ import annotations

import os
import shutil
import signal
import socket
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
    def run(command: str, timeout: float = 20.0, **options) -> CommandResult:
        return shell.run(command, timeout=timeout, **options)

    return run


def alive(marker: str) -> bool:
    """Whether a process on the host has the marker in its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    return True
            except OSError:
                continue
    return False


def gone(marker: str) -> bool:
    deadline = time.monotonic() + 5
    while alive(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(marker)


def test_output_of_both_streams_and_the_exit_code(run: Run):
    result = run("echo out; echo err >&2; exit 7")
    assert (result.output, result.exit_code) == ("out\nerr\n", 7)


def test_state_lasts_from_command_to_command(run: Run):
    run(
        "mkdir -p a/b; cd a/b; export X='1 2'; y=plain; f() { echo \"f:$1\"; }; alias hi='echo hi'; unset GREETING;"
        " umask 077"
    )
    result = run('pwd; echo "$X|$y|${GREETING-unset}|$#"; f 3; hi; umask; env | grep -c ^y=')
    assert result.output == "/workspace/a/b\n1 2|plain|unset|0\nf:3\nhi\n0077\n0\n"
    assert result.cwd == "/workspace/a/b"


def test_a_shell_that_is_ended_leaves_the_state_before(run: Run):
    run("export X=kept")
    for ending in ("X=lost; kill -9 $$", "X=lost; exec true", "if then", "echo 'open"):
        run(ending)
        assert run("echo $X").output == "kept\n"


def test_exit_keeps_state_and_the_next_command_works(run: Run):
    assert run("X=1; cd /; exit 3").exit_code == 3
    assert run("echo $X; pwd").output == "1\n/\n"


def test_a_working_directory_that_is_gone_is_said_so(run: Run):
    run("mkdir d; cd d; rmdir /workspace/d")
    result = run("pwd")
    assert "/workspace/d is gone" in result.output and result.output.endswith("\n/workspace\n")


def test_an_aside_changes_no_state(run: Run):
    run("mkdir sub")
    assert run("pwd; cd /; X=1", cwd="/workspace/sub", keep=False).output == "/workspace/sub\n"
    assert run("pwd; echo ${X-unset}").output == "/workspace\nunset\n"


def test_stdin_is_empty(run: Run):
    assert run('cat; read x; echo "[$x]"').output == "[]\n"


def test_workspace_has_its_name_inside(run: Run):
    run("echo text > /workspace/file; mkdir -p /workspace/dir")
    assert (
        run("cat /workspace/file; cd /workspace/dir; pwd; ls -d $PWD").output
        == "text\n/workspace/dir\n/workspace/dir\n"
    )
    assert run("echo /workspaces /x/workspace").output == "/workspaces /x/workspace\n"


def test_a_time_limit_ends_the_command_and_all_it_started(run: Run):
    run("export X=before")
    started = time.monotonic()
    marker = f"sleep 98{os.getpid()}"
    result = run(f"echo partial; X=after; ({marker}1 &); setsid {marker}2 & {marker}3", timeout=0.5)
    assert time.monotonic() - started < 5
    assert (result.output, result.exit_code, result.timed_out) == ("partial\n", None, True)
    assert all(gone(f"98{os.getpid()}{n}") for n in (1, 2, 3))
    assert run("echo $X").output == "before\n"


def test_a_busy_builtin_is_ended_too(run: Run):
    assert run("while :; do :; done", timeout=0.3).timed_out
    assert run("echo on").output == "on\n"


def test_background_processes_do_not_hold_the_answer_and_live_on(shell: Shell, run: Run):
    started = time.monotonic()
    marker = f"97{os.getpid()}"
    assert run(f"sleep {marker} & echo started").output == "started\n"
    assert time.monotonic() - started < 5
    run("sleep 0.2")
    assert alive(marker)
    run("sleep 60", timeout=0.2)
    assert alive(marker)
    shell.close()
    assert gone(marker)


def test_late_output_of_a_background_process_is_not_lost(run: Run):
    assert run("(sleep 0.2; echo late) & echo now").output == "now\n"
    time.sleep(0.5)
    result = run("echo next")
    assert (result.earlier, result.output) == ("late\n", "next\n")


def test_long_output_is_cut_in_the_middle(run: Run):
    result = run("seq 200000")
    assert result.output.startswith("1\n2\n") and result.output.endswith("\n200000\n")
    assert "bytes of output cut" in result.output and len(result.output) < 29_000


def test_output_that_is_no_text_arrives(run: Run):
    assert run(r"printf 'a\xffb\0c'").output == "a\ufffdb\0c"
    assert run("echo 'héé ☃'").output == "héé ☃\n"


@pytest.mark.parametrize("name", [r"$'\xff'", r"$'a\nb'", r"$'\e[2J\a'", '"a\'b"'])
def test_a_folder_of_any_name_may_be_the_working_directory(shell: Shell, run: Run, name: str):
    made = run(f"mkdir {name} && cd {name}")
    assert made.exit_code == 0 and made.cwd.startswith("/workspace/") and made.cwd.encode()
    assert run("pwd").output == made.cwd + "\n"
    other = Shell(shell._sandbox, start=shell.snapshot().cwd)
    assert other.run("pwd", timeout=20).output == made.cwd + "\n"
    other.close()


def test_half_a_surrogate_pair_is_a_replacement_sign(run: Run):
    assert run("echo 'a \ud800 b'", cwd="/workspace/\udfff").output.endswith("a \ufffd b\n")


def test_a_command_may_be_longer_than_an_argument(run: Run):
    assert run(f"cat <<'X' | wc -c\n{'y' * 300_000}\nX").output.strip() == "300001"


def test_no_output_is_lost_in_a_tight_loop(run: Run):
    assert [run(f"echo {i}").output for i in range(60)] == [f"{i}\n" for i in range(60)]


def test_only_a_small_environment_is_inherited(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    assert run("echo ${MY_API_KEY-unset} $GREETING").output == "unset hello there\n"


def test_nothing_of_this_process_changes(run: Run):
    before = (os.getcwd(), dict(os.environ))
    run("cd /; export LEAK=1")
    assert (os.getcwd(), dict(os.environ)) == before


@pytest.mark.parametrize("kind", ["subprocess", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def test_memory_is_bounded(kind: str, tmp_path: Path):
    shell = Shell(make_sandbox(kind, tmp_path), limits=SandboxLimits(memory=200 * 1024 * 1024))
    assert "MemoryError" in shell.run("python3 -c 'bytearray(10**9)'", timeout=20).output
    shell.close()


@pytest.mark.parametrize("kind", ["subprocess", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def test_closing_ends_a_running_command(kind: str, tmp_path: Path):
    shell = Shell(make_sandbox(kind, tmp_path))
    shell.run(":", timeout=20)
    closer = threading.Timer(0.3, shell.close)
    closer.start()
    started = time.monotonic()
    with pytest.raises(SandboxEndedError):
        shell.run("sleep 60", timeout=60)
    assert time.monotonic() - started < 10
    closer.join()
    with pytest.raises(SandboxEndedError):
        shell.run("echo", timeout=1)


def test_a_sandbox_that_was_ended_from_inside_is_replaced(tmp_path: Path):
    shell = Shell(make_sandbox("subprocess", tmp_path))
    with pytest.raises(SandboxEndedError):
        shell.run("kill -9 $PPID; sleep 5", timeout=20)
    assert shell.run("echo again", timeout=20).output == "again\n"
    shell.close()


def test_a_workspace_name_that_needs_quotes_is_refused_without_bubblewrap(tmp_path: Path):
    with pytest.raises(ConfigError, match="without blanks"):
        SubprocessSandbox(tmp_path / "two words", tmp_path)


def test_a_sandbox_that_cannot_start_is_an_infrastructure_failure(tmp_path: Path):
    sandbox = make_sandbox("subprocess", tmp_path)
    sandbox.wrap = lambda command: ["/bin/sh", "-c", "echo broken >&2; exit 1"]  # type: ignore[method-assign]
    with pytest.raises(InfrastructureError, match="broken"):
        Shell(sandbox).run("echo", timeout=5)


@needs_bubblewrap
class TestBubblewrap:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Iterator[Run]:
        shell = Shell(make_sandbox("bubblewrap", tmp_path / "mine"))
        yield lambda command, timeout=20.0: shell.run(command, timeout=timeout)
        shell.close()

    def test_the_host_is_read_only(self, run: Run):
        marker = f"rl-escape-{os.getpid()}"
        homes = ["/etc", "/usr", "/var", "/root", os.path.expanduser("~"), os.getcwd(), "/"]
        # Folders below /tmp may be there and writable, but they are the sandbox's own.
        hosts = [home for home in homes if not Path(home).is_relative_to("/tmp")]
        result = run(f"for d in {' '.join(hosts)}; do touch $d/{marker} 2>/dev/null && echo WROTE $d; done; echo done")
        assert result.output == "done\n"
        run(f"for d in {' '.join(homes)}; do touch $d/{marker} 2>/dev/null; done")
        assert not any(os.path.exists(f"{home}/{marker}") for home in homes)

    def test_tmp_is_private_and_gone_afterwards(self, run: Run):
        marker = Path(f"/tmp/rl-private-{os.getpid()}")
        assert run(f"echo x > {marker}; cat {marker}").output == "x\n"
        assert not marker.exists()

    def test_other_sessions_cannot_be_seen(self, run: Run, tmp_path: Path):
        other = tmp_path / "other" / "workspace"
        other.mkdir(parents=True)
        (other / "secret").write_text("s3cret")
        assert run(f"cat {other}/secret; ls {tmp_path}").exit_code != 0
        assert "other" not in run("find /tmp /var/tmp -name other").output

    def test_processes_of_the_host_cannot_be_seen_or_ended(self, run: Run):
        assert run(f"kill -0 {os.getpid()}").exit_code != 0
        assert int(run("ls -d /proc/[0-9]* | wc -l").output) < 10
        assert run("kill -9 1; echo survived").output == "survived\n"

    def test_there_is_no_network(self, run: Run):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert run(f"exec 3<>/dev/tcp/127.0.0.1/{port}").exit_code != 0

    def test_network_on_request(self, tmp_path: Path):
        root = tmp_path / "workspace"
        root.mkdir()
        shell = Shell(BubblewrapSandbox(root, network=True))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert shell.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}", timeout=20).exit_code == 0
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

    def test_siblings_of_the_workspace_are_hidden_where_it_is_outside_of_tmp(self):
        root = Path(os.getcwd()) / f".rl-sandbox-{os.getpid()}" / "a"
        root.mkdir(parents=True)
        (root.parent / "b").mkdir()
        shell = Shell(BubblewrapSandbox(root))
        try:
            assert "b" not in shell.run(f"ls {root.parent}", timeout=20).output.split()
            assert shell.run("touch mine", timeout=20).exit_code == 0 and (root / "mine").exists()
        finally:
            shell.close()
            shutil.rmtree(root.parent)

    def test_the_sandbox_ends_with_its_host(self, tmp_path: Path):
        marker = f"96{os.getpid()}"
        pid = os.fork()
        if pid == 0:
            Shell(make_sandbox("bubblewrap", tmp_path / "child")).run(f"sleep {marker} & echo", timeout=20)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert gone(marker)


def test_where_python_is_comes_with_every_result(run: Run):
    run("mkdir bin elsewhere; printf '#!/bin/sh\\n' | tee bin/python > elsewhere/python; chmod +x */python")
    assert run("PATH=/workspace/bin:$PATH; false").python == "/workspace/bin/python"
    assert run("PATH=/workspace/elsewhere:$PATH", keep=False).python == "/workspace/bin/python"
    # One that ends before its state is saved leaves what was known.
    assert run("kill -9 $$").python == "/workspace/bin/python"
    gone = run("set -e; PATH=/nowhere; true")
    assert (gone.python, gone.exit_code) == ("", 0)
