"""The episodes of an agent's conversations: when one begins, its completions, and why and how it ends.

What the SDK's tools for delegation make during a step of an ``RLAgent`` is an ``RLAgent``, too. Each such sub-agent has
an episode of its own, whose task names the parent's in ``data["sub_agent"]``. The tools ask ``get_agent_factory`` for a
kind of agent; what it makes is passed to ``adopt``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openhands.sdk import AgentBase
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import ActionEvent, Event, MessageEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.llm import LLM, TextContent
from openhands.sdk.subagent import get_agent_factory
from openhands.sdk.tool.builtins import FinishTool

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.concurrency import background, bound
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, boundary
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.records import SUB_AGENT, sub_agents_run, trajectory_id
from openhands_rl_plugin.core.types import CONDENSATION, Failure, FailureKind, JsonObject, StopReason
from openhands_rl_plugin.hosts.shared.litellm_calls import server_error, split_provider
from openhands_rl_plugin.hosts.shared.run_checks import adapter_in_use
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace
from openhands_rl_plugin.hosts.shared.sessions import (
    SHORT_ID,
    StandaloneRun,
    protected_by,
    register_runtime,
    runtime_of,
    standalone_episode,
    store_name,
    workspace_task,
)
from openhands_rl_plugin.hosts.v1.branch import ConversationBranch, log_of
from openhands_rl_plugin.hosts.v1.session_llm import Prompts, Unrecorded, key_of, model_server
from openhands_rl_plugin.hosts.v1.workspace import ConversationWorkspace, NoEvidence
from openhands_rl_plugin.models.engines.extensions import TOKEN_IDS
from openhands_rl_plugin.models.engines.openai_wire import PROMPT_IDS, SAMPLED_IDS
from openhands_rl_plugin.rollout.forks import World
from openhands_rl_plugin.session.branches import BranchWorld
from openhands_rl_plugin.session.sampled_texts import SampledCalls
from openhands_rl_plugin.session.session import EpisodeOver, Session, current_episode
from openhands_rl_plugin.session.upstream import Upstream, upstream_in
from openhands_rl_plugin.session.wire import Json

if TYPE_CHECKING:
    from openhands_rl_plugin.hosts.v1.agent import RLAgent

log = logging.getLogger("openhands")

BOUNDARY = "openhands.conversation"
WATCH_SECONDS = 1.0
"""How often an open conversation is looked at."""
ENDED = frozenset({Status.FINISHED, Status.ERROR, Status.STUCK})
"""From these a conversation goes on only when it is run again."""

_LIMITS = {"MaxIterationsReached": StopReason.MAX_TURNS, "MaxBudgetReached": StopReason.TRUNCATED}


def conversation_end(status: Status, events: Sequence[Event]) -> tuple[StopReason, Failure | None]:
    """Why a conversation ended. Reaching a limit of the SDK is a regular end of an episode."""
    if status == Status.FINISHED:
        # As with OpenHands V0, words that await an answer are no end of the task's own.
        return (StopReason.NO_ACTION if isinstance(_last_words(events), MessageEvent) else StopReason.TERMINATED), None
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
    return getattr(_last_words(events), "tool_name", None) == FinishTool.name


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
        standalone: StandaloneRun | None,
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
            standalone.before_exit = partial(self.end, exiting=True)

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
            self._fail(error)
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

    def _fail(self, error: RLError) -> None:
        """The plugin itself failed. Under a runner the episode fails, and the error is raised; else the user's
        conversation goes on, without the plugin."""
        if isinstance(error, ConfigError):
            self.episode.refuse(error)
        elif isinstance(error, CaughtFailure):
            self.episode.failure = error.failure
        if self._standalone is None:
            raise error
        self.failed = True
        if (conversation := self.conversation) is not None:
            _go_on_without(conversation, error)
        self.end(StopReason.ERROR)

    def end(self, stop: StopReason | None = None, *, exiting: bool = False) -> None:
        """End the episode: ``stop``, or why the conversation ended. Idempotent; errors are logged.

        One without a runner is stored with its evidence and closed. When the process is ``exiting``, ``StandaloneRun``
        stores it afterwards, with what changed where nothing isolates the workspace.
        """
        with self._ending:
            over, self.over = self.over, True
        if over:
            return
        for each in list(self.delegated):
            each.end()
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "rl.end"):
                self._note_end(stop)
                if exiting and self._workspace is not None:
                    self.episode.evidence, _ = self._workspace.conclude()
                if self._standalone is not None:
                    if not exiting:
                        self._standalone.end()
                    self.release()
        except RLError as error:
            # Why it failed was said already.
            level = logging.DEBUG if self.failed else logging.WARNING
            log.log(level, "openhands_rl_plugin: the episode of %s was not closed: %s", self.session, error)

    async def watch(self) -> None:
        """End the episode where nobody closes its conversation: when that is gone, or was seen twice at its end."""
        seen: object = None
        while not self.over:
            await asyncio.sleep(WATCH_SECONDS)
            conversation = self.conversation
            now = conversation and (conversation.state.execution_status, self.steps)
            if now is None or (now == seen and now[0] in ENDED and not self.stepping):
                await background().blocking(self.end)
            conversation, seen = None, now

    def release(self) -> None:
        """Remove what was kept of the workspace's start."""
        if self._workspace is not None:
            self._workspace.close()

    def _note_end(self, stop: StopReason | None) -> None:
        failure = None
        if stop is None:
            if (conversation := self.conversation) is not None:
                stop, failure = conversation_end(conversation.state.execution_status, conversation.state.events)
            elif (stop := self.finished[1]) is None:
                stop, failure = StopReason.ERROR, _failure("its conversation was dropped before the agent had finished")
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


