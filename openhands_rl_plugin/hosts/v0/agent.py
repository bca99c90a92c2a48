"""``RLAgent`` for OpenHands' controller, its completions, and its forks for search.

A session replaces ``LLM._completion_unwrapped``: below retries, message formatting and the conversion of tools to a
prompt, and before the response is parsed. Errors of the model server are raised as litellm's exceptions, so that
OpenHands' own retries and messages work. Completions of condensers and other agents are recorded too.

This module makes ``Agent.register`` of OpenHands idempotent, because both autoload and OpenHands itself (for the
documented ``classpath`` line) register ``RLAgent``. Otherwise OpenHands would log the second call as an error.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from typing import Any, Never

from litellm import Message as LiteLLMMessage
from litellm.exceptions import ContextWindowExceededError
from litellm.types.utils import Choices, ModelResponse
from openhands.agenthub.codeact_agent.codeact_agent import CodeActAgent
from openhands.controller.agent import Agent
from openhands.controller.state.state import State
from openhands.core import exceptions
from openhands.core.config import AgentConfig
from openhands.core.exceptions import FunctionCallConversionError, FunctionCallValidationError
from openhands.core.logger import openhands_logger
from openhands.core.message import Message
from openhands.core.schema import AgentState
from openhands.events import EventSource
from openhands.events.action import (
    Action,
    AgentFinishAction,
    AgentRejectAction,
    AgentThinkAction,
    MessageAction,
    NullAction,
    TaskTrackingAction,
)
from openhands.events.action.mcp import MCPAction
from openhands.events.action.message import SystemMessageAction
from openhands.events.event import Event
from openhands.events.observation import ErrorObservation, NullObservation
from openhands.events.observation import Observation as HostObservation
from openhands.events.observation.agent import RecallObservation
from openhands.events.serialization.event import event_from_dict, event_to_dict
from openhands.llm.fn_call_converter import (
    STOP_WORDS,
    convert_fncall_messages_to_non_fncall_messages,
    convert_non_fncall_messages_to_fncall_messages,
)
from openhands.llm.llm import LLM
from openhands.llm.llm_registry import LLMRegistry
from openhands.llm.llm_utils import check_tools
from openhands.llm.model_features import get_features
from openhands.llm.router import RouterLLM
from openhands.memory.condenser.impl.no_op_condenser import NoOpCondenser
from openhands.memory.view import View
from openhands.runtime import get_runtime_cls
from pydantic import Field

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import BadEnvironmentError, CaughtFailure, ConfigError, describe
from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.protocols import Forkable, info_of
from openhands_rl_plugin.core.tree import CHARACTERS_PER_TOKEN
from openhands_rl_plugin.core.types import CONDENSATION, Failure, FailureKind, JsonObject, StopReason
from openhands_rl_plugin.hosts.compact_prompt import SYSTEM, compact_tools, described, system_prompt
from openhands_rl_plugin.hosts.shared import litellm_calls, sessions
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import SandboxedWorkspace
from openhands_rl_plugin.hosts.v0 import runtime as runtimes
from openhands_rl_plugin.models.engines.openai_wire import Json
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.session.session import BranchWorld, Complete, EpisodeOver, Session, Upstream, session_here

MALFORMED = litellm_calls.malformed(exceptions)
"""The exceptions that OpenHands raises for a completion that it cannot parse."""

ANSWERED = MALFORMED[1:]
"""Parse errors that OpenHands' controller reports to the model; others end the session."""

_register_new = Agent.register


def register(name: str, agent_cls: type[Agent]) -> None:
    """``Agent.register``, except that registering the same class again changes nothing.

    Raises OpenHands' ``AgentAlreadyRegisteredError`` when another class has the name.
    """
    if Agent._registry.get(name) is not agent_cls:
        _register_new(name, agent_cls)


Agent.register = staticmethod(register)


WORKSPACE_RUNTIME = f"{runtimes.WorkspaceRuntime.__module__}.{runtimes.WorkspaceRuntime.__name__}"
_WANTS_CALLS = "this environment wants its tools called: set react_format = true in [rl], to answer with text"
_TOOLS_OF_OTHER_RUNTIMES = {"enable_browsing": False, "enable_jupyter": False}


class RLAgentHostConfig(AgentConfig):
    """``[agent.RLAgent]`` with an ``[agent.RLAgent.rl]`` table in it.

    OpenHands uses this model only if the section has a ``classpath`` line; without one it rejects the table. The table
    is validated when the agent is created, because OpenHands skips the whole section after an error here.
    """

    rl: JsonObject = Field(default_factory=dict)


