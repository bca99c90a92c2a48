"""``RLAgent`` of OpenHands V1: the SDK's agent, with a strategy for every completion, fully recorded.

This module has the episodes of conversations (begin, completions, end) and, for search, branches of a conversation with
its workspace. Importing it registers the agent: the SDK finds an agent's class by its name (``kind``).

During a step of an ``RLAgent``, the SDK's tools for delegation create an ``RLAgent`` too (``get_agent_factory``). Each
such sub-agent has its own episode, whose task names the parent's in ``data["sub_agent"]``.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import socket
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import openhands.sdk.agent.agent as stock
from openhands.sdk.agent import Agent, AgentBase
from openhands.sdk.context.condenser import CondenserBase
from openhands.sdk.conversation import LocalConversation
from openhands.sdk.conversation.exceptions import ConversationRunError
from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.conversation.state import ConversationState
from openhands.sdk.event import ActionEvent, AgentErrorEvent, Event, MessageEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.llm import LLM, TextContent
from openhands.sdk.llm.exceptions import LLMContextWindowExceedError
from openhands.sdk.subagent import get_agent_factory
from openhands.sdk.tool.builtins import FinishTool, ThinkTool
from pydantic import Field, PrivateAttr, field_validator

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import settings_from_sections
from openhands_rl_plugin.core.concurrency import Job, background, bound
from openhands_rl_plugin.core.errors import BadEnvironmentError, CaughtFailure, ConfigError, RLError, boundary
from openhands_rl_plugin.core.messages import one_line
from openhands_rl_plugin.core.protocols import Forkable
from openhands_rl_plugin.core.records import SUB_AGENT, sub_agents_run, trajectory_id
from openhands_rl_plugin.core.types import CONDENSATION, Failure, FailureKind, JsonObject, StopReason
from openhands_rl_plugin.hosts.compact_prompt import SYSTEM, system_prompt
from openhands_rl_plugin.hosts.shared.litellm_calls import adapter_in_use, server_error, split_provider, too_long
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
from openhands_rl_plugin.hosts.v1.session_llm import Prompts, SessionLLM, Unrecorded, key_of, model_server
from openhands_rl_plugin.hosts.v1.workspace import EDITOR, TERMINAL, ConversationWorkspace
from openhands_rl_plugin.models.engines.client import TOKEN_IDS
from openhands_rl_plugin.models.engines.openai_wire import PROMPT_IDS, SAMPLED_IDS, Json
from openhands_rl_plugin.session.session import BranchWorld, Complete, EpisodeOver, Session, upstream_in

log = logging.getLogger("openhands")

BOUNDARY = "openhands.conversation"
KEY = "openhands_rl"
"""Key of the state's ``agent_state``: where the conversation is recorded, or why it is not."""
WATCH_SECONDS = 1.0
"""Seconds between two checks of an open conversation."""
ENDED = frozenset({Status.FINISHED, Status.ERROR, Status.STUCK})
"""States that a conversation leaves only when it is run again."""

_LIMITS = {"MaxIterationsReached": StopReason.MAX_TURNS, "MaxBudgetReached": StopReason.TRUNCATED}


