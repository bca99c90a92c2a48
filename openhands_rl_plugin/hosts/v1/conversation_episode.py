"""One episode of one conversation of the SDK: its completions, why it ended, and what happens when the plugin fails."""

from __future__ import annotations

import atexit
import logging
import socket
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import ActionEvent, Event, MessageEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.llm import LLM, TextContent
from openhands.sdk.tool.builtins import FinishTool

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, StorageError, boundary, describe
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.records import trajectory_id
from openhands_rl_plugin.core.types import CONDENSATION, Failure, FailureKind, JsonObject, StopReason
from openhands_rl_plugin.hosts.shared.litellm_calls import server_error
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace
from openhands_rl_plugin.hosts.shared.sessions import end_evidence, protected_by, register_runtime, runtime_of
from openhands_rl_plugin.hosts.shared.standalone_run import SHORT_ID, RunBeside, StandaloneRun, store_name
from openhands_rl_plugin.hosts.v1.branch import ConversationBranch, log_of
from openhands_rl_plugin.hosts.v1.session_llm import Prompts, Unrecorded, model_server
from openhands_rl_plugin.hosts.v1.workspace import ConversationWorkspace, NoEvidence
from openhands_rl_plugin.models.engines.extensions import TOKEN_IDS
from openhands_rl_plugin.rollout.forks import World
from openhands_rl_plugin.session.branches import BranchWorld
from openhands_rl_plugin.session.sampled_texts import SampledCalls
from openhands_rl_plugin.session.session import EpisodeOver, Session
from openhands_rl_plugin.session.token_id_text import PROMPT_IDS, SAMPLED_IDS, Json
from openhands_rl_plugin.session.upstream import Upstream

BOUNDARY = "openhands.conversation"
ENDED = frozenset({Status.FINISHED, Status.ERROR, Status.STUCK})
"""From these a conversation goes on only when it is run again."""

_LIMITS = {"MaxIterationsReached": StopReason.MAX_TURNS, "MaxBudgetReached": StopReason.TRUNCATED}


def conversation_end(status: Status, events: Sequence[Event]) -> tuple[StopReason, Failure | None]:
    """Why a conversation ended. Reaching a limit of the SDK is a regular end of an episode."""
    if status == Status.FINISHED:
        # As with OpenHands V0, words that await an answer are no end of the task's own.
        return StopReason.NO_ACTION if awaits_answer(events) else StopReason.TERMINATED, None
    if status == Status.STUCK:
        return StopReason.TRUNCATED, None
    if status != Status.ERROR:
        message = f"it was closed before the agent had finished ({status.value})"
        return StopReason.ERROR, _failure(message)
    error = next((event for event in reversed(events) if isinstance(event, ConversationErrorEvent)), None)
    if error is None:
        return StopReason.ERROR, _failure("the conversation ended with an error")
    if (limit := _LIMITS.get(error.code)) is not None:
        return limit, None
    return StopReason.ERROR, _failure(f"{error.code}: {error.detail}")


def said_finish(events: Sequence[Event]) -> bool:
    """Whether the agent's last words were a call of the ``finish`` tool."""
    last = _last_words(events)
    return isinstance(last, ActionEvent) and last.tool_name == FinishTool.name


def awaits_answer(events: Sequence[Event]) -> bool:
    """Whether the agent's last words were a message without a call."""
    return isinstance(_last_words(events), MessageEvent)


def last_instruction(events: Sequence[Event]) -> str:
    """What the user said last; empty where nobody said anything."""
    for event in reversed(events):
        if isinstance(event, MessageEvent) and event.source == "user":
            said = event.llm_message.content
            return "\n".join(part.text for part in said if isinstance(part, TextContent))
    return ""


def _last_words(events: Sequence[Event]) -> Event | None:
    said = (event for event in reversed(events) if isinstance(event, ActionEvent | MessageEvent))
    return next((event for event in said if event.source == "agent"), None)


def _failure(message: str) -> Failure:
    return Failure(kind=FailureKind.INFRASTRUCTURE, message=message[:500], boundary=BOUNDARY)


log = logging.getLogger("openhands")