class RLAgent(CodeActAgent):
    """The agent that OpenHands loads by the name "RLAgent": CodeAct, with a strategy that chooses every completion.

    The Python API ``openhands_rl_plugin.RLAgent`` is another class (``apps.rl_agent``), which runs without OpenHands.
    This one runs the episode of a runner. Without a runner it begins an episode and stores it itself.

    In workspace mode the model gets CodeAct's prompt and tools. In environment mode it gets only the environment's
    observations, and its completions are actions of the environment, which OpenHands' runtime executes.
    """

    config_model = RLAgentHostConfig

    _state: State | None = None
    _session: Session | None = None
    _standalone: sessions.StandaloneRun | None = None

    def __init__(self, config: AgentConfig, llm_registry: LLMRegistry) -> None:
        with runtimes.refusing():
            bound, runtime = session_here.get(), config.runtime or ""
            kind = runtime.rpartition(".")[2]
            self._environment_mode = kind == runtimes.EnvironmentRuntime.__name__
            if kind == runtimes.WorkspaceRuntime.__name__:
                config = config.model_copy(update=_TOOLS_OF_OTHER_RUNTIMES)
            self._settings = bound.settings if bound else runtimes.host_settings(config, llm_registry.config)
            super().__init__(config, llm_registry)
            if isinstance(self.llm, RouterLLM):
                raise ConfigError(
                    "RLAgent needs one model for a whole episode; remove [model_routing] from config.toml"
                )
            self._seen: tuple[list[Event], set[int]] = ([], set())
            if self._described:
                describe_tools(self.llm)
            asked = sessions.workspace_command(self._settings.reward)
            if asked is not None and runtime and not issubclass(get_runtime_cls(runtime), runtimes.WorkspaceRuntime):
                raise ConfigError(
                    f"[rl.reward]: `{asked.command}` judges a workspace, and runtime = {runtime!r} cannot run it: set "
                    f"runtime = {WORKSPACE_RUNTIME!r} in [core], or choose another reward"
                )
            self._served_model: str | None = None  # the adapter that an episode without a runner samples from
            if bound is not None:
                self._begin(bound)
            else:
                sessions.check_engine_setting(self._settings)
                llm = self.llm.config
                key = {"api_key": llm.api_key.get_secret_value() if llm.api_key else None}
                self._served_model = litellm_calls.check_model(self._settings, llm.model_dump() | key)

    def step(self, state: State) -> Action:
        """Return the next action: a pending one, or the first of a new completion.

        In environment mode one call runs the whole episode. Raises OpenHands' own exceptions, which its controller
        handles, if a completion cannot be parsed or the model server fails. Without a condenser, a full context window
        ends the episode.
        """
        self._state = state
        session = self._session or self._begin_standalone(state)
        own_step = self._roll_out if self._environment_mode else super().step
        condenses = self.config.enable_history_truncation and not isinstance(self.condenser, NoOpCondenser)
        try:
            action = recorded_step(session, own_step, state, condenses=condenses and not self._environment_mode)
        except asyncio.CancelledError:
            return NullAction()
        if isinstance(action, AgentFinishAction):
            self._end()
        return action

    def _roll_out(self, state: State) -> Never:
        """The episode of an environment. Raises ``EpisodeOver`` at its end."""
        session, runtime = self._session, sessions.runtime_of(state.session_id)
        assert session is not None and isinstance(runtime, runtimes.EnvironmentRuntime)
        live, tree = runtime.live, session.tree
        while True:
            if tree.head is None or tree.nodes[tree.head].sampled:
                work = live.reset(session.request.task) if tree.head is None else live.step(tree.action)
                try:
                    session.observe(background().wait_for(work))
                except CaughtFailure as caught:
                    raise EpisodeOver(StopReason.ERROR) from caught
                if info_of(live.environment).tools:
                    raise ConfigError(_WANTS_CALLS)
            self.llm.completion(messages=[to_wire(message) for message in tree.messages()])

    def reset(self) -> None:
        """Called by the controller when it stops or fails: cancels a running search and stores a standalone episode."""
        super().reset()
        if self._state is None:
            return
        if self._session is not None:
            self._session.cancel(_last_event(self._state))
        self._end(*controller_end(self._state))

    def get_system_message(self) -> SystemMessageAction | None:
        """CodeAct's message, or the compact one; ``None`` in environment mode, where the environment begins the
        conversation."""
        if self._environment_mode:
            return None
        message = super().get_system_message()
        if message is not None and self._compact:
            own = self.config.system_prompt_filename != AgentConfig().system_prompt_filename
            message.content = system_prompt(summary=False, instructions=message.content if own else SYSTEM)
        return message

    @property
    def _compact(self) -> bool:
        return self._settings.workspace.is_compact and not self._environment_mode

    def _get_tools(self) -> list[Any]:
        tools = super()._get_tools()
        return compact_tools(tools) if self._compact else tools

    @property
    def _described(self) -> bool:
        """Whether the tools are described in the prompt by our own text."""
        return self._compact and not self.llm.is_function_calling_active()

    def _begin_standalone(self, state: State) -> Session:
        session = sessions.standalone_episode(
            self._settings,
            session=state.session_id,
            instruction=self._get_initial_user_message(state.history).content,
            base_model=self._settings.serving.model or litellm_calls.split_provider(self.llm.config.model)[1],
            environment_mode=self._environment_mode,
            served_model=self._served_model,
            workspace=self.llm_registry.config.workspace_base or "",
        )
        self._standalone = sessions.StandaloneRun(session, state.session_id)
        return self._begin(session)

    def _begin(self, session: Session) -> Session:
        if (longest := session.limits.max_obs_length) is not None:
            # OpenHands cuts observations by this key; the configuration object is this LLM's own copy.
            config = self.llm.config
            config.max_message_chars = min(config.max_message_chars, longest * CHARACTERS_PER_TOKEN)
        session.upstream = connect(self.llm, self._ask_session)
        record_condenser(self.condenser, session)
        session.world = self._world
        if not self._environment_mode and type(session.strategy) is not StandardReActStrategy:
            session.reads = self._parse_error
        self._session = session
        return session

    def _ask_session(self, body: Json) -> Json:
        """Get a completion from the session. Raises as ``Session.answer``, ``CancelledError`` on the user's stop.

        ``connect`` has put this below OpenHands' retries, for litellm's call: a chat request in, its response out.
        """
        assert self._session is not None and self._state is not None
        if isinstance(runtime := sessions.runtime_of(self._state.session_id), runtimes.SessionRuntime):
            runtime.session = self._session
        return self._session.answer(body, _last_event(self._state))

    def _world(self) -> Forkable | None:
        """The live session as an environment that the strategy can fork; ``None`` if it cannot be forked."""
        assert self._session is not None and self._state is not None
        runtime = sessions.runtime_of(self._state.session_id)
        if isinstance(runtime, runtimes.EnvironmentRuntime):
            return runtime.live.world(self._session.limits)
        if not (isinstance(runtime, runtimes.WorkspaceRuntime) and runtime.workspace.forks):
            return None
        live = SessionBranch(self, self._state, runtime, *self._seen)
        return BranchWorld(live, self._session)

    def _get_messages(
        self, events: list[Event], initial_user_message: MessageAction, forgotten_event_ids: set[int]
    ) -> list[Message]:
        self._seen = events, forgotten_event_ids
        if self._compact:
            events = [_undated(event) for event in events]
        return super()._get_messages(events, initial_user_message, forgotten_event_ids)

    def _parse_error(self, document: Json) -> str | None:
        response = litellm_calls.response_of(document)
        try:
            if not self.llm.is_function_calling_active():
                read_described_call(response, check_tools(self.tools, self.llm.config))
            self.response_to_actions(response)
        except MALFORMED as error:
            return describe(error)
        return None

    def response_to_actions(self, response: ModelResponse) -> list[Action]:
        """As in OpenHands, but every invalid call raises ``FunctionCallValidationError``."""
        try:
            actions = super().response_to_actions(response)
        except FunctionCallConversionError as error:
            raise FunctionCallValidationError(str(error)) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # OpenHands' parser raises these for JSON arguments of the wrong types.
            raise FunctionCallValidationError(f"The tool call's arguments cannot be used: {describe(error)}") from error
        for action in actions:
            # OpenHands copies arguments into actions unchecked: a number as a command would fail in the runtime.
            for field in fields(action):
                value = getattr(action, field.name)
                if field.type in (str, "str") and not isinstance(value, str):
                    raise FunctionCallValidationError(f"The argument {field.name!r} must be text, got {value!r:.80}")
        return actions

    def _end(self, stop: StopReason | None = None, failure: Failure | None = None) -> None:
        """End an episode without a runner."""
        if self._standalone is not None:
            self._standalone.end(stop, failure)
            self._session = self._standalone = None


