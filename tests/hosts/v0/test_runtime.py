"""The workspace runtime behind OpenHands' interface: real runtimes, event streams and actions, no model."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from needs import needs_bubblewrap
from openhands.core.config import OpenHandsConfig
from openhands.core.config.extended_config import ExtendedConfig
from openhands.events import EventSource, EventStreamSubscriber
from openhands.events.action import CmdRunAction, FileEditAction, FileReadAction
from openhands.events.event import FileEditSource, FileReadSource
from openhands.events.observation import CmdOutputObservation, Observation
from openhands.events.stream import EventStream
from openhands.llm.llm_registry import LLMRegistry
from openhands.runtime import get_runtime_cls
from openhands.storage.memory import InMemoryFileStore

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.hosts.v0 import runtime as runtimes
from openhands_rl_plugin.hosts.v0.runtime import WorkspaceRuntime

Make = Callable[..., WorkspaceRuntime]
KINDS = ["none", pytest.param("bubblewrap", marks=needs_bubblewrap)]


@pytest.fixture(scope="module")
def llms() -> LLMRegistry:
    return LLMRegistry(OpenHandsConfig())


@pytest.fixture
def make(llms: LLMRegistry) -> Iterator[Make]:
    made: list[WorkspaceRuntime] = []

    def make(isolation: str = "bubblewrap", sid: str = "session", **config) -> WorkspaceRuntime:
        extended = ExtendedConfig({"rl": {"workspace": {"isolation": isolation}}})
        runtime = get_runtime_cls(f"{runtimes.__name__}.WorkspaceRuntime")(
            config=OpenHandsConfig(enable_browser=False, extended=extended, **config),
            event_stream=EventStream(sid, InMemoryFileStore()),
            llm_registry=llms,
            sid=sid,
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


@pytest.fixture(params=KINDS)
def runtime(request: pytest.FixtureRequest, make: Make) -> WorkspaceRuntime:
    return make(request.param)


def command(runtime: WorkspaceRuntime, text: str, timeout: float | None = 20) -> CmdOutputObservation:
    action = CmdRunAction(text)
    action.set_hard_timeout(timeout)
    observation = runtime.run_action(action)
    assert isinstance(observation, CmdOutputObservation)
    return observation


def edit(runtime: WorkspaceRuntime, name: str, path: str, **arguments) -> Observation:
    return runtime.run_action(FileEditAction(path=path, command=name, impl_source=FileEditSource.OH_ACI, **arguments))


def view(runtime: WorkspaceRuntime, path: str, **arguments) -> Observation:
    return runtime.run_action(FileReadAction(path, impl_source=FileReadSource.OH_ACI, **arguments))


@pytest.mark.shows("sandboxed workspace")
@pytest.mark.parametrize(("count", "turns"), [(4, 6), pytest.param(16, 20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_sessions_side_by_side_lose_nothing_and_do_not_meet(make: Make, kind: str, count: int, turns: int):
    sessions = [make(kind, f"session-{number}") for number in range(count)]

    def play(number: int) -> list[str]:
        return [
            command(sessions[number], f"echo {number}:{turn}; echo {number} >> mine; sort -u mine").content
            for turn in range(turns)
        ]

    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(play, range(count)))
    assert answers == [[f"{number}:{turn}\n{number}" for turn in range(turns)] for number in range(count)]


def test_what_the_agent_reads(runtime: WorkspaceRuntime):
    assert command(runtime, "echo hi; exit 3").to_agent_observation() == (
        "hi\n[Current working directory: /workspace]\n[Command finished with exit code 3]"
    )
    assert command(runtime, "echo partial; sleep 20", timeout=0.5).to_agent_observation() == (
        "partial\n[The command timed out after 0.5 seconds and was ended.]\n[Current working directory: /workspace]"
    )
    command(runtime, "(sleep 0.1; echo late) &")
    time.sleep(0.4)
    assert "late\n\n[Output of this command.]\nnow" in command(runtime, "echo now").to_agent_observation()


def test_a_sandbox_that_ends_is_answered_and_replaced(make: Make):
    runtime = make("none")
    assert "a new one is started" in command(runtime, "kill -9 $PPID; sleep 9").to_agent_observation()
    assert command(runtime, "echo on").content == "on"


def test_commit_works_without_touching_the_users_git_configuration(runtime: WorkspaceRuntime):
    result = command(runtime, "git init -q . && touch a && git add a && git commit -qm x && git log --format='%an %ae'")
    assert result.content == "openhands openhands@all-hands.dev"
    assert command(runtime, "git config --global user.name tester && echo ~").exit_code == 0
    user = Path("~/.gitconfig").expanduser()
    assert not user.exists() or "tester" not in user.read_text()


def test_editor(runtime: WorkspaceRuntime):
    created = edit(runtime, "create", "/workspace/a.py", file_text="x = 1\ny = 2\n")
    assert created.content == "File created successfully at: /workspace/a.py"
    assert "x = 3" in edit(runtime, "str_replace", "/workspace/a.py", old_str="x = 1", new_str="x = 3").content
    edit(runtime, "insert", "/workspace/a.py", insert_line=1, new_str="z = 9")
    assert command(runtime, "cat a.py").content == "x = 3\nz = 9\ny = 2"
    assert "undone" in edit(runtime, "undo_edit", "/workspace/a.py").content
    assert view(runtime, "/workspace/a.py").content == (
        "Here's the result of running `cat -n` on /workspace/a.py:\n     1\tx = 3\n     2\ty = 2\n     3\t\n"
    )
    assert view(runtime, "/workspace/a.py", view_range=[2, 2]).content.endswith("     2\ty = 2\n")


@pytest.mark.parametrize(
    ("name", "path", "arguments", "said"),
    [
        ("create", "a.py", {"file_text": ""}, "Maybe you meant /workspace/a.py?"),
        ("create", "/workspace/exists", {"file_text": ""}, "File already exists at: /workspace/exists"),
        ("create", "/workspace/none/a.py", {"file_text": ""}, "No such file or directory: '/workspace/none/a.py'"),
        ("str_replace", "/workspace/none", {"old_str": "a", "new_str": "b"}, "/workspace/none does not exist"),
        ("str_replace", "/workspace/exists", {"old_str": "a", "new_str": "b"}, "did not appear verbatim in /workspace"),
        ("str_replace", "/workspace/dir", {"old_str": "a", "new_str": "b"}, "The path /workspace/dir is a directory"),
        ("undo_edit", "/workspace/exists", {}, "No edit history found for /workspace/exists"),
        ("delete", "/workspace/exists", {}, "Unrecognized command delete"),
    ],
)
def test_wrong_edits_are_answered(make: Make, name: str, path: str, arguments: dict, said: str):
    runtime = make("none")
    command(runtime, "echo text > exists; mkdir dir")
    assert said in edit(runtime, name, path, **arguments).content


def test_a_directory_is_listed_without_a_host_shell(make: Make):
    runtime = make("none")
    marker = Path(f"/tmp/rl-injected-{os.getpid()}")
    name = f"x;touch ${{HOME%%root*}}tmp;touch {marker.name}"
    runtime.workspace.files.write(f"/workspace/{name}/file", b"")
    runtime.workspace.files.write("/workspace/.hidden", b"")
    runtime.workspace.files.write("/workspace/a/b/c", b"")
    command(runtime, "ln -s /etc out")
    listing = view(runtime, "/workspace").content
    assert listing.splitlines()[1:] == [
        "/workspace/",
        "/workspace/a/",
        "/workspace/a/b/",
        "/workspace/out",
        f"/workspace/{name}/",
        f"/workspace/{name}/file",
        "",
        "1 hidden files/directories in this directory are excluded. You can use 'ls -la /workspace' to see them.",
    ]
    view(runtime, f"/workspace/{name}")
    assert not marker.exists() and not Path(marker.name).exists()


def test_the_given_workspace_is_used_and_kept(make: Make, tmp_path: Path):
    runtime = make(workspace_base=str(tmp_path / "mine"))
    command(runtime, "echo text > file")
    private = runtime.workspace.private
    assert private.exists()
    runtime.close()
    assert (tmp_path / "mine" / "file").read_text() == "text\n" and not private.exists()
    runtime.close()


@pytest.mark.usefixtures("no_bubblewrap")
def test_without_bubblewrap_nothing_runs_unless_that_is_asked_for(make: Make):
    with pytest.raises(ConfigError, match=r"^bubblewrap is not installed: [^\n]*isolation = \"none\"$"):
        make()
    runtime = make("none")
    assert command(runtime, "pwd").content == "/workspace"
    assert runtime.workspace.files.kind("/workspace") == "directory"


def test_the_network_of_openhands_own_sandbox_is_refused(make: Make):
    with pytest.raises(ConfigError, match=r"^\[sandbox\] use_host_network: write \[rl\.workspace\] network = true"):
        make(sandbox={"use_host_network": True})


def test_through_the_event_stream(make: Make):
    runtime = make()
    stream, seen = runtime.event_stream, []
    stream.subscribe(EventStreamSubscriber.TEST, seen.append, "test")
    for turn in range(20):
        stream.add_event(CmdRunAction(f"echo {turn}"), EventSource.AGENT)
    stream.add_event(FileReadAction("/nothing"), EventSource.AGENT)

    def observations() -> list[Observation]:
        return [event for event in seen if isinstance(event, Observation)]

    deadline = time.monotonic() + 20
    while len(observations()) < 21 and time.monotonic() < deadline:
        time.sleep(0.02)
    contents = [event.content for event in observations()]
    assert contents[:20] == [str(turn) for turn in range(20)] and "No such file" in contents[20]
