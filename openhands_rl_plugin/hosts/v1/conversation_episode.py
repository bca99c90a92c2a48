"""One episode of one conversation of the SDK: its completions, its end, and what happens when the plugin fails."""

from __future__ import annotations

import logging
import socket
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import Event
from openhands.sdk.llm import LLM, LLMResponse
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.llm.exceptions import LLMBadRequestError, LLMContextWindowExceedError, LLMServiceUnavailableError
from openhands.sdk.tool import ToolDefinition
from pydantic import SecretStr

from openhands_rl_plugin.core.concurrency import Job, background
from openhands_rl_plugin.core.errors import (
    CaughtFailure,
    ConfigError,
    EpisodeError,
    InfrastructureError,
    RLError,
    StorageError,
    boundary,
    describe,
)
from openhands_rl_plugin.core.messages import WireMessage, one_line, to_message
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.types import CONDENSATION, Failure, FailureKind, JsonObject, StopReason
from openhands_rl_plugin.hosts.shared.first_prompt import FirstPrompt
from openhands_rl_plugin.hosts.shared.sessions import end_evidence, protected_by, register_runtime, runtime_of
from openhands_rl_plugin.hosts.shared.standalone_run import SHORT_ID, RunBeside, StandaloneRun, store_name
from openhands_rl_plugin.hosts.v1.endings import conversation_end
from openhands_rl_plugin.hosts.v1.engine import LLM_ERRORS, ConversationEngine, ConversationTurn
from openhands_rl_plugin.hosts.v1.values import SampledCalls
from openhands_rl_plugin.hosts.v1.workspace import ConversationWorkspace, StockWorkspace
from openhands_rl_plugin.hosts.v1.world import ConversationWorld
from openhands_rl_plugin.hosts.v1.written_prompts import OfferedTools, PromptWriter, as_sent, is_text
from openhands_rl_plugin.session.branches import SessionWorld
from openhands_rl_plugin.session.conversation import WorkspaceConversation
from openhands_rl_plugin.session.session import Session

log = logging.getLogger("openhands")

# How a server says that a prompt is too long; an engine of the project has no error of its own for that.
_TOO_LONG = ("context length", "context window", "maximum context", "max_model_len", "too many tokens")


class EpisodeOver(Exception):
    """Raised in an agent's step, instead of a completion, when a limit of the episode is reached."""

    def __init__(self, stop: StopReason) -> None:
        super().__init__(stop.value)
        self.stop = stop