@dataclass
class SessionBranch:
    """A ``Branch`` of the session of ``agent``; the live session itself if ``runtime`` is the live one.

    A branch has a forked runtime and a list of events. The agent's own ``step`` runs over them, without a controller
    and event files. That suffices, because a prompt depends on events only. Events are serialised to JSON and back as
    in the live stream; none of a branch reaches the live stream.

    A branch does not simulate: knowledge that microagents add to the continuing message when the model calls no tool,
    condensation of the branch's own events, and OpenHands' own limits of a session. If the real prompt therefore
    differs from the simulated one, a new branch of the tree begins.

    ``events`` and ``forgotten`` (ids) are the history as the agent sees it.
    """

    agent: RLAgent
    state: State
    runtime: runtimes.WorkspaceRuntime
    events: list[Event]
    forgotten: set[int]

    @property
    def workspace(self) -> SandboxedWorkspace:
        """As ``Branch.workspace``."""
        return self.runtime.workspace

    def fork(self) -> SessionBranch:
        """As ``Branch.fork``."""
        return replace(self, runtime=self.runtime.fork(), events=[*self.events])

    def run(self, complete: Complete) -> None:
        """As ``Branch.run``. Raises ``BadEnvironmentError`` for an action that a fork cannot execute."""
        # Not at the top: OpenHands' own main module may be importing this package right now.
        from openhands.core.main import auto_continue_response

        agent: Any = copy.copy(self.agent)
        # Its own metrics, and no retry.
        config = agent.llm.config.model_copy(update={"num_retries": 1, "log_completions": False})
        agent.llm, agent.pending_actions, agent.condenser = LLM(config, agent.llm.service_id), deque(), self
        if agent._described:
            describe_tools(agent.llm)
        connect(agent.llm, complete)
        initial = agent._get_initial_user_message(self.state.history)
        agent._get_initial_user_message = lambda history: initial
        live = self.state
        state = State(session_id=live.session_id, iteration_flag=live.iteration_flag, history=self.events)
        while True:
            try:
                action = CodeActAgent.step(agent, state)
            except ANSWERED as error:
                self._record(ErrorObservation(str(error)), EventSource.AGENT)
                continue
            done = self._record(action, EventSource.AGENT)
            if isinstance(done, AgentFinishAction | AgentRejectAction):
                return
            if isinstance(done, MessageAction):
                self._record(MessageAction(content=auto_continue_response(state)), EventSource.USER)
            elif not isinstance(observation := self._observe(done), NullObservation):
                self._record(observation, EventSource.AGENT)

    def condensed_history(self, state: State) -> View:
        """The live view of the history plus the branch's events. A branch replaces its agent's condenser."""
        return View(events=state.history, forgotten_event_ids=self.forgotten)

    def _record(self, event: Event, source: EventSource) -> Any:
        """Add the event to the branch only, in the form in which the live stream would return it."""
        # OpenHands declares these as properties without setters, and sets them like this itself.
        holder: Any = event
        holder._id = (self.events[-1].id if self.events else 0) + 1
        holder._source, holder._timestamp = source, datetime.now().isoformat()
        recorded = event_from_dict(self.runtime.event_stream._replace_secrets(event_to_dict(event)))
        self.events.append(recorded)
        return recorded

    def _observe(self, action: Action) -> HostObservation:
        """Execute an action as OpenHands' runtime does, and return its observation."""
        known = action.runnable or isinstance(action, AgentThinkAction | TaskTrackingAction)
        if isinstance(action, MCPAction) or not known:
            raise BadEnvironmentError(f"{type(action).__name__} cannot be executed in a fork of the workspace")
        if action.timeout is None:
            action.set_hard_timeout(self.runtime.config.sandbox.timeout, blocking=False)
        observation: Any = self.runtime.run_action(action)
        observation._cause, observation.tool_call_metadata = action.id, action.tool_call_metadata
        return observation


