"""OpenHands' own code makes messages of events; ours must make the same ones, and write events that give them back."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from exchange_samples import CODE, INDENTED, TOOLS, call, same_talk, trajectory

from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.messages import to_message, to_wire
from openhands_rl_plugin.core.types import JsonObject, Message, StopReason
from openhands_rl_plugin.trajectories.exchange.events import read_history, read_v0, v0_rows
from openhands_rl_plugin.trajectories.exchange.foreign import Imported, Record
from openhands_rl_plugin.trajectories.exchange.formats import source_of

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")]


def openhands_messages(events: list[Any]) -> list[Message]:
    import openhands.agenthub.codeact_agent as codeact
    from openhands.core.config import AgentConfig
    from openhands.events.action import MessageAction
    from openhands.memory.conversation_memory import ConversationMemory
    from openhands.utils.prompt import PromptManager

    prompts = PromptManager(prompt_dir=f"{next(iter(codeact.__path__))}/prompts")
    first = next(event for event in events if isinstance(event, MessageAction))
    memory = ConversationMemory(AgentConfig(), prompts)
    made = memory.process_events(events, initial_user_action=first, max_message_chars=None)
    return [to_message(message.model_dump()) for message in made]


def metadata_of(message: Message, number: int, identity: str) -> Any:
    from litellm import ModelResponse
    from openhands.events.tool import ToolCallMetadata

    made = message.tool_calls[number]
    choice = {"index": 0, "finish_reason": "tool_calls", "message": to_wire(message)}
    response = ModelResponse(id=identity, choices=[choice])
    return ToolCallMetadata(
        function_name=made.name,
        tool_call_id=made.id,
        model_response=response,
        total_calls_in_response=len(message.tool_calls),
    )


def real_events() -> list[Any]:
    """A short session with events of many kinds, as the controller makes them."""
    from openhands.events import EventSource
    from openhands.events.action import (
        CmdRunAction,
        FileEditAction,
        FileReadAction,
        IPythonRunCellAction,
        MessageAction,
    )
    from openhands.events.action.agent import AgentThinkAction, ChangeAgentStateAction
    from openhands.events.action.message import SystemMessageAction
    from openhands.events.event import FileEditSource, FileReadSource
    from openhands.events.observation import (
        AgentStateChangedObservation,
        CmdOutputMetadata,
        CmdOutputObservation,
        ErrorObservation,
        FileEditObservation,
        FileReadObservation,
        IPythonRunCellObservation,
    )
    from openhands.events.observation.agent import AgentThinkObservation

    shell = CmdOutputMetadata(exit_code=1, working_dir="/w", py_interpreter_path="/usr/bin/python", suffix="\n[end]")
    two = Message(
        role="assistant",
        content="I look.",
        tool_calls=(
            call("c1", "execute_bash", command="ls"),
            call("c2", "str_replace_editor", command="view", path="/a"),
        ),
    )
    edit = Message(role="assistant", tool_calls=(call("c3", "str_replace_editor", command="create", path="/a"),))
    cell = Message(role="assistant", tool_calls=(call("c4", "execute_ipython_cell", code="1"),))
    think = Message(role="assistant", content="Hm.", tool_calls=(call("c5", "think", thought="why"),))
    edited = FileEditObservation(content=INDENTED, path="/a", impl_source=FileEditSource.OH_ACI)
    read_file = FileReadObservation(content="1\tx", path="/a", impl_source=FileReadSource.OH_ACI)
    shown = IPythonRunCellObservation(content="x\n![image](data:image/png;base64,AA)", code="1")
    steps: list[tuple[Any, str, Any]] = [
        (SystemMessageAction(content="Be brief.", tools=list(TOOLS)), "agent", None),
        (MessageAction(content="Fix f."), "user", None),
        (ChangeAgentStateAction(agent_state="running"), "environment", None),
        (AgentStateChangedObservation(content="", agent_state="running"), "environment", None),
        (CmdRunAction(command="ls", thought="I look."), "agent", metadata_of(two, 0, "r1")),
        (CmdOutputObservation(content="a", command="ls", metadata=shell), "agent", metadata_of(two, 0, "r1")),
        (FileReadAction(path="/a"), "agent", metadata_of(two, 1, "r1")),
        (read_file, "agent", metadata_of(two, 1, "r1")),
        (ErrorObservation(content="no such tool"), "agent", None),
        (FileEditAction(path="/a", command="create"), "agent", metadata_of(edit, 0, "r2")),
        (edited, "agent", metadata_of(edit, 0, "r2")),
        (IPythonRunCellAction(code="1"), "agent", metadata_of(cell, 0, "r3")),
        (shown, "agent", metadata_of(cell, 0, "r3")),
        (AgentThinkAction(thought="why"), "agent", metadata_of(think, 0, "r4")),
        (AgentThinkObservation(content="Your thought has been logged."), "agent", metadata_of(think, 0, "r4")),
        (MessageAction(content="Is it right?"), "agent", None),
        (MessageAction(content="Yes."), "user", None),
    ]
    events = []
    for number, (event, source, metadata) in enumerate(steps):
        event._id, event._source = number, EventSource(source)
        event._timestamp = f"2026-01-01T00:00:{number:02d}"
        if metadata is not None:
            event.tool_call_metadata = metadata
        events.append(event)
    return events


def test_messages_are_those_that_openhands_makes() -> None:
    from openhands.events.serialization import event as serialization

    events = real_events()
    history = json.loads(json.dumps([serialization.event_to_dict(event) for event in events]))
    tree = read_history(history, "m")
    # The controller keeps changes of its own state out of the history.
    theirs = openhands_messages([event for event in events if "AgentState" not in type(event).__name__])
    ours = list(tree.messages())
    # OpenHands parts neighbouring user messages by an empty line, which is no part of the messages.
    stripped = [message.model_copy(update={"content": (message.content or "").lstrip("\n")}) for message in theirs]
    assert [message.model_copy(update={"content": message.content or ""}) for message in ours] == stripped
    assert tree.tools == TOOLS
    assert [node.message.content for node in tree.nodes if node.sampled] == [
        "I look.",
        None,
        None,
        "Hm.",
        "Is it right?",
    ]


def test_a_saved_trajectory_is_read_like_a_history(tmp_path: Path) -> None:
    """``save_trajectory_path`` and the server give events as one list; a run of another task is another task."""
    from openhands.events.serialization.event import event_to_dict, event_to_trajectory

    saved = [event_to_trajectory(event, include_screenshots=False) for event in real_events()]
    for name, asked, held in (("a", "Fix f.", saved), ("b", "Fix g.", {"trajectory": saved})):
        text = json.dumps(held, indent=4).replace("Fix f.", asked)
        (tmp_path / f"{name}-0a1b2c.json").write_text(text)
    names = Counter[str]()
    source = source_of(tmp_path, counts=names)
    one, other = (found.trajectory for unit in source if isinstance(found := unit.read(), Imported))
    history = json.loads(json.dumps([event_to_dict(event) for event in real_events()]))
    assert one.messages() == read_history(history, "m").messages() and one.tools == TOOLS
    assert names == {"output-jsonl": 2}
    assert (one.task.instruction, other.task.instruction) == ("Fix f.", "Fix g.")
    assert one.task.id != other.task.id and one.group_id != other.group_id


@pytest.mark.shows("export as the host's own events")
def test_events_that_we_write_give_openhands_the_same_messages() -> None:
    from openhands.events.serialization import event as serialization

    # OpenHands has no call for the end of an episode in its messages.
    spoken = CODE[:-1]
    (row,) = v0_rows(trajectory(spoken), ())
    history = json.loads(json.dumps(row))["history"]
    events = [serialization.event_from_dict(event) for event in history]
    assert same_talk(openhands_messages(events), spoken)
    again = [json.loads(json.dumps(serialization.event_to_dict(event))) for event in events]
    assert same_talk(read_history(again, "m").messages(), spoken)


def test_errors_of_the_harness() -> None:
    row: JsonObject = {"instance_id": "a", "history": []}
    ends = {
        "RuntimeError: Agent reached maximum iteration in headless mode. Current iteration: 30": StopReason.MAX_TURNS,
        "AgentStuckInLoopError: Agent got stuck in a loop": StopReason.TRUNCATED,
        "AgentRuntimeDisconnectedError: gone": StopReason.ERROR,
    }
    for error, stop in ends.items():
        found = read_v0(Record({**row, "error": error})).trajectory
        assert found.stop is stop and (found.failure is None) == (stop is not StopReason.ERROR)


def test_an_action_without_the_response_is_refused() -> None:
    old: JsonObject = {"source": "agent", "action": "run", "args": {"command": "ls"}}
    with pytest.raises(RLError, match=r"history\[0\]: tool_call_metadata: is required"):
        read_v0(Record({"instance_id": "a", "history": [old]}))