def _go_on_without(conversation: LocalConversation, error: RLError) -> None:
    """Let the conversation go on without the plugin, which failed, and note why."""
    log.warning("openhands_rl_plugin: %s; the conversation goes on without it", str(error).splitlines()[0])
    _note(conversation, f"not recorded: {one_line(str(error), _LONGEST)}")
    _unrecorded.add(conversation)


def _note(conversation: LocalConversation, text: str) -> None:
    state = conversation.state
    state.agent_state = {**state.agent_state, KEY: text}


_adopting: ContextVar[Callable[[AgentBase, str], AgentBase] | None] = ContextVar("rl_sub_agents", default=None)


def adopting(adopt: Callable[[AgentBase, str], AgentBase]) -> AbstractContextManager[object]:
    """Sub-agents that are made in this context are adopted: ``adopt`` makes the agent of a registered kind one whose
    completions are recorded, where it can."""
    return bound(_adopting, adopt)


def _factory_of(name: str | None = None) -> Any:
    """As ``get_agent_factory``."""
    found, adopt = get_agent_factory(name), _adopting.get()
    make, kind = found.factory_func, found.definition.name
    return found if adopt is None else found._replace(factory_func=lambda llm: adopt(make(llm), kind))


for _name in ("openhands.tools.delegate.impl", "openhands.tools.task.manager"):  # not every release has both
    with suppress(ModuleNotFoundError):
        if hasattr(_module := import_module(_name), "get_agent_factory"):
            _module.get_agent_factory = _factory_of  # type: ignore[attr-defined]


def sub_agent_episode(
    parent: Session, kind: str, session: str, instruction: str, strategy: Strategy, model: str | None
) -> Session:
    """The episode of a sub-agent, stored where the parent's is. ``model``: the served name where it is another one.

    Its run and its group are its own, because it is no sample of the parent's task. Its split is the parent's.
    """
    asked, data = parent.request, {SUB_AGENT: {"parent": trajectory_id(parent.request), "kind": kind}}
    identity = workspace_task(instruction, asked.task.id).id
    task = asked.task.model_copy(update={"id": identity, "instruction": instruction, "data": data})
    seed = zlib.crc32("\0".join((str(asked.seed), kind, instruction)).encode())
    own = {"task": task, "run_id": sub_agents_run(asked.run_id), "group_id": session, "seed": seed}
    served = asked.served_model if model is None else None
    request = asked.model_copy(update={"sample": 0, "attempt": 0, "served_model": served, **own})
    same = {name: getattr(parent, name) for name in ("strategy_spec", "environment_mode", "workspace", "token_ids")}
    return Session(request, parent.settings, strategy=strategy, base_model=model or parent.base_model, **same)


_episodes: weakref.WeakValueDictionary[str, ConversationEpisode] = weakref.WeakValueDictionary()
"""The newest of each conversation, which holds it."""
_unrecorded: weakref.WeakSet[LocalConversation] = weakref.WeakSet()
"""Conversations that go on without the plugin, which failed."""


