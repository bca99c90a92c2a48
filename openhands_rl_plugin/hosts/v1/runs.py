"""Conversations of the SDK that run to their end, many in one process."""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid

from openhands.sdk import LLM, Tool
from openhands.sdk.context.condenser import CondenserBase, LLMSummarizingCondenser
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import MessageEvent
from pydantic import ValidationError

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, boundary, describe
from openhands_rl_plugin.core.files import remove_tree, temporary_folder
from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason
from openhands_rl_plugin.hosts.shared.sessions import (
    ITERATIONS_A_TURN,
    RL_AGENT,
    HostSession,
    SessionHostRunner,
    llm_settings,
    make_llm,
)
from openhands_rl_plugin.hosts.v1.agent import BOUNDARY, RLAgent, conversation_end, episode_of, said_finish
from openhands_rl_plugin.hosts.v1.workspace import EDITOR, TERMINAL

_CONTINUE = (
    "Please go on in the way that you think is right. If you think that the task is solved, finish. Nobody will answer "
    "a question."
)
# Seconds for the conversation's thread after its tools were closed.
_PATIENCE = 30.0


class ConversationSession(HostSession):
    """The conversation runs in a thread of its own."""

    _conversation: LocalConversation | None = None

    def start(self, instruction: str) -> None:
        """As in ``HostSession``."""
        # Last opened, first closed: the conversation with its tools, its thread, the folder.
        given, opened = self.episode.workspace, self.opened
        folder = given.root / given.repository if given is not None else self.options.folder
        if folder is None:
            folder = temporary_folder("tools")
            opened.callback(remove_tree, folder)
        limit = {"no_change_timeout_seconds": self.options.command_timeout}
        tools = [Tool(name=TERMINAL, params=limit), Tool(name=EDITOR)]
        agent = RLAgent(llm=self._llm("agent"), tools=tools, condenser=self._condenser())  # pyrefly: ignore[missing-argument]
        # The stock agent's prompts are recorded as it writes them.
        self.episode.exact = self.options.agent == RL_AGENT
        agent._session = self.episode
        conversation = self._conversation = LocalConversation(
            agent=agent,
            conversation_id=uuid.UUID(self.id),
            workspace=str(folder.resolve()),
            visualizer=None,
            stuck_detection=self.options.stuck_detection,
            max_iteration_per_run=self.episode.limits.max_turns * ITERATIONS_A_TURN + 2,
        )
        thread = threading.Thread(target=self._converse, args=(conversation,), name="rl-conversation", daemon=True)
        opened.callback(lambda: thread.is_alive() and thread.join(_PATIENCE))
        opened.callback(conversation.close)
        conversation.send_message(instruction)
        thread.start()

    def cancel(self) -> None:
        """End a decision that is under way, of a sub-agent, too."""
        if (recorded := episode_of(self._conversation)) is not None:
            recorded.cancel()

    def reason(self, end: Failure | StopReason | None) -> tuple[StopReason | None, Failure | None, str]:
        """As in ``HostSession``."""
        stop = end if isinstance(end, StopReason) else None
        error = conversation_end(self._conversation.state)[1] if self._conversation is not None else ""
        if (recorded := episode_of(self._conversation)) is not None:
            recorded.end(stop)
            return stop, None, error
        missing = Failure(kind=FailureKind.INFRASTRUCTURE, message="the conversation took no step", boundary=BOUNDARY)
        return stop, None if stop is not None else end if isinstance(end, Failure) else missing, error

    def _converse(self, conversation: LocalConversation) -> None:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, BOUNDARY):
                for number in itertools.count():
                    conversation.run()
                    events = conversation.state.events
                    over = self.episode.stop is not None or not any(isinstance(each, MessageEvent) for each in events)
                    if conversation.state.execution_status != Status.FINISHED or over or said_finish(events):
                        return
                    conversation.send_message(self.reply(number, _CONTINUE))
        except CaughtFailure as caught:
            self.finish(caught.failure)
        except RLError as error:
            self.finish(error)
        except asyncio.CancelledError:
            pass  # the episode was ended at its limit, or closed, while a request was under way
        finally:
            self.finish(None)

    def _llm(self, usage: str) -> LLM:
        served = self.episode.request.served_model or self.episode.base_model
        section = llm_settings(self.episode.settings, self.options, served, self.episode.limits)
        # What the SDK would ask of a model that it does not know, and servers of open models refuse or ignore.
        return make_llm(LLM, section, usage_id=usage, reasoning_effort=None)

    def _condenser(self) -> CondenserBase | None:
        wanted = dict(self.options.condenser)
        if (kind := wanted.pop("type", "noop")) == "noop":
            return None
        if kind != "llm":
            raise ConfigError(f'condenser {kind!r}: OpenHands V1 has "llm" and "noop"')
        try:
            return LLMSummarizingCondenser.model_validate({**wanted, "llm": self._llm("condenser")})
        except ValidationError as error:
            raise ConfigError(f"condenser {self.options.condenser}: {describe(error)}") from error


class ConversationRunner(SessionHostRunner):
    """An ``EpisodeRunner`` over real conversations of the SDK in this process, which work in workspaces."""

    session = ConversationSession
    agents = staticmethod(lambda: (RL_AGENT, "Agent"))  # pyrefly: ignore[bad-override]