class RLAgent(Agent):
    """The SDK's agent whose completions a strategy decides and a storage records.

    ``rl`` is the ``[rl]`` section of a config.toml; a runner of the project has its own settings instead. A step runs
    the stock agent's ``step`` on a copy whose ``llm`` is a ``SessionLLM``. The SDK serialises this agent with its plain
    LLM.
    """

    rl: dict[str, Any] = Field(default_factory=dict, description="The [rl] section of openhands_rl_plugin.")

    # A runner's episode; for a sub-agent, the episode in which it was created, and its registered kind.
    _session: Session | None = PrivateAttr(default=None)
    _parent: tuple[ConversationEpisode, str] | None = PrivateAttr(default=None)

    @field_validator("rl")
    @classmethod
    def _is_valid(cls, rl: dict[str, Any]) -> dict[str, Any]:
        try:
            settings_from_sections({"rl": rl})
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return rl

    @property
    def prompt_dir(self) -> str:
        """The stock agent's prompts; by default the SDK looks in the folder of a subclass's module."""
        return os.path.join(os.path.dirname(stock.__file__), "prompts")

    @property
    def static_system_message(self) -> str:
        """The stock agent's, or the compact one."""
        if not self.settings().workspace.is_compact:
            return super().static_system_message
        stock_prompt = getattr(self, "system_prompt", None) is None and (
            self.system_prompt_filename == Agent.model_fields["system_prompt_filename"].default
        )
        return system_prompt(summary=True, instructions=SYSTEM if stock_prompt else super().static_system_message)

    def step(self, conversation: LocalConversation, *callbacks: Any, **named: Any) -> None:
        """As the stock agent's."""
        with self._recorded(conversation) as agent:
            Agent.step(agent, conversation, *callbacks, **named)

    async def astep(self, conversation: LocalConversation, *callbacks: Any, **named: Any) -> None:
        """As the stock agent's. The SDK asks for it since 1.23."""
        with self._recorded(conversation) as agent:
            await cast(Any, Agent).astep(agent, conversation, *callbacks, **named)

    def close(self) -> None:
        """End the episodes of the conversation that is being closed. Blocks."""
        for episode in list(_episodes.values()):
            # The SDK closes an agent, but does not name the conversation.
            if getattr(episode.conversation(), "_cleanup_initiated", True):
                episode.end()
                episode.release()
        super().close()

    @property
    def made_for(self) -> Session | None:
        """The episode that this agent was created for: the parent's of a sub-agent, or a runner's."""
        return self._parent[0].session if self._parent is not None else self._session

    def settings(self) -> RLSettings:
        """The settings of the episode that the agent was created for, or its own."""
        return self.made_for.settings if self.made_for is not None else settings_from_sections({"rl": self.rl})

    @contextmanager
    def _recorded(self, conversation: LocalConversation) -> Iterator[Agent]:
        """Copy the agent for one step, with recorded LLMs."""
        episode = _begin_step(self, conversation)
        if episode is None:
            yield self
            return
        answer = partial(episode.answer, self.llm)
        llm = SessionLLM.over(self.llm, answer, episode.prompts, episode.drop_malformed)
        try:
            with bound(stepping, episode):
                yield self.model_copy(update={"llm": llm, "condenser": _recorded(self.condenser, episode)})
        except EpisodeOver as over:
            conversation.state.execution_status = Status.FINISHED
            episode.end(over.stop)
        except LLMContextWindowExceedError as error:
            if episode.session.turns:
                episode.end(StopReason.MAX_TOKENS)
            elif episode.standalone:
                raise LLMContextWindowExceedError(too_long(episode.session.settings)) from error
            raise
        except asyncio.CancelledError:
            # No completion of this step counts as executed.
            episode.cancel()
            raise
        finally:
            episode.end_step(conversation.state)


def _recorded(condenser: CondenserBase | None, episode: ConversationEpisode) -> CondenserBase | None:
    """The condenser with recorded LLMs; condensers of condensers too."""
    if condenser is None:
        return None
    changed: dict[str, object] = {}
    llm, inner = getattr(condenser, "llm", None), getattr(condenser, "condensers", None)
    if isinstance(llm, LLM):
        changed["llm"] = SessionLLM.over(llm, partial(episode.summarize, llm), Prompts(compact=False))
    if isinstance(inner, list):
        changed["condensers"] = [_recorded(each, episode) for each in inner]
    return condenser.model_copy(update=changed) if changed else condenser