def connect(llm: LLM, complete: Complete) -> Upstream:
    """Send the requests of ``llm`` to ``complete``. Returns the model server that litellm would call."""
    holder: Any = llm
    # litellm's ``completion`` as OpenHands bound it.
    send = getattr(holder._completion_unwrapped, "send", holder._completion_unwrapped)

    def answer(**more: Any) -> ModelResponse:
        return litellm_calls.answered(complete, {**send.keywords, **more})

    answer.send = send  # type: ignore[attr-defined]
    holder._completion_unwrapped = answer
    return litellm_calls.upstream_of(send.keywords, send)


def describe_tools(llm: LLM) -> None:
    """Make ``llm`` describe tools in the prompt by our text, which is shorter than OpenHands'. Call once an LLM."""
    holder: Any = llm
    complete = llm.completion

    def completed_by_text(*, messages: Any, tools: Sequence[Any], **more: Any) -> ModelResponse:
        prompt = llm.format_messages_for_llm(messages)
        rest: list[Any] = [message for message in prompt if message["role"] != "system"]
        # An empty list of tools, so that OpenHands adds no text of its own.
        converted = convert_fncall_messages_to_non_fncall_messages(rest, [], add_in_context_learning_example=False)
        if get_features(llm.config.model).supports_stop_words and not llm.config.disable_stop_word:
            more["stop"] = STOP_WORDS
        response = complete(messages=described(prompt, converted, tools), **more)
        read_described_call(response, tools)
        return response

    holder._completion = completed_by_text