class ConversationEpisode:
    """The state of one episode. ``standalone`` stores it when no runner does. ``delegated`` are its sub-agents'.

    ``calls``: those of the conversation's earlier episodes too; ``exact``: they are replayed as they were sampled.
    ``own`` samples in the place of what the SDK's ``llm`` would ask. ``full``: whether the context was at the end.
    """

    def __init__(
        self,
        episode: Session,
        conversation: LocalConversation,
        llm: LLM,
        *,
        calls: SampledCalls,
        own: Upstream | None,
        standalone: StandaloneRun | RunBeside | None,
        exact: bool = True,
    ) -> None:
        self.episode = episode
        self.session = str(conversation.state.id)
        self.calls = calls
        self.over = False
        self.failed = False
        # Of its steps: whether one is under way, and how many ended; the events at which the agent finished, and why.
        self.stepping, self.steps = False, 0
        self.finished: tuple[int | None, StopReason | None] = (None, None)
        self.seen: tuple[Status, int] | None = None
        self.delegated: weakref.WeakSet[ConversationEpisode] = weakref.WeakSet()
        self._conversation = weakref.ref(conversation)
        self.prompts = Prompts(compact=episode.settings.workspace.is_compact)
        self.full = False
        self._llm, self._own = llm, own
        episode.connect(own or model_server(llm))
        episode.exact, episode.calls = exact, calls if exact else None
        episode.world = self._world
        self._standalone = standalone
        self._ending = threading.Lock()
        self._last_status = Status.RUNNING
        self._workspace: SandboxedWorkspace | NoEvidence | None = None
        runtime = runtime_of(self.session)
        if isinstance(runtime, ConversationWorkspace) and not runtime.closed:
            runtime.sandboxed.begin()
        elif runtime is None or isinstance(runtime, ConversationWorkspace | SandboxedWorkspace | NoEvidence):
            # What is there is an earlier episode's.
            settings, folder = episode.settings, Path(str(conversation.workspace.working_dir))
            try:
                self._workspace = SandboxedWorkspace(
                    folder, settings.workspace, protected=protected_by(settings.reward), isolated=False
                )
            except ConfigError as error:
                self._workspace = NoEvidence(str(error))
            register_runtime(self.session, self._workspace)
        if standalone is not None:
            atexit.register(self._end_at_exit)

    @property
    def conversation(self) -> LocalConversation | None:
        """``None`` when nothing else refers to it any more."""
        return self._conversation()

    @property
    def standalone(self) -> bool:
        """Whether no runner stores the episode."""
        return self._standalone is not None

    @property
    def forkable(self) -> ConversationWorkspace | None:
        """The sandbox that its tools work in, if it can be forked."""
        runtime = runtime_of(self.session)
        return runtime if isinstance(runtime, ConversationWorkspace) and runtime.sandboxed.forks else None

    @property
    def status(self) -> Status:
        """The conversation's; of one that is gone the last that was seen."""
        if (conversation := self.conversation) is not None:
            self._last_status = conversation.state.execution_status
        return self._last_status

    def answer(self, llm: LLM, body: JsonObject) -> Json:
        """The strategy's answer to a request of ``llm``, stored before it is returned. Blocks.

        Raises ``EpisodeOver``, and ``CaughtFailure`` for an error of the model server. When the plugin itself fails,
        raises ``Unrecorded`` without a runner, else that error.
        """
        session = self.episode
        if self.over:
            raise EpisodeOver(session.stop or StopReason.ERROR)
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "rl.agent"):
                if llm is not self._llm and self._own is None:
                    session.connect(model_server(llm))
                    self._llm = llm
                body = {**body, "model": session.base_model} if self._own is not None else body
                self.full = False
                return self._with_ids(body, session.answer(body))
        except EpisodeOver:
            raise
        except RLError as error:
            if server_error(error) is not None:
                raise
            self.fail(error)
            raise Unrecorded from error

    def summarize(self, llm: LLM, body: JsonObject) -> Json:
        """A completion for a condenser: a node of its own kind. Raises ``CaughtFailure`` for an error of the model
        server, and ``Unrecorded`` when the plugin fails."""
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "rl.condenser"):
                return background().wait_for(self.episode.aside(body, CONDENSATION, model_server(llm)))
        except CaughtFailure as caught:
            if server_error(caught) is not None:
                raise
            log.warning("openhands_rl_plugin: a summary was not recorded: %s", caught)
            raise Unrecorded from caught

    def cancel(self) -> None:
        """End a decision that is under way, a sub-agent's too. Blocks until its forks are closed."""
        for each in list(self.delegated):
            each.cancel()
        self.episode.cancel()

    def unread(self, why: str) -> None:
        """The SDK could not read the last answer, and goes on without it."""
        if not self.failed:
            self.episode.unread(why)

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

    def _end_at_exit(self) -> None:
        """Note why the conversation ended, before the process does: ``StandaloneRun`` stores it afterwards."""
        if self._claim():
            self._note_end(None)
            if self._workspace is not None:
                self.episode.evidence, _ = self._workspace.conclude()
            self.release()

    def release(self) -> None:
        """Remove what was kept of the workspace's start."""
        if self._workspace is not None:
            self._workspace.close()

    def _claim(self) -> bool:
        atexit.unregister(self._end_at_exit)
        with self._ending:
            over, self.over = self.over, True
        return not over

    def _note_end(self, stop: StopReason | None) -> None:
        failure = None
        if stop is None:
            conversation, status = self.conversation, self.status
            events: Sequence[Event] = conversation.state.events if conversation is not None else ()
            stop, failure = conversation_end(status, events)
            if self.full and failure is not None:
                stop, failure = StopReason.MAX_TOKENS, None
        if failure is None and stop is not StopReason.ERROR:
            # An error that the conversation went on after is none of the episode.
            self.episode.failure = None
        self.episode.failure = self.episode.failure or failure
        self.episode.end_here(stop)

    def _with_ids(self, body: JsonObject, document: Json) -> Json:
        """The answer with token ids where the SDK asks for them: it has an event of its own for them."""
        head = self.episode.tree.head
        if not body.get(TOKEN_IDS) or head is None or (tokens := self.episode.tree.nodes[head].tokens) is None:
            return document
        choice = {**document["choices"][0], SAMPLED_IDS: list(tokens.sampled_ids)}
        return {**document, PROMPT_IDS: list(tokens.prompt_ids), "choices": [choice]}

    def _world(self) -> World | None:
        workspace, conversation = self.forkable, self.conversation
        if workspace is None or conversation is None:
            return None
        agent: Any = conversation.agent
        live = ConversationBranch(agent, log_of(conversation.state), workspace, self.prompts, threading.Event())
        return BranchWorld(live, self.episode)


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
