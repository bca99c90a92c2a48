"""The tools ``terminal`` and ``file_editor`` over the project's sandbox, in real conversations of the SDK."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from needs import needs_bubblewrap
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.event import ObservationEvent
from openhands.sdk.llm import TextContent
from scripted_model import ScriptedModel, call, reply
from sdk_play import EDITOR, TERMINAL, converse, finish, make_agent, make_llm, stored

pytestmark = needs_bubblewrap

_PRIVATE = ("openhands-rl-fork-", "openhands-rl-workspace-")
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def no_folder_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A closed conversation leaves nothing in the folder for temporary files."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert [path.name for path in folder.glob("*/*") if path.name.startswith(_PRIVATE)] == []


def run(command: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """An action of the terminal."""
    return TERMINAL, {"command": command, **more}


def edit(command: str, path: str, **more: Any) -> tuple[str, dict[str, Any]]:
    """An action of the editor."""
    return EDITOR, {"command": command, "path": path, **more}


def opened(server: ScriptedModel, name: str, folder: Path, isolation: str = "bubblewrap") -> LocalConversation:
    """A conversation whose tools are in ``isolation``."""
    rl = {"workspace": {"isolation": isolation}}
    return converse(make_agent(make_llm(server, name), folder.parent / f"store-{isolation}", rl=rl), folder)


def play(conversation: LocalConversation, server: ScriptedModel, actions: Sequence[tuple[str, dict]]) -> list[str]:
    """What the model observes of each action."""
    name = conversation.agent.llm.model.partition("/")[2]
    server.script(name, [reply(None, call(*action, f"call-{next(_numbers)}")) for action in actions])
    server.script(name, [finish(id=f"call-{next(_numbers)}")])
    known = len(conversation.state.events)
    conversation.send_message("Go on.")
    conversation.run()
    new = [conversation.state.events[at] for at in range(known, len(conversation.state.events))]
    seen = [event.observation.to_llm_content for event in new if isinstance(event, ObservationEvent)]
    return ["".join(part.text for part in parts if isinstance(part, TextContent)) for parts in seen][:-1]


def stock_that_started(server: ScriptedModel, name: str, folder: Path) -> LocalConversation:
    """A conversation with the stock tools whose shell has its prompt, as which the terminal knows that a command ended.

    The stock terminal types the prompt into a shell that may still be starting, and the shell may drop it:
    then no command ever ends. This is rare without a start-up file in the home folder, and so tried again.
    """
    for _ in range(4):
        conversation = opened(server, name, folder, "none")
        # With its first command, the stock terminal also shows what is left of its own start.
        if "completed with exit code 0" in play(conversation, server, [run("true", timeout=10)])[0]:
            return conversation
        conversation.close()
    pytest.fail("the stock terminal did not start in four attempts")


# What the stock terminal says instead of output that it lost: on a machine under load it does with any command.
LOST = "Previous command outputs are truncated"


def test_the_model_gets_the_observations_of_the_stock_tools(
    server: ScriptedModel, workspace: Path, tmp_path: Path
) -> None:
    """The same actions in two equal folders; only the folder's name differs."""

    def prepared(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "calc.py").write_text("def add(a, b):\n    return a - b\n")
        (folder / "sub").mkdir()
        (folder / "sub" / "x.txt").write_text("x\n")
        (folder / ".hidden").touch()
        return folder

    def actions(root: str) -> list[tuple[str, dict]]:
        return [
            edit("view", root),
            edit("view", f"{root}/calc.py", view_range=[1, 1]),
            edit("str_replace", f"{root}/calc.py", old_str="a - b", new_str="a + b"),
            edit("str_replace", f"{root}/calc.py", old_str="nothing", new_str="x"),
            edit("insert", f"{root}/calc.py", insert_line=0, new_str="# first"),
            edit("undo_edit", f"{root}/calc.py"),
            edit("create", f"{root}/new.py", file_text="one\n"),
            edit("create", f"{root}/new.py", file_text="two\n"),
            edit("view", f"{root}/missing.py"),
            edit("view", "calc.py"),
            run(f"cd {root}/sub && cat x.txt && false"),
            run("export NUMBER=7; greet() { echo hi $NUMBER; }"),
            run("greet; pwd; printf 'no newline'"),
            run("", is_input=False),
            run("C-c", is_input=True),
        ]

    own = opened(server, "own", prepared(workspace))
    mine = play(own, server, actions("/workspace"))
    for attempt in range(4):
        stock_folder = prepared(tmp_path / f"other-{attempt}" / "project")
        stock = stock_that_started(server, f"stock-{attempt}", stock_folder)
        seen = play(stock, server, actions(str(stock_folder)))
        stock.close()
        if LOST not in str(seen):
            break
    theirs = [text.replace(str(stock_folder), "/workspace") for text in seen]
    sent = server.requests["own"][0], server.requests[f"stock-{attempt}"][0]
    own.close()

    def without_python(text: str) -> str:
        text = re.sub(r"\n?\x1b\[\?2004h(?=\n)|\x1b\[\?2004[lh]", "", text)  # of bash: shown without tmux
        return "\n".join(line for line in text.split("\n") if not line.startswith("[Python interpreter: "))

    assert [without_python(text) for text in mine] == [without_python(text) for text in theirs]
    assert str(sent[0]["tools"]) == str(sent[1]["tools"]).replace(str(stock_folder), "/workspace")
    assert str(workspace) not in str(server.requests["own"])
    assert (workspace / "calc.py").read_text() == (stock_folder / "calc.py").read_text()