def read_described_call(response: ModelResponse, tools: Sequence[Any]) -> None:
    """Convert a call in the completion's text to a tool call, in place. Raises OpenHands' parse errors."""
    choice = response.choices[0] if response.choices else None
    if isinstance(choice, Choices):
        [answer] = convert_non_fncall_messages_to_fncall_messages([choice.message.model_dump()], list(tools))
        choice.message = LiteLLMMessage(**answer)


def record_condenser(condenser: Any, session: Session) -> None:
    """Record a condenser's completions in the tree, as nodes of the kind ``CONDENSATION`` that are no turns."""
    for part in getattr(condenser, "condensers", ()):
        record_condenser(part, session)
    if isinstance(llm := getattr(condenser, "llm", None), LLM):
        upstream = connect(llm, lambda body: background().wait_for(session.aside(body, CONDENSATION, upstream)))


def recorded_step(
    session: Session, own_step: Callable[[State], Action], state: State, *, condenses: bool = False
) -> Action:
    """Run one step of an agent; at a limit, return the action that ends its episode.

    Completions get the step's number as metadata. A completion that OpenHands cannot parse is taken off the executed
    path, because OpenHands reports only the error to the model. A full context window ends the episode, unless a
    condenser handles it (``condenses``); no condenser can shorten the first prompt.
    """
    session.note = {"session": state.session_id, "step": state.iteration_flag.current_value}
    turns, action, stop = session.turns, None, None
    try:
        action = own_step(state)
    except MALFORMED as error:
        if session.turns > turns:
            session.drop_malformed(describe(error))
        raise
    except EpisodeOver as over:
        stop = over.stop
    except ContextWindowExceededError:
        if session.turns and condenses:
            raise
        stop = StopReason.MAX_TOKENS if session.turns else StopReason.ERROR
        if session.turns:
            session.failure = None
        else:
            openhands_logger.error(litellm_calls.too_long(session.settings))
    if isinstance(action, AgentFinishAction):
        # Without a call of the model it is OpenHands' own action for the user's /exit.
        stop = StopReason.TERMINATED if action.tool_call_metadata else StopReason.NO_ACTION
    if stop is not None:
        session.end_here(stop)
    return action or AgentFinishAction(final_thought=f"The episode is over: {stop and stop.value}.")


def record_agent(agent: Agent, session: Session) -> None:
    """Record all further steps of ``agent``, with the agent's own sampling and limits."""
    session.samples = False
    session.upstream = connect(agent.llm, session.answer)
    record_condenser(getattr(agent, "condenser", None), session)
    agent.step = partial(recorded_step, session, agent.step)


def controller_end(state: State) -> tuple[StopReason | None, Failure | None]:
    """Why a controller stopped, as a stop reason or a failure; neither if the agent itself recorded why.

    OpenHands' own limits end an episode regularly; any other end is a failure.
    """
    last, error = state.agent_state, state.last_error.lower()
    if last in (AgentState.FINISHED, AgentState.REJECTED):
        return None, None
    if last == AgentState.AWAITING_USER_INPUT:
        return StopReason.NO_ACTION, None
    if "maximum iteration" in error:
        return StopReason.MAX_TURNS, None
    if "maximum budget" in error or "stuckinloop" in error:
        return StopReason.TRUNCATED, None
    ended = "it was stopped before the agent had finished"
    ended = ended if last == AgentState.STOPPED else f"the controller ended in {last.value!r}"
    message = (state.last_error or ended)[:500]
    return None, Failure(kind=FailureKind.INFRASTRUCTURE, message=message, boundary="openhands.controller")


def _undated(event: Event) -> Event:
    """The event without the date, which differs each day, and the workspace's folder, which the tools name.

    OpenHands adds no message for such an event if nothing else is set.
    """
    if not isinstance(event, RecallObservation) or event.runtime_hosts or event.additional_agent_instructions:
        return event
    undated = copy.copy(event)
    undated.date = undated.working_dir = ""
    return undated


def _last_event(state: State) -> int:
    """The id of the last event in the agent's history; -1 when that is empty."""
    return state.history[-1].id if state.history else -1


register("RLAgent", RLAgent)
