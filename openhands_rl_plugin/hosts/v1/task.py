"""One task in a folder, from the command line: what the agent does is printed, then what was recorded."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from openhands.sdk import LLM, Conversation, Tool
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import ActionEvent, AgentErrorEvent, Event, MessageEvent, ObservationEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.llm import ImageContent, TextContent
from openhands.sdk.tool.builtins import FinishAction, FinishTool, ThinkAction, ThinkTool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.task_tracker import TaskTrackerTool
from openhands.tools.terminal import TerminalTool
from pydantic import ValidationError

from openhands_rl_plugin.config.work import OwnWork
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary, problems
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.types import FailureKind, JsonObject
from openhands_rl_plugin.hosts.v1.agent import RLAgent

log = logging.getLogger("openhands")

DONE, FAILED, INTERRUPTED = 0, 1, 130

_LONGEST = 200
_LONGEST_TITLE = 120

_SAYING = frozenset({FinishTool.name, ThinkTool.name})
"""Tools that only say something."""

# What the SDK would ask of a model that it does not know, and servers of open models refuse or ignore.
_DEFAULTS: JsonObject = {"reasoning_effort": None, "usage_id": "agent"}


def run_task(task: str, workspace: Path, work: OwnWork, show: Callable[[str], None]) -> int:
    """Play until the agent has finished. Returns the exit code, 130 after Ctrl-C, which ends a completion at once.

    ``show`` prints a line. Raises ``ConfigError`` for settings that the SDK refuses.
    """
    tools = [Tool(name=tool.name) for tool in (TerminalTool, FileEditorTool, TaskTrackerTool)]
    agent = RLAgent.model_validate({"llm": make_llm(work.llm), "tools": tools, "rl": work.rl})
    failed: list[str] = []
    callbacks = [_show_event(show, failed)]
    conversation = Conversation(agent=agent, workspace=str(workspace), visualizer=None, callbacks=callbacks)
    assert isinstance(conversation, LocalConversation)

    def playing() -> None:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "openhands.conversation"):
                conversation.send_message(task)
                _play(conversation)
        except CaughtFailure as caught:
            failed.append(caught.failure.message)

    thread = threading.Thread(target=playing, name="openhands-conversation", daemon=True)
    thread.start()
    interrupted = _wait(thread, conversation)
    status, played = conversation.state.execution_status, agent.episode_of(conversation)
    conversation.close()
    if played is not None and isinstance(played.episode.error, ConfigError):
        raise played.episode.error
    for line in failed[:1]:
        show(f"failed: {one_line(line, 500)}")
    if interrupted:
        return INTERRUPTED
    return DONE if status == Status.FINISHED and not failed else FAILED


def _wait(thread: threading.Thread, conversation: LocalConversation) -> bool:
    """Whether it was interrupted. A second interrupt does not wait for the agent."""
    try:
        thread.join()
        return False
    except KeyboardInterrupt:
        threading.Thread(target=_stop, args=(conversation,), daemon=True).start()
    with suppress(KeyboardInterrupt):
        thread.join()
    return True


def _play(conversation: LocalConversation) -> None:
    """Until the agent has finished, waits for someone, or is stopped. Blocks; raises the SDK's errors.

    With an SDK that can be stopped in the middle of a completion (1.23 and newer), it can be.
    """
    if (arun := getattr(conversation, "arun", None)) is not None:
        asyncio.run(arun())
    else:
        conversation.run()


def _stop(conversation: LocalConversation) -> None:
    """End ``_play``, from any thread. Blocks until a step has ended where the SDK cannot do better."""
    if (interrupt := getattr(conversation, "interrupt", None)) is not None:
        interrupt()
    else:
        conversation.pause()


def _show_event(show: Callable[[str], None], failed: list[str]) -> Callable[[Event], None]:
    """A callback that shows what is said, which tools are called, and how they fail; what ends the conversation is
    added to ``failed``."""

    def show_event(event: Event) -> None:
        if isinstance(event, ActionEvent):
            thought = event.action.thought if isinstance(event.action, ThinkAction) else ""
            if thought := thought or event.reasoning_content or "":
                show(f"({one_line(thought, _LONGEST)})")
            finish = event.action.message if isinstance(event.action, FinishAction) else None
            if said := _text_of(event.thought) if finish is None else finish:
                show(said)
            if event.tool_name not in _SAYING:
                show(f"[{_title_of(event)}]")
        elif isinstance(event, MessageEvent) and event.source == "agent":
            if said := _text_of(event.llm_message.content):
                show(said)
        elif isinstance(event, ConversationErrorEvent):
            failed.append(f"{event.code}: {event.detail}")
        elif isinstance(event, AgentErrorEvent) and event.tool_name not in _SAYING:
            show(f"  failed: {one_line(event.error, _LONGEST)}")
        elif isinstance(event, ObservationEvent) and event.observation.is_error and event.tool_name not in _SAYING:
            show(f"  failed: {one_line(_text_of(event.observation.to_llm_content), _LONGEST)}")

    return show_event


def _text_of(parts: Sequence[TextContent | ImageContent]) -> str:
    return "\n".join(part.text for part in parts if isinstance(part, TextContent))


def _title_of(event: ActionEvent) -> str:
    """A tool call in one line: the command or the file, else its arguments."""
    action = event.action
    fields = action.model_dump() if action is not None else {}
    command, path = str(fields.get("command") or ""), fields.get("path")
    what = f"{command} {path}" if path else command
    first = (what or event.tool_call.arguments).strip().partition("\n")
    text = f"{first[0]} ..." if first[2] else first[0]
    return f"{event.tool_name}: {text if len(text) <= _LONGEST_TITLE else text[:_LONGEST_TITLE] + '...'}"


def make_llm(section: JsonObject) -> LLM:
    """The SDK's LLM for ``[llm]``. Keys that only OpenHands V0 knows are left out, with a warning.

    Raises ``ConfigError`` for a value that the SDK refuses.
    """
    known = {key: value for key, value in section.items() if key in LLM.model_fields}
    if unknown := sorted(set(section) - set(known)):
        log.warning("openhands_rl_plugin: [llm] %s: not a setting of this OpenHands, ignored", ", ".join(unknown))
    try:
        return LLM.model_validate({**_DEFAULTS, **known})
    except ValidationError as error:
        # Never the value: it may be a key.
        lines = (f"[llm] {at[-1] if at else ''}: {what.partition(', got ')[0]}" for at, what in problems(error, LLM))
        raise ConfigError("\n".join(lines)) from None
