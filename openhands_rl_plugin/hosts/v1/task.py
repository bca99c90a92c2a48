"""One task in a folder, from the command line: what the agent does is printed, then what was recorded."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from openhands.sdk import LLM, Tool
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import ActionEvent, AgentErrorEvent, Event, MessageEvent, ObservationEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.llm import TextContent
from openhands.sdk.tool.builtins import FinishAction, FinishTool, ThinkTool
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.task_tracker import TaskTrackerTool
from openhands.tools.terminal import TerminalTool
from pydantic import ValidationError

from openhands_rl_plugin.config.work import OwnWork
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary, problems
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.types import FailureKind, JsonObject
from openhands_rl_plugin.hosts.v1.agent import RLAgent
from openhands_rl_plugin.hosts.v1.conversations import BOUNDARY

log = logging.getLogger("openhands")

INTERRUPTED = 130

_LONGEST = 200
_LONGEST_TITLE = 120

# What the SDK would ask of a model that it does not know, and servers of open models refuse or ignore.
_DEFAULTS: JsonObject = {"reasoning_effort": None, "usage_id": "agent"}


def run_task(task: str, workspace: Path, work: OwnWork, show: Callable[[str], None]) -> int:
    """Work until the agent has finished. Returns 0 or 1, or 130 after Ctrl-C, which ends a completion at once.

    ``show`` prints a line. Raises ``ConfigError`` for settings that the SDK refuses.
    """
    tools = [Tool(name=tool.name) for tool in (TerminalTool, FileEditorTool, TaskTrackerTool)]
    agent = RLAgent.model_validate({"llm": make_llm(work.llm), "tools": tools, "rl": work.rl})

    def show_event(event: Event) -> None:
        for line in filter(None, _lines_of(event)):
            show(line)

    conversation = LocalConversation(agent=agent, workspace=str(workspace), visualizer=None, callbacks=[show_event])
    stopped, errors = list[int](), list[str]()

    def stop(pressed: int, _: object) -> None:
        stopped.append(pressed)
        signal.signal(signal.SIGINT, before)  # the next one waits for nobody
        # Before 1.23 it is stopped after its step.
        getattr(conversation, "interrupt", conversation.pause)()

    before = signal.signal(signal.SIGINT, stop)
    try:
        with suppress(KeyboardInterrupt), boundary(FailureKind.INFRASTRUCTURE, BOUNDARY):
            conversation.send_message(task)
            asyncio.run(arun()) if (arun := getattr(conversation, "arun", None)) else conversation.run()
    except CaughtFailure as caught:
        errors.append(caught.failure.message)
    finally:
        signal.signal(signal.SIGINT, before)
    status, recorded = conversation.state.execution_status, agent.episode_of(conversation)
    ended = [event for event in conversation.state.events if isinstance(event, ConversationErrorEvent)]
    conversation.close()
    if recorded is not None and isinstance(recorded.episode.error, ConfigError):
        raise recorded.episode.error
    failed = [*(f"{event.code}: {event.detail}" for event in ended), *errors]
    for line in failed[:1]:
        show(f"failed: {one_line(line, 500)}")
    return INTERRUPTED if stopped else int(status != Status.FINISHED or bool(failed))


def _lines_of(event: Any) -> Iterator[str]:
    """What the agent says, which tools it calls, and how they fail; an empty line where it says nothing."""
    if isinstance(event, ActionEvent):
        if thought := getattr(event.action, "thought", "") or event.reasoning_content:
            yield f"({one_line(thought, _LONGEST)})"
        yield event.action.message if isinstance(event.action, FinishAction) else _text_of(event.thought)
        if event.tool_name not in (FinishTool.name, ThinkTool.name):
            given = (getattr(event.action, name, None) for name in ("command", "path"))
            what = " ".join(str(each) for each in given if each) or event.tool_call.arguments
            yield f"[{event.tool_name}: {one_line(what, _LONGEST_TITLE)}]"
    elif isinstance(event, MessageEvent) and event.source == "agent":
        yield _text_of(event.llm_message.content)
    elif isinstance(event, AgentErrorEvent):
        yield f"  failed: {one_line(event.error, _LONGEST)}"
    elif isinstance(event, ObservationEvent) and event.observation.is_error:
        yield f"  failed: {one_line(_text_of(event.observation.to_llm_content), _LONGEST)}"


def _text_of(parts: Sequence[Any]) -> str:
    return "\n".join(part.text for part in parts if isinstance(part, TextContent))


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