def begin_step(agent: RLAgent, conversation: LocalConversation) -> ConversationEpisode | None:
    """The episode of the agent's next step; ``None`` when the step is to be the stock agent's.

    When the user says something after an end, or the watch saw the end, a new episode begins. A reply is an end as
    well, but in an episode of a runner, which answers by itself.
    """
    if conversation in _unrecorded:
        return None
    session = str(conversation.state.id)
    episode = _episodes.get(session)
    if episode is not None and (episode.conversation is not conversation or _answered(episode, conversation)):
        episode.end(episode.finished[1])
    if episode is None or episode.over:
        calls = episode.calls if episode is not None else SampledCalls()
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "rl.begin"):
                episode = _episodes[session] = _begin(agent, conversation, calls)
        except RLError as error:
            if agent.parent is None and current_episode() is not None:
                raise
            _go_on_without(conversation, error)
            return None
        conversation._rl_episode = episode  # type: ignore[attr-defined]
        if episode.standalone:
            background().start(episode.watch())
    episode.stepping, episode.finished = True, (None, None)
    return episode


def end_step(episode: ConversationEpisode, conversation: LocalConversation) -> None:
    """The step has ended; the conversation may have, too."""
    state = conversation.state
    if state.execution_status == Status.FINISHED and (episode.standalone or said_finish(state.events)):
        stop, _ = conversation_end(Status.FINISHED, state.events)
        episode.finished = len(state.events), stop
    episode.steps += 1
    episode.stepping = False


def episode_of(conversation: LocalConversation) -> ConversationEpisode | None:
    """The conversation's newest episode; ``None`` before its first step and without the plugin."""
    return None if conversation in _unrecorded else _episodes.get(str(conversation.state.id))


def close() -> None:
    """End the episodes of the conversations that are being closed. Blocks."""
    for episode in list(_episodes.values()):
        # The SDK closes an agent without saying for which of its conversations.
        if getattr(episode.conversation, "_cleanup_initiated", True):
            episode.end()


def _answered(episode: ConversationEpisode, conversation: LocalConversation) -> bool:
    """Whether the user said something after the agent had finished: the next task, not a hook's objection."""
    at, events = episode.finished[0], conversation.state.events
    later = (events[index] for index in range(len(events) if at is None else at, len(events)))
    return any(isinstance(event, MessageEvent) and event.source == "user" for event in later)


def _begin(agent: RLAgent, conversation: LocalConversation, calls: SampledCalls) -> ConversationEpisode:
    """The bound episode, one of its own, or that of a sub-agent, which ends with its parent's at the latest."""
    llm, exact, session, run = agent.llm, agent.replays_sampled, str(conversation.state.id), None
    named, own = split_provider(llm.model)[1], exact
    instruction = last_instruction(conversation.state.events)
    if agent.parent is not None:
        by, kind = agent.parent
        live, spec = by.conversation, by.episode.strategy_spec
        other = named if live is not None and live.agent.llm.model != llm.model else None
        own = exact and other is None
        strategy = registry.build("strategies", spec.name, spec.options) if exact else type(by.episode.strategy)()
        episode = sub_agent_episode(by.episode, kind, session, instruction, strategy, other)
        run = StandaloneRun(episode, session, parent=by._standalone.parent if by._standalone else by.episode)
    elif (episode := current_episode()) is None:
        settings = agent.settings()
        serving, base_model = settings.serving, settings.serving.model or named
        url, key = (serving.base_url, serving.api_key()) if serving.base_url else (llm.base_url, key_of(llm))
        episode = standalone_episode(
            settings,
            session=session,
            instruction=instruction,
            base_model=base_model,
            environment_mode=False,
            served_model=adapter_in_use(serving, model=base_model, url=url, key=key) if url else None,
            workspace=str(conversation.workspace.working_dir),
        )
        run = StandaloneRun(episode, session)
    served = episode.request.served_model or episode.base_model
    upstream = upstream_in(episode.settings, model=served, base_model=episode.base_model) if own else None
    if upstream is None and type(llm).completion is not LLM.completion:
        raise ConfigError(f"RLAgent needs one model for a whole episode, not a router: {type(llm).__name__}")
    if upstream is None and llm.uses_responses_api():
        raise ConfigError(f"{llm.model} is asked through the Responses API, which has no token ids: use another model")
    made = ConversationEpisode(episode, conversation, llm, calls=calls, own=upstream, standalone=run, exact=exact)
    if agent.parent is not None:
        agent.parent[0].delegated.add(made)
    elif run is not None:
        store, strategy = store_name(episode.settings), episode.strategy_spec.name
        short = trajectory_id(episode.request)[:SHORT_ID]
        flat = "" if made.forkable or strategy == "StandardReAct" else f'; {strategy} forks nothing: isolation = "none"'
        _note(conversation, f"recorded in {store} on {socket.gethostname()} as {short}{flat}")
    return made
