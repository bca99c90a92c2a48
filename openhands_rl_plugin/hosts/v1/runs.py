"""Conversations of the SDK that run to their end: many of a runner in one process, and one task in a folder."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from openhands.sdk import LLM, Tool
from openhands.sdk.context.condenser import CondenserBase, LLMSummarizingCondenser
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import ActionEvent, AgentErrorEvent, Event, MessageEvent, ObservationEvent
from openhands.sdk.llm import TextContent
from openhands.sdk.tool.builtins import FinishAction, FinishTool, ThinkTool
from openhands.tools.task_tracker import TaskTrackerTool
from pydantic import ValidationError

from openhands_rl_plugin.config.work import OwnWork
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, boundary, describe, problems
from openhands_rl_plugin.core.files import remove_tree, temporary_folder
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject, StopReason
from openhands_rl_plugin.hosts.shared.options import RL_AGENT, HostOptions
from openhands_rl_plugin.hosts.shared.session_runner import (
    ITERATIONS_A_TURN,
    HostSession,
    SessionHostRunner,
    llm_settings,
)
from openhands_rl_plugin.hosts.v1.agent import BOUNDARY, RLAgent, conversation_end, episode_of, said_finish
from openhands_rl_plugin.hosts.v1.workspace import EDITOR, TERMINAL
from openhands_rl_plugin.session.session import Session

log = logging.getLogger("openhands")

INTERRUPTED = 130

_CONTINUE = (
    "Please go on in the way that you think is right. If you think that the task is solved, finish. Nobody will answer "
    "a question."
)
# Seconds for the conversation's thread after its tools were closed.
_PATIENCE = 30.0
_LONGEST = 200
# What the SDK would ask of a model that it does not know, and servers of open models refuse or ignore.
_DEFAULTS: JsonObject = {"reasoning_effort": None, "usage_id": "agent"}


class ConversationSession(HostSession):
    """The conversation runs in a thread of its own."""

    def __init__(self, episode: Session, options: HostOptions) -> None:
        super().__init__(episode, options, str(uuid.uuid4()))
        self._conversation: LocalConversation | None = None

    def _start(self, instruction: str) -> None:
        # Last opened, first closed: the conversation with its tools, its thread, the folder.
        given, opened = self._episode.workspace, self._opened
        folder = temporary_folder("tools") if given is None else given.root / given.repository
        if given is None:
            opened.callback(remove_tree, folder)
        agent = self._make_agent()
        # The stock agent's prompts are recorded as it writes them.
        self._episode.exact = self._options.agent == RL_AGENT
        agent._session = self._episode
        conversation = self._conversation = LocalConversation(
            agent=agent,
            conversation_id=uuid.UUID(self._sid),
            workspace=str(folder.resolve()),
            visualizer=None,
            stuck_detection=self._options.stuck_detection,
            max_iteration_per_run=self._episode.limits.max_turns * ITERATIONS_A_TURN + 2,
        )
        thread = threading.Thread(target=self._play, args=(conversation,), name="rl-conversation", daemon=True)
        opened.callback(lambda: thread.is_alive() and thread.join(_PATIENCE))
        opened.callback(conversation.close)
        conversation.send_message(instruction)
        thread.start()

    def _cancel(self) -> None:
        if (recorded := episode_of(self._conversation)) is not None:
            recorded.cancel()

    def _reason(self, end: Failure | StopReason | None) -> tuple[StopReason | None, Failure | None, str]:
        stop = end if isinstance(end, StopReason) else None
        error = conversation_end(self._conversation.state)[1] if self._conversation is not None else ""
        if (recorded := episode_of(self._conversation)) is not None:
            recorded.end(stop)
            return stop, None, error
        missing = Failure(kind=FailureKind.INFRASTRUCTURE, message="the conversation took no step", boundary=BOUNDARY)
        return stop, None if stop is not None else end if isinstance(end, Failure) else missing, error

    def _play(self, conversation: LocalConversation) -> None:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, BOUNDARY):
                self._run(conversation)
        except CaughtFailure as caught:
            self.finish(caught.failure)
        except RLError as error:
            self.finish(error)
        except asyncio.CancelledError:
            pass  # the episode was ended at its limit, or closed, while a request was under way
        finally:
            self.finish(None)

    def _run(self, conversation: LocalConversation) -> None:
        for said in itertools.count():
            conversation.run()
            events = conversation.state.events
            over = self._episode.stop is not None or not any(isinstance(event, MessageEvent) for event in events)
            if conversation.state.execution_status != Status.FINISHED or over or said_finish(events):
                return
            conversation.send_message(self._reply(said, _CONTINUE))

    def _make_agent(self) -> RLAgent:
        limit = {"no_change_timeout_seconds": self._options.command_timeout}
        tools = [Tool(name=TERMINAL, params=limit), Tool(name=EDITOR)]
        return RLAgent(llm=self._llm("agent"), tools=tools, condenser=self._condenser())

    def _llm(self, usage: str) -> LLM:
        episode = self._episode
        served = episode.request.served_model or episode.base_model
        given = llm_settings(episode.settings, self._options, served, episode.limits)
        return LLM(usage_id=usage, reasoning_effort=None, **given)

    def _condenser(self) -> CondenserBase | None:
        wanted = dict(self._options.condenser)
        if (kind := wanted.pop("type", "noop")) == "noop":
            return None
        if kind != "llm":
            raise ConfigError(f'condenser {kind!r}: OpenHands V1 has "llm" and "noop"')
        try:
            return LLMSummarizingCondenser.model_validate({**wanted, "llm": self._llm("condenser")})
        except ValidationError as error:
            raise ConfigError(f"condenser {self._options.condenser}: {describe(error)}") from error


class ConversationRunner(SessionHostRunner):
    """An ``EpisodeRunner`` over real conversations of the SDK in this process, which work in workspaces."""

    session = ConversationSession
    agents = staticmethod(lambda: (RL_AGENT, "Agent"))


def run_task(task: str, workspace: Path, work: OwnWork, show: Callable[[str], None]) -> int:
    """Work until the agent has finished. Returns 0 or 1, or 130 after Ctrl-C, which ends a completion at once.

    ``show`` prints a line. Raises ``ConfigError`` for settings that the SDK refuses.
    """
    tools = [Tool(name=name) for name in (TERMINAL, EDITOR, TaskTrackerTool.name)]
    agent = RLAgent.model_validate({"llm": make_llm(work.llm), "tools": tools, "rl": work.rl})

    def show_event(event: Event) -> None:
        for line in filter(None, _lines_of(event)):
            show(line)

    conversation = LocalConversation(agent=agent, workspace=str(workspace), visualizer=None, callbacks=[show_event])
    stopped, failed = list[int](), ""

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
        failed = caught.failure.message
    finally:
        signal.signal(signal.SIGINT, before)
    status, recorded = conversation.state.execution_status, episode_of(conversation)
    failed = conversation_end(conversation.state)[1] or failed
    conversation.close()
    if recorded is not None and isinstance(recorded.session.error, ConfigError):
        raise recorded.session.error
    if failed:
        show(f"failed: {one_line(failed, 500)}")
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
            yield f"[{event.tool_name}: {one_line(what, _LONGEST)}]"
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