def conversation_end(state: ConversationState) -> tuple[StopReason, str]:
    """Why a conversation ended, and OpenHands' error, if any. A limit of the SDK is a regular end."""
    status, events = state.execution_status, state.events
    if status == Status.FINISHED:
        # As with OpenHands V0, a message that awaits a reply does not finish the task.
        return (StopReason.NO_ACTION if isinstance(_last_words(events), MessageEvent) else StopReason.TERMINATED), ""
    if status == Status.STUCK:
        # The SDK reports only a status; this is V0's message.
        return StopReason.TRUNCATED, "Agent got stuck in a loop"
    if status != Status.ERROR:
        return StopReason.ERROR, ""
    errors = ((event.code, event.detail) for event in reversed(events) if isinstance(event, ConversationErrorEvent))
    code, detail = next(errors, ("Error", "the conversation ended"))
    return _LIMITS.get(code, StopReason.ERROR), f"{code}: {detail}"


def said_finish(events: Sequence[Event]) -> bool:
    """Whether the agent's last message is a call of the ``finish`` tool."""
    return getattr(_last_words(events), "tool_name", None) == FinishTool.name


def _last_words(events: Sequence[Event]) -> Event | None:
    spoken = (event for event in reversed(events) if isinstance(event, ActionEvent | MessageEvent))
    return next((event for event in spoken if event.source == "agent"), None)


def _from_user(event: Event) -> bool:
    return isinstance(event, MessageEvent) and event.source == "user"


