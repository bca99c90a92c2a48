"""Forks of a workspace: complete, apart from each other, bounded, and gone when they are closed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from needs import needs_bubblewrap
from openhands.core.config import OpenHandsConfig
from openhands.events.action import CmdRunAction, FileEditAction, FileReadAction
from openhands.events.event import FileEditSource
from openhands.events.observation import CmdOutputObservation
from openhands.events.stream import EventStream
from openhands.llm.llm_registry import LLMRegistry
from openhands.storage.memory import InMemoryFileStore

from openhands_rl_plugin.core.errors import BadEnvironmentError, InfrastructureError
from openhands_rl_plugin.environments.workspace.copies import ForkLimits, ForkMethod, Tree, fork_tree
from openhands_rl_plugin.hosts.v0.runtime import WorkspaceRuntime

pytestmark = needs_bubblewrap

METHODS: list[ForkMethod] = ["overlay", "copy"]
Make = Callable[..., WorkspaceRuntime]


def works(method: ForkMethod, folder: Path) -> bool:
    (folder / "probe").mkdir()
    (folder / "copy").mkdir()
    try:
        fork_tree(Tree(folder / "probe"), folder / "copy", methods=[method])
    except InfrastructureError:
        return False
    return True


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest, tmp_path: Path) -> ForkMethod:
    if not works(request.param, tmp_path):
        pytest.skip(f"{request.param} is not possible here")
    return request.param


@pytest.fixture(scope="module")
def llms() -> LLMRegistry:
    return LLMRegistry(OpenHandsConfig())


@pytest.fixture
def make(llms: LLMRegistry, tmp_path: Path) -> Iterator[Make]:
    made: list[WorkspaceRuntime] = []

    def make(*methods: ForkMethod, **config) -> WorkspaceRuntime:
        runtime = WorkspaceRuntime(
            config=OpenHandsConfig(enable_browser=False, **config),
            event_stream=EventStream("session", InMemoryFileStore()),
            llm_registry=llms,
            sid="session",
            headless_mode=True,
        )
        runtime.workspace.fork_methods = methods or runtime.workspace.fork_methods
        made.append(runtime)
        asyncio.run(runtime.connect())
        return runtime

    yield make
    for runtime in made:
        runtime.event_stream.close()
        runtime.close()


@pytest.fixture
def runtime(make: Make, method: ForkMethod) -> WorkspaceRuntime:
    return make(method)


@pytest.fixture
def fork() -> Iterator[Callable[[WorkspaceRuntime], WorkspaceRuntime]]:
    made: list[WorkspaceRuntime] = []

    def fork(runtime: WorkspaceRuntime) -> WorkspaceRuntime:
        made.append(runtime.fork())
        return made[-1]

    yield fork
    for twin in made:
        twin.close()


Fork = Callable[[WorkspaceRuntime], WorkspaceRuntime]


def run(runtime: WorkspaceRuntime, command: str) -> str:
    action = CmdRunAction(command)
    action.set_hard_timeout(20)
    observation = runtime.run_action(action)
    assert isinstance(observation, CmdOutputObservation)
    return observation.content


def edit(runtime: WorkspaceRuntime, command: str, **arguments: str) -> str:
    action = FileEditAction(path="/workspace/code.py", command=command, impl_source=FileEditSource.OH_ACI, **arguments)
    return runtime.run_action(action).content


def test_forks_do_not_meet_each_other_nor_the_session(runtime: WorkspaceRuntime, fork: Fork):
    run(runtime, "echo start > file; mkdir old; echo x > old/file")
    one, other = fork(runtime), fork(runtime)
    run(one, "echo one >> file; rm -rf old; mkdir old; echo new > old/new; touch /tmp/one; X=1")
    grandchild = fork(one)
    run(grandchild, "echo deeper >> file; rm old/new")
    look = "cat file; ls old; (cd /tmp; ls -d home one 2>/dev/null); echo $X"
    assert run(grandchild, look).split() == ["start", "one", "deeper", "home", "one", "1"]
    assert run(one, look).split() == ["start", "one", "new", "home", "one", "1"]
    assert run(other, look).split() == run(runtime, look).split() == ["start", "file", "home"]


def test_the_editor_forgets_nothing_and_mixes_nothing(runtime: WorkspaceRuntime, fork: Fork):
    edit(runtime, "create", file_text="a = 1\n")
    edit(runtime, "str_replace", old_str="a = 1", new_str="a = 2")
    twin = fork(runtime)
    assert "edited" in edit(twin, "str_replace", old_str="a = 2", new_str="a = 3")
    for _ in range(2):
        edit(twin, "undo_edit")
    assert run(twin, "cat code.py") == "a = 1"
    assert run(runtime, "cat code.py") == "a = 2"
    assert "a = 2" in runtime.run_action(FileReadAction("/workspace/code.py")).content
    edit(runtime, "undo_edit")
    assert run(runtime, "cat code.py") == "a = 1"


def test_a_fork_says_what_differs_from_the_start(make: Make, method: ForkMethod, fork: Fork, tmp_path: Path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "known").write_text("1\n")
    runtime = make(method, workspace_base=str(tmp_path / "work"))
    run(runtime, "echo 2 >> known")
    twin = fork(runtime)
    run(twin, "rm known; echo 3 > new")
    assert twin.workspace.changes()["changed_files"] == {"known": "deleted", "new": "added"}
    assert runtime.workspace.changes()["changed_files"] == {"known": "modified"}


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_forks_side_by_side_do_not_meet(make: Make, count: int):
    runtime = make()
    run(runtime, "for i in $(seq 200); do echo $i > f$i; done")

    def play(number: int) -> list[str]:
        twin = runtime.fork()
        try:
            begun = f"echo {number} | tee mine f7 /tmp/mine; sleep 100{number:02} & export ME={number}"
            run(twin, f"{begun}; until pgrep sleep; do :; done")
            return run(twin, "cat mine f7 /tmp/mine f8; echo $ME; ls | wc -l; pgrep -af 'sleep 100' | wc -l").split()
        finally:
            twin.close()

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(play, range(count)))
    assert answers == [[str(n), str(n), str(n), "8", str(n), "201", "1"] for n in range(count)]
    look = "cat f7; ls | wc -l; (cd /tmp; ls -d home mine 2>/dev/null); pgrep -c sleep"
    assert run(runtime, look).split() == ["7", "200", "home", "0"]


def test_background_processes_are_refused_by_name_and_may_be_ended(make: Make, fork: Fork):
    runtime = make()
    run(runtime, "sleep 100 & tail -f /dev/null & until pgrep -x sleep && pgrep -x tail; do :; done")
    with pytest.raises(BadEnvironmentError, match=r"processes run in it \(sleep, tail\)"):
        fork(runtime)
    run(runtime, "pkill sleep; pkill tail; while pgrep -x tail; do :; done")
    assert run(fork(runtime), "echo works") == "works"


def test_what_is_too_large_or_slow_is_refused(make: Make, tmp_path: Path):
    runtime = make("copy")
    before = set(Path(tempfile.gettempdir()).glob("openhands-rl-of-*/openhands-rl-fork-*"))
    run(runtime, "head -c 3000000 /dev/zero > large; mkdir d; touch d/1 d/2 d/3")
    for limits, reason in ((ForkLimits(size=2 << 20), "more than 2 MiB"), (ForkLimits(files=3), "more than 3 files")):
        runtime.workspace.fork_limits = limits
        with pytest.raises(BadEnvironmentError, match=f"{reason}; make it smaller, or"):
            runtime.fork()
    runtime.workspace.fork_limits = ForkLimits(seconds=1e-9)
    run(runtime, "head -c 400000000 /dev/zero > larger")
    with pytest.raises(InfrastructureError, match="longer than 1e-09 s"):
        runtime.fork()
    assert set(Path(tempfile.gettempdir()).glob("openhands-rl-of-*/openhands-rl-fork-*")) == before


def test_closing_ends_everything_in_a_fork_and_nothing_else(runtime: WorkspaceRuntime):
    before = set(Path(tempfile.gettempdir()).glob("openhands-rl-of-*/openhands-rl-fork-*"))
    twin = runtime.fork()
    marker = f"sleep 6{os.getpid()}"
    with ThreadPoolExecutor() as pool:
        hanging = pool.submit(run, twin, marker)
        deadline = time.monotonic() + 10
        while not subprocess.run(["pgrep", "-f", marker], capture_output=True).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        twin.close()
        hanging.exception()
    assert not subprocess.run(["pgrep", "-f", marker], capture_output=True).stdout
    assert run(runtime, "echo alive") == "alive"
    assert set(Path(tempfile.gettempdir()).glob("openhands-rl-of-*/openhands-rl-fork-*")) == before
    assert "openhands-rl-fork" not in Path("/proc/mounts").read_text()


def test_without_isolation_there_are_no_forks(make: Make):
    without = {"rl": {"workspace": {"isolation": "none"}}}
    assert not make(extended=without).workspace.forks and make().workspace.forks


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_user_without_rights_forks_too(tmp_path: Path):
    """Overlay mounts and the files in them, in a user namespace, as a plain user; by this interpreter if that may."""
    code = """
import sys, os, threading
from pathlib import Path
from openhands_rl_plugin.environments.workspace.copies import Tree, fork_tree
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox
from openhands_rl_plugin.environments.workspace.shell import Shell
home = Path(sys.argv[1])
(home / "work").mkdir(); (home / "work" / "file").write_text("old")
(home / "fork").mkdir()
tree = fork_tree(Tree(home / "work"), home / "fork")
shell = Shell(BubblewrapSandbox(home / "work").over(tree.directory, tree.mounting()))
print(shell.run("cat file; echo new > file; echo; cat file; stat -c %u file; id -u", timeout=20).output)
print((shell.path_from_host("/workspace/file")).read_text(), (home / "work" / "file").read_text(), tree.method)
shell.close()
"""
    folder = tmp_path / "home"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    for parent in folder.parents[:3]:
        parent.chmod(0o755)
    as_user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    if subprocess.run([*as_user, sys.executable, "-c", ""], capture_output=True).returncode:
        pytest.skip("the interpreter is not open to other users")
    done = subprocess.run([*as_user, sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert done.stdout.split()[:5] == ["old", "new", "12345", "12345", "new"] and "old" in done.stdout.split()[5], done