class ConversationEpisode:
    """The state of one episode. ``standalone`` stores it when no runner does. ``delegated`` are its sub-agents'.

    ``calls``: those of the conversation's earlier episodes too; ``exact``: they are replayed as they were sampled.
    ``own`` samples in the place of the SDK's LLM.
    """

    def __init__(
        self,
        episode: Session,
        conversation: LocalConversation,
        *,
        calls: SampledCalls,
        own: LLMEngine | None,
        standalone: StandaloneRun | RunBeside | None,
        exact: bool = True,
    ) -> None:
        self.episode = episode
        self.session = str(conversation.state.id)
        self.over = False
        self.failed = False
        self.delegated: weakref.WeakSet[ConversationEpisode] = weakref.WeakSet()
        self._conversation = weakref.ref(conversation)
        self._engine = ConversationEngine(episode, own, exact=exact)
        self._followed = WorkspaceConversation(episode.tree, self._engine.said)
        self._calls = calls
        self._writer = PromptWriter()
        self._offered = OfferedTools(compact=episode.settings.workspace.is_compact)
        self._exact = exact
        self._standalone = standalone
        self._job: Job[int] | None = None
        self._decided: LLMResponse | None = None
        self._ending = threading.Lock()
        self._full = False
        self._last_status = Status.RUNNING
        self._workspace: StockWorkspace | None = None
        runtime = runtime_of(self.session)
        if isinstance(runtime, ConversationWorkspace) and not runtime.closed:
            runtime.begin()
        elif runtime is None or isinstance(runtime, ConversationWorkspace | StockWorkspace):
            # What is there is an earlier episode's.
            folder, protected = Path(str(conversation.workspace.working_dir)), protected_by(episode.settings.reward)
            self._workspace = StockWorkspace(folder, protected)
            register_runtime(self.session, self._workspace)

    @property
    def conversation(self) -> LocalConversation | None:
        """``None`` when nothing else refers to it any more."""
        return self._conversation()

    @property
    def standalone(self) -> bool:
        """Whether no runner stores the episode."""
        return self._standalone is not None

    @property
    def sandboxed(self) -> bool:
        """Whether its tools work in a sandbox, which can be forked."""
        runtime = runtime_of(self.session)
        return isinstance(runtime, ConversationWorkspace) and runtime.forks

    @property
    def status(self) -> Status:
        """The conversation's; of one that is gone the last that was seen."""
        if (conversation := self.conversation) is not None:
            self._last_status = conversation.state.execution_status
        return self._last_status

    def complete(
        self, llm: LLM, messages: list[SdkMessage], tools: Sequence[ToolDefinition], arguments: dict[str, Any]
    ) -> LLMResponse:
        """The strategy's completion, stored before it is returned. Raises the SDK's errors and ``EpisodeOver``.

        When the plugin itself fails, a conversation without a runner goes on with a plain completion.
        """
        if self.over:
            raise EpisodeOver(self.episode.stop or StopReason.ERROR)
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "rl.agent"):
                outcome = self._decide(llm, messages, tools, arguments)
        except RLError as error:
            self.fail(error)
            if self._decided is not None:
                return self._decided
            return llm.model_copy(update={"stream": False}).completion(messages, list(tools), **arguments)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def cancel(self) -> None:
        """End a decision that is under way, a sub-agent's too. Blocks until its forks are closed."""
        for each in list(self.delegated):
            each.cancel()
        if (job := self._job) is not None:
            job.cancel()

    def condense(self, llm: LLM, messages: list[SdkMessage], arguments: dict[str, Any]) -> LLMResponse:
        """A completion for a condenser: a node of its own kind. Raises the SDK's errors."""
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "rl.condenser"):
                completion = self._engine.aside(llm, messages, arguments)
                prompt = [to_message(message) for message in llm.format_messages_for_llm(list(messages))]
                self.episode.tree.aside(prompt, completion, CONDENSATION)
                return self._engine.answers.of(completion.message)
        except CaughtFailure as caught:
            cause = caught.__cause__.__cause__ if caught.__cause__ is not None else None
            if isinstance(cause, LLM_ERRORS):
                raise cause from caught
            log.warning("openhands_rl_plugin: a summary was not recorded: %s", caught)
        return llm.model_copy(update={"stream": False}).completion(messages, **arguments)

    def fail(self, error: RLError) -> None:
        """The plugin itself failed. Under a runner the episode fails, and the error is raised; else the user's
        conversation goes on, without the plugin."""
        if isinstance(error, ConfigError):
            self.episode.refuse(error)
        elif isinstance(error, StorageError):
            self.episode.error = error
        else:
            other = Failure(kind=FailureKind.INFRASTRUCTURE, message=describe(error), boundary="rl.agent")
            self.episode.failure = error.failure if isinstance(error, CaughtFailure) else other
        if self._standalone is None:
            raise error
        self.failed = True
        log.warning("openhands_rl_plugin: %s; the conversation goes on without it", str(error).splitlines()[0])
        if (conversation := self.conversation) is not None:
            note_failure(conversation, str(error))
        self.end(StopReason.ERROR)

    def end(self, stop: StopReason | None = None) -> None:
        """End the episode: ``stop``, or why the conversation ended. Idempotent; errors are logged.

        One without a runner is stored with its evidence and closed.
        """
        if not self._claim():
            return
        for each in list(self.delegated):
            each.end()
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "rl.end"):
                self._note_end(stop)
                if self._standalone is not None:
                    evidence, failure = end_evidence(runtime_of(self.session), self.episode, self.episode.failure)
                    self.episode.evidence = evidence or self.episode.evidence
                    self._standalone.keep(failure=failure)
                    self.release()
        except RLError as error:
            # Why it failed was said already.
            level = logging.DEBUG if self.failed else logging.WARNING
            log.log(level, "openhands_rl_plugin: the episode of %s was not closed: %s", self.session, error)

    def end_at_exit(self) -> None:
        """Note why the conversation ended, before the process does: ``StandaloneRun`` stores it afterwards."""
        if self._standalone is not None and self._claim():
            self._note_end(None)
            if self._workspace is not None:
                self.episode.evidence, _ = self._workspace.conclude()
            self.release()

    def release(self) -> None:
        """Remove what was kept of the workspace's start."""
        if self._workspace is not None:
            self._workspace.close()

    def _claim(self) -> bool:
        with self._ending:
            over, self.over = self.over, True
        return not over

    def _note_end(self, stop: StopReason | None) -> None:
        failure = None
        if stop is None:
            conversation, status = self.conversation, self.status
            events: Sequence[Event] = conversation.state.events if conversation is not None else ()
            stop, failure = conversation_end(status, events)
            if self._full and failure is not None:
                stop, failure = StopReason.MAX_TOKENS, None
        if failure is None and stop is not StopReason.ERROR:
            # An error that the conversation went on after is none of the episode.
            self.episode.failure = None
        self.episode.failure = self.episode.failure or failure
        self.episode.end_here(stop)

    def _decide(
        self, llm: LLM, messages: list[SdkMessage], tools: Sequence[ToolDefinition], arguments: dict[str, Any]
    ) -> LLMResponse | Exception:
        """The response, or what the agent's LLM would raise. Raises ``RLError`` when the plugin fails."""
        episode, self._decided = self.episode, None
        turn, wire = self._turn(llm, messages, tools, arguments)
        if not episode.turns and (refused := self._refused(llm, wire, turn.offered)) is not None:
            return refused
        if (stop := episode.limit_reached()) is not None:
            return EpisodeOver(stop)
        self._engine.open(turn)
        episode.failure, self._full = None, False
        self._job = background().start(episode.decide(self._engine, self._world(turn)))
        try:
            with boundary(FailureKind.MODEL, "strategy.decide"):
                chosen = self._job.result()
        except CaughtFailure as caught:
            return self._undecided(caught)
        episode.turns += 1
        message = episode.tree.nodes[chosen].message
        self._decided = self._engine.answers.of(message)
        self._followed.acted(chosen)
        self._calls.add(message)
        episode.keep()
        return self._decided

    def _turn(
        self, llm: LLM, messages: list[SdkMessage], tools: Sequence[ToolDefinition], arguments: dict[str, Any]
    ) -> tuple[ConversationTurn, Sequence[WireMessage]]:
        """The turn, and its prompt as it is sent."""
        prompt = self._calls.put_back(messages) if self._exact else messages
        tree = self.episode.tree
        written = self._writer.write(llm, prompt)
        tools = self._offered.selected(tools)
        offered = self._offered.of(tools, arguments)
        if not is_text(llm, offered):
            tree.tools = tree.tools or offered
        wire = as_sent(llm, written, offered, arguments, compact=self._engine.compact)
        rewritten = self._followed.follow(wire)
        return ConversationTurn(llm, tree.messages(), prompt, written, tools, offered, arguments, rewritten), wire

    def _refused(self, llm: LLM, wire: Sequence[WireMessage], offered: Sequence[JsonObject]) -> Exception | None:
        """The SDK's error for a first prompt that the model's context has no room for; no such episode is stored."""
        serving = self.episode.settings.serving
        if not isinstance(self._standalone, StandaloneRun):
            return None
        key = llm.api_key.get_secret_value() if isinstance(llm.api_key, SecretStr) else llm.api_key
        asked = {"model": llm.model, "base_url": llm.base_url, "api_key": key}
        if serving.base_url:
            model = f"openai/{self.episode.base_model}"
            asked = {"model": model, "base_url": serving.base_url, "api_key": serving.api_key()}
        try:
            first = FirstPrompt(self.episode.settings, asked)
            first.check_length(wire, () if is_text(llm, offered) else offered)
        except ConfigError as error:
            self._claim()
            self.episode.refuse(error)
            return LLMBadRequestError(str(error))
        return None

    def _world(self, turn: ConversationTurn) -> SessionWorld | None:
        runtime, conversation = runtime_of(self.session), self.conversation
        if isinstance(runtime, ConversationWorkspace) and runtime.forks and conversation is not None:
            return ConversationWorld(conversation, runtime, turn, self._engine, self._calls)
        return None

    def _undecided(self, caught: CaughtFailure) -> Exception:
        """The SDK's own exception for an answer that did not come. Raises ``caught`` for the strategy's failure."""
        cause = caught.__cause__
        if not isinstance(cause, EpisodeError):
            raise caught
        self.episode.failure = caught.failure
        below = cause.__cause__
        error = below if isinstance(below, LLM_ERRORS) else _sdk_error(cause)
        if isinstance(error, LLMContextWindowExceedError) and self.episode.turns:
            self._full = True
        return error