class ConversationEpisode:
    """One episode of a conversation of ``agent``: a runner's, one without a runner, or a sub-agent's.

    A sub-agent's episode ends with its parent's at the latest. ``standalone`` stores an episode without a runner.
    Raises ``ConfigError`` for an LLM that cannot be recorded, and for a folder whose changes cannot be recorded.
    """

    def __init__(self, agent: RLAgent, conversation: LocalConversation) -> None:
        self.id = str(conversation.state.id)
        self.over = self.failed = False
        # When the last step ended, unless one is under way; the events at which the agent finished, and why.
        self.idle_since: float | None = None
        self.finished: tuple[int | None, StopReason | None] = (None, None)
        self.delegated: weakref.WeakSet[ConversationEpisode] = weakref.WeakSet()
        self.sub_agent, self._llm = partial(type(agent), rl=agent.rl), agent.llm
        # Weak: it is empty once nothing else refers to the conversation.
        self.conversation, self._ending = weakref.ref(conversation), threading.RLock()
        session, self.standalone, own = self._begin(agent, conversation)
        self.session = session
        self.prompts = Prompts(compact=session.settings.workspace.is_compact)
        served = session.request.served_model or session.base_model
        self._own = upstream_in(session.settings, model=served, base_model=session.base_model) if own else None
        llm = agent.llm
        if self._own is None and (llm.uses_responses_api() or type(llm).completion is not LLM.completion):
            what = f"{type(llm).__name__} of {llm.model}"
            raise ConfigError(f"RLAgent needs one model, with chat completions, which have token ids, not {what}")
        session.upstream = self._own or model_server(agent.llm)
        session.world = self._world
        self._unisolated: SandboxedWorkspace | None = None
        runtime, folder = runtime_of(self.id), Path(str(conversation.workspace.working_dir))
        if isinstance(runtime, ConversationWorkspace) and not runtime.closed:
            runtime.sandboxed.begin()
        else:
            # Without a workspace of the tools, the changes of this folder are the evidence.
            settings = session.settings.workspace.model_copy(update={"isolation": "none"})
            self._unisolated = SandboxedWorkspace(folder, settings, protected=protected_by(session.settings.reward))
            register_runtime(self.id, self._unisolated)
        if self.standalone is not None:
            self.standalone.before_exit = partial(self.end, exiting=True)
        if agent._parent is not None:
            agent._parent[0].delegated.add(self)
        elif self.standalone is not None:
            store, strategy = store_name(session.settings), session.strategy_spec.name
            short = trajectory_id(session.request)[:SHORT_ID]
            forks = self._forkable or strategy == "StandardReAct"
            flat = "" if forks else f'; {strategy} forks nothing: isolation = "none"'
            _note(conversation, f"recorded in {store} on {socket.gethostname()} as {short}{flat}")

    def _begin(self, agent: RLAgent, conversation: LocalConversation) -> tuple[Session, StandaloneRun | None, bool]:
        """The session, what stores it where no runner does, and whether ``[rl]`` may say what samples for it."""
        llm, named = agent.llm, split_provider(agent.llm.model)[1]
        asked = next(filter(_from_user, reversed(conversation.state.events)), None)
        parts = asked.llm_message.content if isinstance(asked, MessageEvent) else ()
        instruction = "\n".join(part.text for part in parts if isinstance(part, TextContent))
        if agent._parent is not None:
            by, kind = agent._parent
            live = by.conversation()
            other = named if live is not None and live.agent.llm.model != llm.model else None
            session = _sub_agents_session(by.session, kind, self.id, instruction, other)
            above = by.standalone.parent if by.standalone else by.session
            return session, StandaloneRun(session, self.id, parent=above), session.exact and other is None
        if agent._session is not None:
            return agent._session, None, agent._session.exact
        settings = agent.settings()
        serving, base_model = settings.serving, settings.serving.model or named
        url, key = (serving.base_url, serving.api_key()) if serving.base_url else (llm.base_url, key_of(llm))
        session = standalone_episode(
            settings,
            session=self.id,
            instruction=instruction,
            base_model=base_model,
            environment_mode=False,
            served_model=adapter_in_use(serving, model=base_model, url=url, key=key) if url else None,
            workspace=str(conversation.workspace.working_dir),
        )
        return session, StandaloneRun(session, self.id), True

    @property
    def _forkable(self) -> ConversationWorkspace | None:
        """The sandbox of the tools; ``None`` if it cannot be forked."""
        runtime = runtime_of(self.id)
        return runtime if isinstance(runtime, ConversationWorkspace) and runtime.sandboxed.forks else None

    def answer(self, llm: LLM, body: JsonObject) -> Json:
        """Let the strategy choose a completion for a request of ``llm``, and store it. Blocks.

        Raises ``EpisodeOver``, and ``CaughtFailure`` for an error of the model server. If the plugin itself fails, it
        raises that error under a runner, else ``Unrecorded``.
        """
        session = self.session
        if self.over:
            raise EpisodeOver(session.stop or StopReason.ERROR)
        if self._own is None and llm is not self._llm:
            session.upstream = model_server(llm)
            self._llm = llm
        sent = body if self._own is None else {**body, "model": session.base_model}
        return self._with_ids(body, self._asked(lambda: session.answer(sent)))

    def summarize(self, llm: LLM, body: JsonObject) -> Json:
        """Sample a completion for a condenser; its node has the kind ``CONDENSATION``. Raises as ``answer``."""
        return self._asked(lambda: background().wait_for(self.session.aside(body, CONDENSATION, model_server(llm))))

    def _asked(self, ask: Callable[[], Json]) -> Json:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "rl.agent"):
                return ask()
        except EpisodeOver:
            raise
        except RLError as error:
            if server_error(error) is not None:
                raise
            self._fail(error)
            raise Unrecorded from error

    def cancel(self) -> None:
        """Cancel the running decision, a sub-agent's too. Blocks until its forks are closed."""
        for each in list(self.delegated):
            each.cancel()
        self.session.cancel()

    def drop_malformed(self, why: str) -> None:
        """Take the last completion off the executed path, because the SDK could not parse it."""
        if not self.failed:
            self.session.drop_malformed(why)

    def _fail(self, error: RLError) -> None:
        """Handle an error of the plugin itself. Under a runner the episode fails and the error is raised.

        Without a runner, the user's conversation continues without the plugin.
        """
        if isinstance(error, ConfigError):
            self.session.refuse(error)
        elif isinstance(error, CaughtFailure):
            self.session.failure = error.failure
        if self.standalone is None:
            raise error
        self.failed = True
        if (conversation := self.conversation()) is not None:
            _go_on_without(conversation, error)
        self.end(StopReason.ERROR)

    def end_step(self, state: ConversationState) -> None:
        """Note that the step has ended; end the episode if the conversation has ended."""
        if state.execution_status == Status.FINISHED and (self.standalone or said_finish(state.events)):
            self.finished = len(state.events), conversation_end(state)[0]
        self.idle_since = time.monotonic()

    def answered(self) -> bool:
        """Whether the user wrote a new task after the agent had finished; a hook's objection is none."""
        at, conversation = self.finished[0], self.conversation()
        return conversation is None or (at is not None and any(map(_from_user, conversation.state.events[at:])))

    def end(self, stop: StopReason | None = None, *, exiting: bool = False) -> None:
        """End the episode for the reason ``stop``, by default the conversation's. Idempotent; errors are logged.

        An episode without a runner is stored with its evidence and closed. If the process is ``exiting``,
        ``StandaloneRun`` stores it afterwards, with the changes of a workspace that is not isolated.
        """
        with self._ending:  # a second caller waits, too, until the episode is stored
            if self.over:
                return
            self.over = True
            for each in list(self.delegated):
                each.end()
            try:
                with boundary(FailureKind.INFRASTRUCTURE, "rl.end"):
                    self._note_end(stop)
                    if exiting and self._unisolated is not None:
                        self.session.evidence, _ = self._unisolated.conclude()
                    if self.standalone is not None:
                        if not exiting:
                            self.standalone.end()
                        self.release()
            except RLError as error:
                # The cause is already logged.
                level = logging.DEBUG if self.failed else logging.WARNING
                log.log(level, "openhands_rl_plugin: the episode of %s was not closed: %s", self.id, error)

    async def watch(self) -> None:
        """End the episode of a conversation that is never closed: once it is deleted, or idle after its end."""
        while not self.over:
            await asyncio.sleep(WATCH_SECONDS)
            conversation, since = self.conversation(), self.idle_since
            rests = since is not None and time.monotonic() - since > WATCH_SECONDS
            if conversation is None or (rests and conversation.state.execution_status in ENDED):
                await background().blocking(self.end)
            conversation = None

    def release(self) -> None:
        """Remove the record of the workspace's initial files."""
        if self._unisolated is not None:
            self._unisolated.close()

    def _note_end(self, stop: StopReason | None) -> None:
        why, conversation = "", self.conversation()
        if stop is None and conversation is not None:
            stop, why = conversation_end(conversation.state)
            why = why or f"it was closed before the agent had finished ({conversation.state.execution_status.value})"
        elif stop is None:
            stop, why = self.finished[1] or StopReason.ERROR, "its conversation was dropped before the agent finished"
        if stop is not StopReason.ERROR:
            # If the conversation continued after an error, the episode has not failed.
            self.session.failure = None
        elif why and self.session.failure is None:
            kind = FailureKind.INFRASTRUCTURE
            self.session.failure = Failure(kind=kind, message=why[:500], boundary=BOUNDARY)
        self.session.end_here(stop)

    def _with_ids(self, body: JsonObject, document: Json) -> Json:
        """The response, with token ids if the SDK requests them for its own event."""
        tree = self.session.tree
        if not body.get(TOKEN_IDS) or tree.head is None or (tokens := tree.nodes[tree.head].tokens) is None:
            return document
        choice = {**document["choices"][0], SAMPLED_IDS: list(tokens.sampled_ids)}
        return {**document, PROMPT_IDS: list(tokens.prompt_ids), "choices": [choice]}

    def _world(self) -> Forkable | None:
        workspace, conversation = self._forkable, self.conversation()
        if workspace is None or conversation is None:
            return None
        agent: Any = conversation.agent
        live = ConversationBranch(agent, ([], None), workspace, self.prompts, conversation)
        return BranchWorld(live, self.session)


