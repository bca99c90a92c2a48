"""``openhands-rl acp`` as an editor sees it: the real process, the protocol package's own client, the real SDK."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import acp
import pytest
import pytest_asyncio
from acp.schema import EnvVariable, McpServerStdio
from acp_play import Connected, connected
from openhands.sdk.conversation import LocalConversation
from scripted_model import ScriptedModel, call, says
from sdk_play import TERMINAL, finish, repair, stored, think

from openhands_rl_plugin.core.types import StopReason, Trajectory

# Starting the process takes most of the time, so one serves all tests but one.
pytestmark = [pytest.mark.timeout(280), pytest.mark.asyncio(loop_scope="module")]

MAX_TURNS = 4
INTERRUPTED = pytest.mark.skipif(
    not hasattr(LocalConversation, "interrupt"), reason="an SDK before 1.23 stops after a step only"
)


def options(server: ScriptedModel, model: str, *more: str) -> list[str]:
    limits = ["--max-turns", str(MAX_TURNS)]
    return ["--model", model, "--base-url", server.url, "--store", "store", "--conversations", "kept", *limits, *more]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def editing(server: ScriptedModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Connected]:
    """The process, in a folder of its own, with the model ``acp``."""
    async with connected(tmp_path_factory.mktemp("acp"), *options(server, "acp")) as connection:
        yield connection


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def forgotten(editing: Connected, server: ScriptedModel) -> None:
    editing.editor.forget()
    server.scripts["acp"].clear()
    server.requests["acp"].clear()


async def ask(editing: Connected, session: str, text: str, *more: Any) -> Any:
    """The response, when all updates before it have been heard."""
    done = await editing.agent.prompt(session_id=session, prompt=[acp.text_block(text), *more])
    await editing.editor.settled()
    return done


async def ended_episode(editing: Connected, session: str) -> Trajectory:
    """The episode of a session that nobody closed, once it has ended."""
    for _ in range(300):
        found = await episodes_of(editing.log.parent, session)
        if found and found[0].stop is not StopReason.UNFINISHED:
            assert len(found) == 1
            return found[0]
        await asyncio.sleep(0.1)
    raise AssertionError("the episode did not end")


async def episodes_of(folder: Path, session: str) -> list[Trajectory]:
    return [each for each in await stored(folder / "store") if each.group_id.replace("-", "") == session]


async def opened(editing: Connected, workspace: Path, mode: str = "auto") -> str:
    """A new session in ``mode``."""
    session = await editing.agent.new_session(cwd=str(workspace), mcp_servers=[])
    assert session.modes.current_mode_id == "ask"
    await editing.agent.set_session_mode(session_id=session.session_id, mode_id=mode)
    return session.session_id


@pytest.mark.shows("openhands-rl acp")
async def test_a_prompt_streams_what_happens_asks_before_it_changes_and_is_recorded(
    editing: Connected, server: ScriptedModel, workspace: Path
) -> None:
    server.script("acp", repair(Path("/workspace")))
    editor = editing.editor
    assert editing.hello.protocol_version == acp.PROTOCOL_VERSION
    assert editing.hello.agent_capabilities.load_session
    id = await opened(editing, workspace, "ask")
    calc = f"{workspace}/calc.py"
    mentioned = acp.resource_link_block(name="calc.py", uri=Path(calc).as_uri())
    done = await ask(editing, id, f"Correct {calc}.", mentioned)
    assert done.stop_reason == "end_turn"
    assert editor.said() == "I look.I correct it.done"
    assert [update.title for update in editor.updates if update.session_update == "tool_call"] == [
        f"file_editor: view {workspace}/calc.py",
        f"file_editor: str_replace {workspace}/calc.py",
        "terminal: cd /workspace && cat calc.py",
    ]
    kinds = {update.kind for update in editor.updates if update.session_update == "tool_call"}
    assert kinds == {"read", "edit", "execute"}
    ended = [update for update in editor.updates if update.session_update == "tool_call_update"]
    assert [update.status for update in ended] == ["completed"] * 3
    assert "return a + b" in ended[2].content[0].content.text
    # Looking at a file is not asked about; a change and a command are.
    assert [asked.title.split()[0] for asked in editor.asked] == ["file_editor:", "terminal:"]
    # Files have the editor's names there, and the agent's in what the model reads.
    begun = [update for update in editor.updates if update.session_update == "tool_call"]
    assert [[each.path for each in update.locations or ()] for update in begun] == [[calc], [calc], []]
    assert begun[1].content[0].path == begun[1].raw_input["path"] == editor.asked[0].raw_input["path"] == calc
    assert calc in ended[0].content[0].content.text and "/workspace" not in ended[0].content[0].content.text
    heard = str(server.requests["acp"][-1]["messages"])
    assert "Correct /workspace/calc.py.\n/workspace/calc.py" in heard.replace("\\n", "\n") and calc not in heard
    known = {update.tool_call_id for update in editor.updates if update.session_update == "tool_call"}
    assert {asked.tool_call_id for asked in editor.asked} <= known
    assert (workspace / "calc.py").read_text() == "def add(a, b):\n    return a + b\n"
    episode = await ended_episode(editing, id)
    assert episode.stop is StopReason.TERMINATED and episode.failure is None
    assert [node.tokens.extends for node in episode.nodes if node.tokens] == [False, True, True, True]


async def test_who_refuses_is_obeyed_and_who_allows_all_is_asked_no_more(
    editing: Connected, server: ScriptedModel, workspace: Path
) -> None:
    commands = [("touch no", "c1"), ("touch yes", "c2"), ("touch too", "c3")]
    server.script("acp", [says(None, call(TERMINAL, {"command": text}, id)) for text, id in commands])
    server.script("acp", [finish()])
    editing.editor.forget(lambda number: ["no", "always"][number])
    id = await opened(editing, workspace, "ask")
    done = await ask(editing, id, "Touch.")
    assert done.stop_reason == "end_turn" and len(editing.editor.asked) == 2
    [mode] = [update for update in editing.editor.updates if update.session_update == "current_mode_update"]
    assert mode.current_mode_id == "auto"
    assert sorted(file.name for file in workspace.iterdir()) == ["calc.py", "too", "yes"]
    ended = [update.status for update in editing.editor.updates if update.session_update == "tool_call_update"]
    assert ended == ["failed", "completed", "completed"]
    heard = [message for message in server.requests["acp"][1]["messages"] if message["role"] == "tool"]
    assert "refused" in str(heard[-1]["content"])


async def test_who_dismisses_a_question_ends_the_turn(
    editing: Connected, server: ScriptedModel, workspace: Path
) -> None:
    server.script("acp", [says(None, call(TERMINAL, {"command": "touch no"}, "c1")), finish("later")])
    editing.editor.forget(lambda number: None)
    id = await opened(editing, workspace, "ask")
    done = await ask(editing, id, "Touch.")
    assert done.stop_reason == "cancelled" and not (workspace / "no").exists()
    done = await ask(editing, id, "Leave it.")
    assert done.stop_reason == "end_turn" and editing.editor.said() == "later" and not (workspace / "no").exists()


async def test_a_reply_without_a_call_ends_the_turn_and_its_episode(
    editing: Connected, server: ScriptedModel, workspace: Path
) -> None:
    server.script("acp", [says("In /workspace/calc.py, or in /workspaces?"), finish("Done.")])
    id = await opened(editing, workspace)
    done = await ask(editing, id, "Correct it.")
    assert done.stop_reason == "end_turn"
    assert editing.editor.said() == f"In {workspace}/calc.py, or in /workspaces?"
    [episode] = await episodes_of(editing.log.parent, id)
    assert episode.stop is StopReason.NO_ACTION and episode.failure is None
    # The answer begins another, which has all that was said in its prompt.
    await ask(editing, id, "The former.")
    _, later = await episodes_of(editing.log.parent, id)
    assert later.stop is StopReason.TERMINATED and later.task.instruction == "The former."
    assert [node.sampled for node in later.nodes] == [False, False, False, False, True]


@INTERRUPTED
async def test_cancel_ends_a_completion_at_once_and_the_session_goes_on(
    editing: Connected, server: ScriptedModel, workspace: Path
) -> None:
    server.script("acp", [think("slow"), think("again"), finish()])
    id = await opened(editing, workspace)
    server.delay = 10.0
    asked = asyncio.ensure_future(ask(editing, id, "Think."))
    while not server.at_once:
        await asyncio.sleep(0.05)
    started, server.delay = time.monotonic(), 0.0
    await editing.agent.cancel(session_id=id)
    assert (await asked).stop_reason == "cancelled" and time.monotonic() - started < 8
    # The server's own answer comes too late, and takes its place in the script.
    while server.at_once:
        await asyncio.sleep(0.05)
    done = await ask(editing, id, "Go on.")
    assert done.stop_reason == "end_turn" and editing.editor.said() == "done"


@INTERRUPTED
async def test_cancel_ends_a_command(editing: Connected, server: ScriptedModel, workspace: Path) -> None:
    server.script("acp", [says(None, call(TERMINAL, {"command": "touch began; sleep 60"}, "c1")), finish()])
    id = await opened(editing, workspace)
    asked = asyncio.ensure_future(ask(editing, id, "Sleep."))
    while not (workspace / "began").exists():
        await asyncio.sleep(0.05)
    started = time.monotonic()
    await editing.agent.cancel(session_id=id)
    assert (await asked).stop_reason == "cancelled" and time.monotonic() - started < 25


async def test_sessions_side_by_side_do_not_wait_for_each_other(
    editing: Connected, server: ScriptedModel, workspace: Path
) -> None:
    server.script("acp", [finish() for _ in range(8)])
    ids = [await opened(editing, workspace) for _ in range(8)]
    server.delay, server.most_at_once = 4.0, 0
    try:
        done = await asyncio.gather(*(ask(editing, id, "Hello.") for id in ids))
    finally:
        server.delay = 0.0
    assert {each.stop_reason for each in done} == {"end_turn"} and server.most_at_once == 8


async def test_a_limit_of_the_settings_is_told(editing: Connected, server: ScriptedModel, workspace: Path) -> None:
    server.script("acp", [think(str(turn), f"c{turn}") for turn in range(MAX_TURNS + 1)])
    id = await opened(editing, workspace)
    done = await ask(editing, id, "Think.")
    assert done.stop_reason == "max_turn_requests"
    assert editing.editor.said("agent_thought_chunk") == "0123"


async def test_the_clients_mcp_servers_are_the_agents_tools(
    editing: Connected, server: ScriptedModel, workspace: Path
) -> None:
    script = workspace / "weather.py"
    script.write_text(
        "import os\nfrom fastmcp import FastMCP\nserver = FastMCP('w')\n@server.tool\ndef sky(city: str) -> str:\n"
        "    return f'{city}: {os.environ[\"SKY\"]}'\n\n\nserver.run(show_banner=False, log_level='ERROR')\n"
    )
    given = McpServerStdio(
        name="weather", command=sys.executable, args=[str(script)], env=[EnvVariable(name="SKY", value="blue")]
    )
    session = await editing.agent.new_session(cwd=str(workspace), mcp_servers=[given])
    await editing.agent.set_session_mode(session_id=session.session_id, mode_id="auto")

    def policy(body: dict) -> dict:
        [name] = [tool["function"]["name"] for tool in body["tools"] if tool["function"]["name"].endswith("sky")]
        asked = any(message["role"] == "tool" for message in body["messages"])
        return finish() if asked else says(None, call(name, {"city": "Rome"}, "c1"))

    server.policies["acp"] = policy
    try:
        done = await ask(editing, session.session_id, "How is the weather?")
    finally:
        del server.policies["acp"]
    assert done.stop_reason == "end_turn"
    [ended] = [update for update in editing.editor.updates if update.session_update == "tool_call_update"]
    assert ended.status == "completed" and "Rome: blue" in ended.content[0].content.text


async def test_what_cannot_be_done_is_said_in_one_line(
    editing: Connected, server: ScriptedModel, workspace: Path
) -> None:
    with pytest.raises(acp.RequestError, match="is not the absolute path of a folder"):
        await editing.agent.new_session(cwd="here", mcp_servers=[])
    id = await opened(editing, workspace)
    with pytest.raises(acp.RequestError, match="no more script for acp") as failed:
        await ask(editing, id, "Think.")
    assert "\n" not in str(failed.value)
    with pytest.raises(acp.RequestError, match="no mode is called 'never'"):
        await editing.agent.set_session_mode(session_id=id, mode_id="never")
    with pytest.raises(acp.RequestError, match="no session 00000000000000000000000000000000 is kept in"):
        await editing.agent.load_session(cwd=str(workspace), session_id="0" * 32, mcp_servers=[])
    hello = await editing.agent.initialize(protocol_version=99)
    assert hello.protocol_version == acp.PROTOCOL_VERSION
    said = editing.log.read_text()
    assert [line[:34] for line in said.splitlines()] == ["error: the client speaks version 99"[:34]], said


async def test_a_conversation_is_loaded_by_a_later_process_with_all_that_was_said(
    editing: Connected, server: ScriptedModel, workspace: Path
) -> None:
    server.script("acp", repair(Path("/workspace")))
    id = await opened(editing, workspace)
    await ask(editing, id, "Correct calc.py.")
    live, folder = editing.editor.kinds(), editing.log.parent
    # The strategy and the model may be others than before.
    server.script("acp-second", [finish("again")])
    async with connected(folder, *options(server, "acp-second", "--strategy", "BestOfN")) as later:
        await later.agent.load_session(cwd=str(workspace), session_id=id, mcp_servers=[])
        await later.editor.settled()
        assert later.editor.said("user_message_chunk") == "Correct calc.py."
        assert [kind for kind in later.editor.kinds() if kind != "user_message_chunk"] == live
        done = await ask(later, id, "And now?")
        assert done.stop_reason == "end_turn" and later.editor.said().endswith("again")
        assert await later.ended() == 0
    said = [message["content"] for message in server.requests["acp-second"][0]["messages"] if message["role"] == "user"]
    assert "Correct calc.py." in str(said) and "And now?" in str(said)
    first, second = await episodes_of(folder, id)
    assert first.policy != second.policy and {first.stop, second.stop} == {StopReason.TERMINATED}


@pytest.mark.parametrize(
    ("file", "known", "gone", "cause"),
    [
        ("base_state.json", '"name":"task_tracker"', '"name":"gone_tool"', "gone_tool"),
        ("base_state.json", '"kind":"RLAgent"', '"kind":"Agent"', "Agent"),
        ("events/*.json", '"kind":"FinishAction"', '"kind":"GoneAction"', "GoneAction"),
    ],
)
async def test_a_kept_conversation_that_nobody_can_read_costs_one_line_and_no_other_session(
    editing: Connected, server: ScriptedModel, workspace: Path, file: str, known: str, gone: str, cause: str
) -> None:
    server.script("acp", [finish("Done.")])
    kept = await opened(editing, workspace)
    await ask(editing, kept, "Do it.")
    folder, strange = editing.log.parent / "kept", uuid.uuid4().hex
    shutil.copytree(folder / kept, folder / strange)
    changed = 0
    for path in (folder / strange).rglob("*.json"):
        text = re.sub(r'(?<=")(: |, )(?=")', lambda found: found[0].strip(), path.read_text())
        text = text.replace(str(uuid.UUID(kept)), str(uuid.UUID(strange)))
        here = path.match(file) and known in text
        path.write_text(text.replace(known, gone) if here else text)
        changed += here
    if not changed:
        pytest.skip("this release keeps it in another form")
    with pytest.raises(acp.RequestError, match=f"session {strange} cannot be loaded, begin a new one: .*{cause}") as no:
        await editing.agent.load_session(cwd=str(workspace), session_id=strange, mcp_servers=[])
    assert "\n" not in str(no.value)
    server.script("acp", [finish("Done again.")])
    assert (await ask(editing, kept, "And again.")).stop_reason == "end_turn"