def _sdk_error(error: EpisodeError) -> Exception:
    """An engine's error as the SDK raises it: its condensers wait for the one of a full context."""
    text = str(error)
    if any(words in text.lower() for words in _TOO_LONG):
        return LLMContextWindowExceedError(text)
    return (LLMServiceUnavailableError if isinstance(error, InfrastructureError) else LLMBadRequestError)(text)


KEY = "openhands_rl"
"""In the state's ``agent_state``."""

_LONGEST = 300
_WITHOUT_FORKS = "StandardReAct"


def note_recording(conversation: LocalConversation, episode: Session, *, forks: bool) -> None:
    """Say where an episode is stored, and of a search without ``forks`` that it has none."""
    store, short = store_name(episode.settings), trajectory_id(episode.request)[:SHORT_ID]
    strategy = episode.strategy_spec.name
    flat = "" if forks or strategy == _WITHOUT_FORKS else f'; {strategy} forks nothing: isolation = "none"'
    _note(conversation, f"recorded in {store} on {socket.gethostname()} as {short}{flat}")


def note_failure(conversation: LocalConversation, why: str) -> None:
    """Say why the conversation is not recorded from here on."""
    _note(conversation, f"not recorded: {one_line(why, _LONGEST)}")


def _note(conversation: LocalConversation, text: str) -> None:
    state = conversation.state
    state.agent_state = {**state.agent_state, KEY: text}