def _sub_agents_session(by: Session, kind: str, id: str, instruction: str, model: str | None) -> Session:
    """Make the session of a sub-agent, stored with the session ``by``. ``model``: its served name if it differs.

    It gets its own run and group, because it is no sample of the parent's task. It has the parent's split.
    """
    asked, spec = by.request, by.strategy_spec
    data = {SUB_AGENT: {"parent": trajectory_id(asked), "kind": kind}}
    identity = workspace_task(instruction, asked.task.id).id
    task = asked.task.model_copy(update={"id": identity, "instruction": instruction, "data": data})
    seed = zlib.crc32("\0".join((str(asked.seed), kind, instruction)).encode())
    served = asked.served_model if model is None else None
    own = {"task": task, "run_id": sub_agents_run(asked.run_id), "group_id": id, "seed": seed, "served_model": served}
    request = asked.model_copy(update={"sample": 0, "attempt": 0, **own})
    strategy = registry.build("strategies", spec.name, spec.options) if by.exact else type(by.strategy)()
    same = {name: getattr(by, name) for name in ("strategy_spec", "environment_mode", "workspace", "token_ids")}
    session = Session(request, by.settings, strategy=strategy, base_model=model or by.base_model, **same)
    session.exact = by.exact
    return session


_EPISODE = "_rl_episode"
"""Attribute of a conversation: its newest episode, or ``None`` if the plugin failed in it."""
_episodes: weakref.WeakValueDictionary[str, ConversationEpisode] = weakref.WeakValueDictionary()
"""Conversation id -> its newest episode, held by the conversation."""


