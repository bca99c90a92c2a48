"""OpenHands' runtimes over workspaces and environments, their forks and files: real runtimes and actions, no model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from needs import needs_bubblewrap
from openhands.core.config import OpenHandsConfig
from openhands.core.config.extended_config import ExtendedConfig
from openhands.events.action import CmdRunAction, FileEditAction, FileReadAction
from openhands.events.event import FileEditSource, FileReadSource
from openhands.events.observation import CmdOutputObservation, ErrorObservation
from openhands.events.stream import EventStream
from openhands.llm.llm_registry import LLMRegistry
from openhands.runtime import get_runtime_cls
from openhands.storage.memory import InMemoryFileStore
from small_shop import running_shop

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import BadEnvironmentError, CaughtFailure, ConfigError
from openhands_rl_plugin.core.types import FailureKind, Message, Task
from openhands_rl_plugin.environments.workspace.copies import can_overlay
from openhands_rl_plugin.hosts.v0.agent import WORKSPACE_RUNTIME
from openhands_rl_plugin.hosts.v0.runtime import EnvironmentRuntime, WorkspaceRuntime

Make = Callable[..., WorkspaceRuntime]
FORKS = "openhands-rl-of-*/openhands-rl-fork-*"


@pytest.fixture(scope="module")
def llms() -> LLMRegistry:
    return LLMRegistry(OpenHandsConfig())


@pytest.fixture
def make(llms: LLMRegistry) -> Iterator[Make]:
    made: list[WorkspaceRuntime] = []

    def make(isolation: str = "bubblewrap", **config) -> WorkspaceRuntime:
        extended = ExtendedConfig({"rl": {"workspace": {"isolation": isolation}}})
        runtime = get_runtime_cls(WORKSPACE_RUNTIME)(
            config=OpenHandsConfig(enable_browser=False, extended=extended, **config),
            event_stream=EventStream("session", InMemoryFileStore()),
            llm_registry=llms,
            sid="session",
            headless_mode=True,
        )
        assert isinstance(runtime, WorkspaceRuntime)
        made.append(runtime)
        asyncio.run(runtime.connect())
        return runtime

    yield make
    for runtime in made:
        runtime.event_stream.close()
        runtime.close()


@pytest.fixture(params=["none", pytest.param("bubblewrap", marks=needs_bubblewrap)])
def runtime(request: pytest.FixtureRequest, make: Make) -> WorkspaceRuntime:
    return make(request.param)


def command(runtime: WorkspaceRuntime, text: str, timeout: float | None = 20) -> CmdOutputObservation:
    action = CmdRunAction(text)
    action.set_hard_timeout(timeout)
    observation = runtime.run_action(action)
    assert isinstance(observation, CmdOutputObservation)
    return observation


def run(runtime: WorkspaceRuntime, text: str) -> str:
    return command(runtime, text).content


def edit(runtime: WorkspaceRuntime, name: str, path: str, **arguments) -> str:
    action = FileEditAction(path=path, command=name, impl_source=FileEditSource.OH_ACI, **arguments)
    return runtime.run_action(action).content


def test_commit_works_without_touching_the_users_git_configuration(runtime: WorkspaceRuntime):
    commit = "git init -q . && touch a && git add a && git commit -qm x && git log --format='%an %ae'"
    assert run(runtime, commit) == "openhands openhands@all-hands.dev"
    assert command(runtime, "git config --global user.name tester && echo ~").exit_code == 0
    user = Path("~/.gitconfig").expanduser()
    assert not user.exists() or "tester" not in user.read_text()


def test_editor(runtime: WorkspaceRuntime):
    path = f"{runtime.workspace_root}/a.py"
    assert edit(runtime, "create", path, file_text="x = 1\ny = 2\n") == f"File created successfully at: {path}"
    assert "x = 3" in edit(runtime, "str_replace", path, old_str="x = 1", new_str="x = 3")
    edit(runtime, "insert", path, insert_line=1, new_str="z = 9")
    assert run(runtime, "cat a.py") == "x = 3\nz = 9\ny = 2"
    assert "undone" in edit(runtime, "undo_edit", path)
    assert "did not appear verbatim" in edit(runtime, "str_replace", path, old_str="no", new_str="x")
    shown = runtime.run_action(FileReadAction(path, impl_source=FileReadSource.OH_ACI)).content
    numbered = "     1\tx = 3\n     2\ty = 2\n     3\t\n"
    assert shown == f"Here's the result of running `cat -n` on {path}:\n{numbered}"


def test_the_given_workspace_is_used_and_kept(make: Make, tmp_path: Path):
    runtime = make(workspace_base=str(tmp_path / "mine"))
    command(runtime, "echo text > file")
    private = runtime.workspace.private
    assert private.exists()
    runtime.close()
    assert (tmp_path / "mine" / "file").read_text() == "text\n" and not private.exists()


@pytest.mark.usefixtures("no_bubblewrap")
def test_without_bubblewrap_nothing_runs_unless_that_is_asked_for(make: Make):
    with pytest.raises(ConfigError, match=r"^bubblewrap is not installed: [^\n]*isolation = \"none\"$"):
        make()
    assert run(unisolated := make("none"), "pwd") == str(unisolated.workspace_root)


def test_the_network_of_openhands_own_sandbox_is_refused(make: Make):
    with pytest.raises(ConfigError, match=r"^\[sandbox\] use_host_network: write \[rl\.workspace\] network = true"):
        make(sandbox={"use_host_network": True})


@needs_bubblewrap
@pytest.mark.parametrize("overlay", [True, False], ids=["overlay", "copy"])
def test_forks_do_not_meet_each_other_nor_the_session(make: Make, overlay: bool, tmp_path: Path):
    if overlay and not can_overlay(tmp_path):
        pytest.skip("no overlay can be mounted here")
    runtime = make()
    runtime.workspace.overlay = overlay
    run(runtime, "echo start > file; mkdir old; echo x > old/file")
    one, other = runtime.fork(), runtime.fork()
    run(one, "echo one >> file; rm -rf old; mkdir old; echo new > old/new; touch /tmp/one; X=1")
    grandchild = one.fork()
    run(grandchild, "echo deeper >> file; rm old/new")
    look = "cat file; ls old; (cd /tmp; ls -d home one 2>/dev/null); echo $X"
    assert run(grandchild, look).split() == ["start", "one", "deeper", "home", "one", "1"]
    assert run(one, look).split() == ["start", "one", "new", "home", "one", "1"]
    assert run(other, look).split() == run(runtime, look).split() == ["start", "file", "home"]
    changed = [each.workspace.changes()["changed_files"] for each in (one, other)]
    assert "old/new" in str(changed[0]) and "old/new" not in str(changed[1])
    for each in (grandchild, one, other):
        each.close()


@needs_bubblewrap
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


@needs_bubblewrap
def test_what_cannot_be_forked_is_refused_by_name(make: Make):
    runtime = make()
    before = set(Path(tempfile.gettempdir()).glob(FORKS))
    run(runtime, "sleep 100 & tail -f /dev/null & until pgrep -x sleep && pgrep -x tail; do :; done")
    with pytest.raises(BadEnvironmentError, match=r"processes run in it \(sleep, tail\)"):
        runtime.fork()
    run(runtime, "pkill sleep; pkill tail; while pgrep -x tail; do :; done")
    runtime.workspace.overlay, runtime.workspace.fork_seconds = False, 1e-9
    run(runtime, "head -c 400000000 /dev/zero > larger")
    with pytest.raises(BadEnvironmentError, match=r"too large to be copied .* make it smaller, or"):
        runtime.fork()
    assert set(Path(tempfile.gettempdir()).glob(FORKS)) == before


AS_A_USER = """
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


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_a_user_without_rights_forks_too(tmp_path: Path):
    """Overlay mounts and the files in them, in a user namespace, as a plain user; by this interpreter if that may."""
    folder = tmp_path / "home"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    for parent in folder.parents[:3]:
        parent.chmod(0o755)
    as_user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    if subprocess.run([*as_user, sys.executable, "-c", ""], capture_output=True).returncode:
        pytest.skip("the interpreter is not open to other users")
    done = subprocess.run([*as_user, sys.executable, "-c", AS_A_USER, str(folder)], capture_output=True, text=True)
    assert done.stdout.split()[:5] == ["old", "new", "12345", "12345", "new"] and "old" in done.stdout.split()[5], done


def test_an_environment_refuses_other_actions_and_keeps_what_it_has_when_its_server_dies() -> None:
    task = Task(id="t", environment="webshop", data={"idx": 3}, instruction="buy something soft")
    with running_shop() as url:
        config = OpenHandsConfig(enable_browser=False, extended=ExtendedConfig({"rl": {"env_server_base": url}}))
        stream = EventStream("session", InMemoryFileStore())
        runtime = EnvironmentRuntime(config=config, event_stream=stream, llm_registry=LLMRegistry(config))
        refused = runtime.run_action(CmdRunAction("ls"))
        assert isinstance(refused, ErrorObservation) and "CmdRunAction" in refused.content
        background().wait_for(runtime.live.reset(task))
        message = Message(role="assistant", content="Thought: go on\nAction: search[shoes]")
        background().wait_for(runtime.live.step(message))
    with pytest.raises(CaughtFailure):
        background().wait_for(runtime.live.step(message))
    evidence, failure = runtime.conclude()
    assert failure is not None and failure.kind is FailureKind.INFRASTRUCTURE and failure.boundary == "environment.step"
    assert evidence is not None and evidence["steps"] == 1
    runtime.close()
    stream.close()