@pytest.mark.shows("sandboxed workspace")
def test_state_and_files_last_and_nothing_else_of_the_host_is_seen(server: ScriptedModel, workspace: Path) -> None:
    (workspace.parent / "secret.txt").write_text("key\n")
    conversation = opened(server, "state", workspace)
    seen = play(
        conversation,
        server,
        [
            run("mkdir -p deep && cd deep && export A=1 && echo note > /tmp/note"),
            run("pwd; echo $A; cat /tmp/note"),
            run(f"cat {workspace.parent}/secret.txt; ls {workspace.parent}; echo $?"),
            edit("view", str(workspace.parent / "secret.txt")),
            edit("create", "/tmp/made.py", file_text="print(1)\n"),
            run(f"cat /tmp/made.py; ln -s {workspace.parent}/secret.txt link"),
            edit("view", "/workspace/deep/link"),
            run("", reset=True),
            run("pwd; echo -$A-; ls /tmp/note deep"),
        ],
    )
    conversation.close()
    assert seen[1].startswith("/workspace/deep\n1\nnote\n")
    assert "[Current working directory: /workspace/deep]" in seen[1]
    assert "key" not in seen[2] and "No such file" in seen[2]
    assert "does not exist" in seen[3] and "does not exist" in seen[6]
    assert seen[5].startswith("print(1)")
    assert seen[7].startswith("Terminal session has been reset.")
    assert seen[8].startswith("/workspace\n--\nls: cannot access '/tmp/note'") and "link\n" in seen[8]


def test_a_command_over_its_time_can_be_waited_for_and_interrupted(server: ScriptedModel, workspace: Path) -> None:
    conversation = opened(server, "times", workspace)
    seen = play(
        conversation,
        server,
        [
            run("export KEPT=yes; sleep 1.5; echo finished", timeout=0.3),
            run("echo no"),
            run("some text", is_input=True),
            run("", timeout=20),
            run("echo begun; sleep 60; echo never", timeout=0.3),
            run("C-c", is_input=True),
            run("echo $KEPT"),
        ],
    )
    conversation.close()
    assert "[The command timed out after 0.3 seconds. You may wait longer" in seen[0] and "exit code" not in seen[0]
    assert 'Your command "echo no" is NOT executed' in seen[1]
    assert "empty standard input" in seen[2]
    assert seen[3].startswith("[Below is the output of the previous command.]\nfinished\n")
    assert "[Command finished with exit code 0]" in seen[3]
    assert "begun" in seen[5] and "never" not in seen[5] and "[Command finished with exit code 130]" in seen[5]
    assert seen[6].startswith("yes\n")


def test_secrets_reach_commands_and_are_masked(server: ScriptedModel, workspace: Path) -> None:
    conversation = opened(server, "secrets", workspace)
    conversation.update_secrets({"API_KEY": "hunter-two-22"})
    seen = play(conversation, server, [run("echo $API_KEY | tr a-z A-Z; echo $API_KEY")])
    conversation.close()
    assert seen[0].startswith("HUNTER-TWO-22\n") and "hunter-two-22" not in seen[0]


async def test_each_task_of_a_conversation_has_its_own_changes_as_evidence(
    server: ScriptedModel, workspace: Path
) -> None:
    conversation = opened(server, "twice", workspace)
    for name in ("one", "two"):
        play(conversation, server, [edit("create", f"/workspace/{name}.txt", file_text=f"{name}\n")])
    conversation.close()
    first, second = await stored(workspace.parent / "store-bubblewrap")
    assert first.evidence["changed_files"] == {"one.txt": "added"}
    assert second.evidence["changed_files"] == {"two.txt": "added"}