def episode_of(conversation: LocalConversation | None) -> ConversationEpisode | None:
    """The newest episode of a conversation; ``None`` before its first step and where the plugin failed."""
    return getattr(conversation, _EPISODE, None)


def _begin_step(agent: RLAgent, conversation: LocalConversation) -> ConversationEpisode | None:
    """The episode of the agent's next step; ``None`` if the stock agent should run the step.

    A new episode begins if the user sends a message after an end, or if the watch has ended the last one. A reply to
    the user is an end too, except under a runner, which replies by itself.
    """
    if getattr(conversation, _EPISODE, agent) is None:
        return None
    id = str(conversation.state.id)
    episode = _episodes.get(id)
    if episode is not None and (episode.conversation() is not conversation or episode.answered()):
        episode.end(episode.finished[1])
    if episode is None or episode.over:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "rl.begin"):
                episode = _episodes[id] = ConversationEpisode(agent, conversation)
        except RLError as error:
            if agent._session is not None:
                raise
            _go_on_without(conversation, error)
            return None
        setattr(conversation, _EPISODE, episode)
        if episode.standalone:
            Job(episode.watch(), background().loop)
    episode.idle_since, episode.finished = None, (None, None)
    return episode


def _go_on_without(conversation: LocalConversation, error: RLError) -> None:
    """Continue the conversation without the plugin, which failed, and record why."""
    log.warning("openhands_rl_plugin: %s; the conversation goes on without it", str(error).splitlines()[0])
    _note(conversation, f"not recorded: {one_line(str(error), 300)}")
    setattr(conversation, _EPISODE, None)


def _note(conversation: LocalConversation, text: str) -> None:
    state = conversation.state
    state.agent_state = {**state.agent_state, KEY: text}


stepping: ContextVar[ConversationEpisode | None] = ContextVar("rl_conversation", default=None)
"""The episode whose step is running: new sub-agents belong to it, and critics judge it."""


def _factory_of(name: str | None = None) -> Any:
    """As ``get_agent_factory``; during a step, its agents are recorded if they can be."""
    found, by = get_agent_factory(name), stepping.get()

    def make(llm: LLM) -> AgentBase:
        made = found.factory_func(llm)
        if by is None:
            return made
        if type(made) is Agent:
            fields = {name: getattr(made, name) for name in Agent.model_fields if name != "kind"}
            made = by.sub_agent(**fields)
        if not isinstance(made, RLAgent):
            log.warning("openhands_rl_plugin: a sub-agent is not recorded: %s is no Agent of the SDK", type(made))
            return made
        made = made.model_copy()
        made._parent = (by, found.definition.name)
        return made

    return found._replace(factory_func=make)  # pyrefly: ignore[bad-argument-type]


