"""Episodes in conversations of the SDK: many in one process, each run to its end."""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from pathlib import Path

from openhands.sdk import LLM, Tool
from openhands.sdk.context.condenser import CondenserBase, LLMSummarizingCondenser
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import MessageEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from pydantic import ValidationError

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, boundary, describe
from openhands_rl_plugin.core.files import remove_tree, temporary_folder
from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason
from openhands_rl_plugin.hosts.shared.options import RL_AGENT, HostOptions
from openhands_rl_plugin.hosts.shared.session_runner import (
    ITERATIONS_A_TURN,
    HostSession,
    SessionHostRunner,
    llm_settings,
)
from openhands_rl_plugin.hosts.v1.agent import RecordedAgent, RLAgent
from openhands_rl_plugin.hosts.v1.conversations import BOUNDARY, ConversationEpisode, said_finish
from openhands_rl_plugin.hosts.v1.workspace import EDITOR, TERMINAL, ConversationWorkspace, open_workspace
from openhands_rl_plugin.session.session import Session, bind_episode

_CONTINUE = (
    "Please go on in the way that you think is right. If you think that the task is solved, finish. Nobody will answer "
    "a question."
)
# The SDK says it with a status only; these are V0's words.
_STUCK = "Agent got stuck in a loop"
# Seconds for the conversation's thread after its tools were closed.
_PATIENCE = 30.0


class ConversationSession(HostSession):
    """The conversation runs in a thread of its own."""

    def __init__(self, episode: Session, options: HostOptions) -> None:
        super().__init__(episode, options, str(uuid.uuid4()))
        self._settings = episode.settings
        self._agent: RLAgent | None = None
        self._conversation: LocalConversation | None = None
        self._own_folder: Path | None = None
        self._workspace: ConversationWorkspace | None = None
        self._thread: threading.Thread | None = None

    def _start(self, instruction: str) -> None:
        given = self._episode.workspace
        if given is None:
            folder = self._own_folder = temporary_folder("tools")
        else:
            folder = given.root / given.repository
        agent = self._agent = self._make_agent()
        self._workspace = open_workspace(self._sid, self._settings, folder, given)
        conversation = self._conversation = LocalConversation(
            agent=agent,
            conversation_id=uuid.UUID(self._sid),
            workspace=str(folder.resolve()),
            visualizer=None,
            stuck_detection=self._options.stuck_detection,
            max_iteration_per_run=self._episode.limits.max_turns * ITERATIONS_A_TURN + 2,
        )
        conversation.send_message(instruction)
        self._thread = threading.Thread(target=self._play, args=(conversation,), name="rl-conversation", daemon=True)
        self._thread.start()

    @property
    def _played(self) -> ConversationEpisode | None:
        agent, conversation = self._agent, self._conversation
        return agent.episode_of(conversation) if agent is not None and conversation is not None else None

    def _cancel(self) -> None:
        if (played := self._played) is not None:
            played.cancel()

    def _reason(self, end: Failure | StopReason | None) -> tuple[StopReason | None, Failure | None, str]:
        stop = end if isinstance(end, StopReason) else None
        if (played := self._played) is not None:
            played.end(stop)
            return stop, None, self._last_error()
        missing = Failure(kind=FailureKind.INFRASTRUCTURE, message="the conversation took no step", boundary=BOUNDARY)
        failure = None if stop is not None else end if isinstance(end, Failure) else missing
        return stop, failure, self._last_error()

    def _last_error(self) -> str:
        if self._conversation is None:
            return ""
        state = self._conversation.state
        if state.execution_status == Status.STUCK:
            return _STUCK
        errors = (event for event in reversed(state.events) if isinstance(event, ConversationErrorEvent))
        last = next(errors, None)
        return f"{last.code}: {last.detail}" if last is not None else ""

    def _release(self) -> None:
        """Close the conversation with its tools, and wait for its thread."""
        played = self._played
        if self._conversation is not None:
            self._conversation.close()
        if played is not None:
            played.release()
        if self._thread is not None:
            self._thread.join(_PATIENCE)
        if self._workspace is not None:
            self._workspace.close()
        if self._own_folder is not None:
            remove_tree(self._own_folder)

    def _play(self, conversation: LocalConversation) -> None:
        ended: Failure | RLError | None = None
        try:
            with boundary(FailureKind.INFRASTRUCTURE, BOUNDARY), bind_episode(self._episode):
                self._run(conversation)
        except CaughtFailure as caught:
            ended = caught.failure
        except RLError as error:
            ended = error
        except asyncio.CancelledError:
            pass  # the episode was ended at its limit, or closed, while a request was under way
        finally:
            self.finish(ended)

    def _run(self, conversation: LocalConversation) -> None:
        for said in itertools.count():
            conversation.run()
            events = conversation.state.events
            over = self._episode.stop is not None or not any(isinstance(event, MessageEvent) for event in events)
            if conversation.state.execution_status != Status.FINISHED or over or said_finish(events):
                return
            conversation.send_message(self._reply(said, _CONTINUE))

    def _make_agent(self) -> RLAgent:
        kind = RLAgent if self._options.agent == RL_AGENT else RecordedAgent
        rl = {"workspace": self._settings.workspace.model_dump(include={"isolation", "prompt"})}
        limit = {"no_change_timeout_seconds": self._options.command_timeout}
        tools = [Tool(name=TERMINAL, params=limit), Tool(name=EDITOR)]
        return kind(llm=self._llm("agent"), tools=tools, condenser=self._condenser(), rl=rl)

    def _llm(self, usage: str) -> LLM:
        episode = self._episode
        served = episode.request.served_model or episode.base_model
        given = llm_settings(self._settings, self._options, served, episode.limits)
        return LLM(usage_id=usage, reasoning_effort=None, **given)

    def _condenser(self) -> CondenserBase | None:
        wanted = dict(self._options.condenser)
        kind = wanted.pop("type", "noop")
        if kind == "noop":
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