for _name in ("openhands.tools.delegate.impl", "openhands.tools.task.manager"):  # not every release has both
    with suppress(ModuleNotFoundError):
        if hasattr(_module := import_module(_name), "get_agent_factory"):
            _module.get_agent_factory = _factory_of  # type: ignore[attr-defined]


_ON_THE_COPY = frozenset({TERMINAL, EDITOR})
_EXECUTED = _ON_THE_COPY | {FinishTool.name, ThinkTool.name}
# A branch has none of these: they act outside of it, or call a model.
_LEFT_OUT: dict[str, object] = {"condenser": None, "critic": None, "agent_context": None, "mcp_config": {}}


@dataclass
class ConversationBranch:
    """A ``Branch`` of a conversation of ``agent``; the live conversation itself if ``tools`` are the live ones.

    A branch is a separate conversation in memory, over copies of the events and of the workspace. The SDK itself
    executes a completion there and writes the next prompt, so both equal those of the live conversation. A branch has
    no condenser, critic, hooks or confirmations, and only tools that work on the copy.

    ``log``: from ``log_of``; with a ``conversation``, it is read when the branch is forked. ``prompts``: the live
    conversation's.
    """

    agent: Agent
    log: tuple[list[Any], Any]
    tools: ConversationWorkspace
    prompts: Prompts
    conversation: LocalConversation | None = None

    @property
    def workspace(self) -> SandboxedWorkspace:
        """As ``Branch.workspace``."""
        return self.tools.sandboxed

    def fork(self) -> ConversationBranch:
        """As ``Branch.fork``."""
        if self.conversation is not None:
            self.log = log_of(self.conversation.state)
        return replace(self, tools=self.tools.fork(), conversation=None)

    def run(self, complete: Complete) -> None:
        """As ``Branch.run``. Raises ``BadEnvironmentError`` for a tool that a fork cannot execute."""
        live, id = self.agent, uuid.uuid4()
        register_runtime(str(id), self.tools)
        # Its own metrics, because the session counts the tokens.
        plain = live.llm.model_copy()
        plain.reset_metrics()
        llm, outside = SessionLLM.over(plain, complete, self.prompts.forked()), set(live.tools_map) - _EXECUTED

        def refuse(event: Event) -> None:
            if isinstance(event, AgentErrorEvent) and event.tool_name in outside:
                raise BadEnvironmentError(
                    f"the tool {event.tool_name!r} cannot be executed in a fork of the conversation"
                )

        kept: dict[str, Any] = {name: getattr(live, name) for name in Agent.model_fields if name != "kind"}
        kept |= {name: value for name, value in _LEFT_OUT.items() if name in kept}
        kept |= {"llm": llm, "tools": [tool for tool in live.tools if tool.name in _ON_THE_COPY]}
        conversation = LocalConversation(
            agent=Agent(**kept),
            conversation_id=id,
            workspace=str(self.workspace.private),
            persistence_dir=None,
            visualizer=None,
            stuck_detection=False,
            callbacks=[refuse],
        )
        # Newer releases of the SDK keep it until the program ends.
        atexit.unregister(conversation.close)
        state: Any = conversation.state
        events, leaf = self.log
        for event in events:
            state.events.append(event.model_copy())
        if hasattr(state, "active_branch"):
            state.leaf_event_id = leaf
            state.rebuild_view()
        state.execution_status = Status.IDLE
        self.conversation = conversation
        try:
            conversation.run()
        except ConversationRunError as error:
            raise (error.__cause__ or error) from None


def log_of(state: Any) -> tuple[list[Any], Any]:
    """The events of a conversation's state. From 1.31 on they are a tree; then also its current event."""
    events = state.active_branch() if hasattr(state, "active_branch") else state.events
    return [*events], getattr(state, "leaf_event_id", None)
