"""Makes ``Agent.register`` of OpenHands idempotent.

Autoload registers ``RLAgent``, and so does OpenHands itself when a config.toml has the documented ``classpath`` line;
without this the second registration would be logged as an error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from litellm.exceptions import ContextWindowExceededError
from litellm.types.utils import ModelResponse
from openhands.agenthub.codeact_agent.codeact_agent import CodeActAgent
from openhands.controller.agent import Agent
from openhands.controller.state.state import State
from openhands.core.config import AgentConfig
from openhands.core.exceptions import FunctionCallConversionError, FunctionCallValidationError
from openhands.core.logger import openhands_logger
from openhands.core.message import Message
from openhands.events.action import Action, AgentFinishAction, MessageAction, NullAction
from openhands.events.action.mcp import MCPAction
from openhands.events.action.message import SystemMessageAction
from openhands.events.event import Event
from openhands.llm.llm import LLM
from openhands.llm.llm_registry import LLMRegistry
from openhands.llm.llm_utils import check_tools
from openhands.llm.router import RouterLLM
from openhands.memory.condenser.impl.no_op_condenser import NoOpCondenser

from openhands_rl_plugin.core.errors import ConfigError, RLError, describe
from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.tree import CHARACTERS_PER_TOKEN
from openhands_rl_plugin.core.types import Failure, StopReason
from openhands_rl_plugin.hosts.compact_prompt import SYSTEM, compact_tools, system_prompt
from openhands_rl_plugin.hosts.shared.litellm_calls import response_of, split_provider
from openhands_rl_plugin.hosts.shared.options import check_engine_setting
from openhands_rl_plugin.hosts.shared.run_checks import ModelServer, too_long
from openhands_rl_plugin.hosts.shared.sessions import end_evidence, runtime_of
from openhands_rl_plugin.hosts.shared.standalone_run import StandaloneRun, standalone_episode
from openhands_rl_plugin.hosts.v0.branch import SessionBranch
from openhands_rl_plugin.hosts.v0.completion import (
    MALFORMED,
    CompactMemory,
    ask,
    connect,
    describe_tools,
    noted_step,
    read_described_call,
    record_condenser,
    twin,
)
from openhands_rl_plugin.hosts.v0.environment_runtime import RESET_TOOL, STEP_TOOL, EnvironmentRuntime
from openhands_rl_plugin.hosts.v0.runtime import WorkspaceRuntime
from openhands_rl_plugin.hosts.v0.session_state import SessionRuntime, controller_end
from openhands_rl_plugin.hosts.v0.settings import (
    RLAgentHostConfig,
    check_reward,
    host_settings,
    refuse,
    watch_for_rl_section,
)
from openhands_rl_plugin.rollout.forks import World
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.session.branches import BranchWorld, Complete
from openhands_rl_plugin.session.session import EpisodeOver, Session, current_episode
from openhands_rl_plugin.session.token_id_text import Json

_register_new = Agent.register


def register(name: str, agent_cls: type[Agent]) -> None:
    """``Agent.register``, except that registering the same class again changes nothing.

    Raises OpenHands' ``AgentAlreadyRegisteredError`` when another class has the name.
    """
    if Agent._registry.get(name) is not agent_cls:
        _register_new(name, agent_cls)


Agent.register = staticmethod(register)


ENVIRONMENT_RUNTIME = "EnvironmentRuntime"
WORKSPACE_RUNTIME = "WorkspaceRuntime"

_NOT_ISOLATED = '. A workspace without isolation cannot be forked: [rl.workspace] isolation = "bubblewrap"'
_TOOLS_OF_OTHER_RUNTIMES = frozenset({"browser", "execute_ipython_cell"})


class RLAgent(CodeActAgent):
    """The agent that OpenHands loads by the name "RLAgent": CodeAct, with a strategy that decides every turn.

    The Python API ``openhands_rl_plugin.RLAgent`` is another class (``apps.rl_agent``), which runs without
    OpenHands. This one runs the bound episode, or else an episode of its own, which it stores itself.

    In workspace mode the model gets CodeAct's prompt and tools. In environment mode it gets only the environment's
    observations, and its answers are the actions of the environment, which runs behind OpenHands' runtime.
    """

    config_model = RLAgentHostConfig

    _state: State | None = None
    _session: Session | None = None
    _standalone: StandaloneRun | None = None

    def __init__(self, config: AgentConfig, llm_registry: LLMRegistry) -> None:
        bound = current_episode()
        self._runtime = (config.runtime or "").rpartition(".")[2]
        self._environment_mode = bound.environment_mode if bound else self._runtime == ENVIRONMENT_RUNTIME
        try:
            self._settings = bound.settings if bound else host_settings(config, llm_registry.config)
        except RLError as error:
            refuse(error)
        super().__init__(config, llm_registry)
        if self._compact:
            self.conversation_memory = CompactMemory(self.config, self.prompt_manager)
        if isinstance(self.llm, RouterLLM):
            raise ConfigError("RLAgent needs one model for a whole episode; remove [model_routing] from config.toml")
        self._workspace = llm_registry.config.workspace_base or ""
        self._opened = False
        self._seen: tuple[list[Event], set[int]] = ([], set())
        if self._described:
            describe_tools(self.llm)
        try:
            check_reward(self._settings.reward, config.runtime)
            self._served_model = self._check_server() if bound is None else None
        except RLError as error:
            refuse(error)
        if bound is not None:
            self._begin(bound)

    def _check_server(self) -> str | None:
        """Raises ``RLError`` when the run cannot begin; returns the served name of the adapter that it samples from."""
        check_engine_setting(self._settings)
        llm = self.llm.config
        key = {"api_key": llm.api_key.get_secret_value() if llm.api_key else None}
        server = ModelServer(self._settings, llm.model_dump() | key)
        server.check()
        return server.adapter_in_use()

    def step(self, state: State) -> Action:
        """The next action: a pending one, or the first of a new answer.

        Raises OpenHands' own exceptions for an answer that it cannot parse and for a model server that fails.
        """
        self._state = state
        if self.pending_actions:
            return self._emit(self.pending_actions.popleft())
        session = self._session or self._begin_standalone(state)
        if self._environment_mode:
            return self._step_in_environment(session, state)
        latest = state.get_last_user_message()
        if latest is not None and latest.content.strip() == "/exit":
            return self._finish(StopReason.NO_ACTION)
        return self._emit(self._asking(session, state, lambda: super(RLAgent, self).step(state)))

    def reset(self) -> None:
        """Called by the controller when it stops or fails: cancels a running search and stores a standalone episode."""
        super().reset()
        if self._state is None:
            return
        if self._session is not None:
            self._session.cancel(_last_event(self._state))
        if self._standalone is not None:
            self._store(*controller_end(self._state.agent_state.value, self._state.last_error))

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
        if self._compact:
            tools = compact_tools(tools)
        if self._runtime != WORKSPACE_RUNTIME:
            return tools
        return [tool for tool in tools if tool["function"]["name"] not in _TOOLS_OF_OTHER_RUNTIMES]

    @property
    def _described(self) -> bool:
        """Whether the tools are described in the prompt by our own text."""
        return self._compact and not self.llm.is_function_calling_active()

    def _begin_standalone(self, state: State) -> Session:
        session = standalone_episode(
            self._settings,
            session=state.session_id,
            instruction=self._get_initial_user_message(state.history).content,
            base_model=self._settings.serving.model or split_provider(self.llm.config.model)[1],
            environment_mode=self._environment_mode,
            served_model=self._served_model,
            workspace=self._workspace,
        )
        self._standalone = StandaloneRun(session)
        return self._begin(session)

    def _begin(self, session: Session) -> Session:
        if (longest := session.limits.max_obs_length) is not None:
            # OpenHands cuts observations by this key; the configuration object is this LLM's own copy.
            config = self.llm.config
            config.max_message_chars = min(config.max_message_chars, longest * CHARACTERS_PER_TOKEN)
        connect(session, self.llm)
        ask(self.llm, self._ask_session)
        record_condenser(self.condenser, session)
        session.world = self._world
        if not self._environment_mode and type(session.strategy) is not StandardReActStrategy:
            session.reads = self._why_unread
        self._session, self._opened = session, False
        return session

    def _ask_session(self, body: Json) -> Json:
        """The session's answer. Raises as ``Session.respond``, and ``CancelledError`` when the user stops it."""
        assert self._session is not None and self._state is not None
        if isinstance(runtime := runtime_of(self._state.session_id), SessionRuntime):
            runtime.decides(self._session)
        return self._session.answer(body, _last_event(self._state))

    def _world(self) -> World | None:
        """The live session, for the strategy to fork."""
        assert self._session is not None and self._state is not None
        runtime = runtime_of(self._state.session_id)
        if isinstance(runtime, EnvironmentRuntime):
            return runtime.live.world(self._session.limits)
        if not (isinstance(runtime, WorkspaceRuntime) and runtime.forkable):
            return None
        live = SessionBranch(self, self._state, runtime, runtime, *self._seen, threading.Event())
        return BranchWorld(live, self._session)

    def model_of(self, complete: Complete) -> LLM:
        """A copy of the agent's LLM whose requests ``complete`` answers."""
        llm = twin(self.llm)
        if self._described:
            describe_tools(llm)
        ask(llm, complete)
        return llm

    def _get_messages(
        self, events: list[Event], initial_user_message: MessageAction, forgotten_event_ids: set[int]
    ) -> list[Message]:
        self._seen = events, forgotten_event_ids
        return super()._get_messages(events, initial_user_message, forgotten_event_ids)

    def _step_in_environment(self, session: Session, state: State) -> Action:
        if not self._opened:
            self._opened = True
            return MCPAction(name=RESET_TOOL, arguments={})
        runtime = runtime_of(state.session_id)
        assert isinstance(runtime, EnvironmentRuntime)
        reply = runtime.take_reply()
        session.observe(reply)
        session.evidence = session.evidence if reply.evidence is None else reply.evidence
        session.failure = reply.failure or session.failure
        if session.failure is not None:
            return self._finish(StopReason.ERROR)

        def act() -> Action:
            self.llm.completion(messages=[to_wire(message) for message in session.tree.messages()])
            return MCPAction(name=STEP_TOOL, arguments={"content": session.tree.action.content or ""})

        return self._asking(session, state, act)

    def _asking(self, session: Session, state: State, step: Callable[[], Action]) -> Action:
        """The action of ``step``, which asks for a completion. OpenHands' controller handles its own exceptions.

        Without a condenser, a full context window ends the episode.
        """
        try:
            with noted_step(session, state):
                return step()
        except EpisodeOver as over:
            return self._finish(over.stop)
        except asyncio.CancelledError:
            return NullAction()
        except ConfigError as error:
            runtime = runtime_of(state.session_id)
            bare = isinstance(runtime, WorkspaceRuntime) and not runtime.forkable
            refused = ConfigError(f"{error}{_NOT_ISOLATED if bare else ''}")
            session.refuse(refused)
            raise refused from error
        except ContextWindowExceededError:
            if not session.turns:
                # No condenser can make the first prompt shorter: OpenHands would try until its limit of iterations.
                openhands_logger.error(too_long(self._settings))
                return self._finish(StopReason.ERROR)
            if self._environment_mode or isinstance(self.condenser, NoOpCondenser):
                session.failure = None
                return self._finish(StopReason.MAX_TOKENS)
            raise

    def read(self, document: Json) -> Sequence[Action]:
        """The actions of an answer. Raises ``MALFORMED``."""
        response = response_of(document)
        if not self.llm.is_function_calling_active():
            read_described_call(response, check_tools(self.tools, self.llm.config))
        return self.response_to_actions(response)

    def _why_unread(self, document: Json) -> str | None:
        try:
            self.read(document)
        except MALFORMED as error:
            return describe(error)
        return None

    def response_to_actions(self, response: ModelResponse) -> list[Action]:
        """As in OpenHands, with one exception for all that is wrong with a call."""
        try:
            actions = super().response_to_actions(response)
        except FunctionCallConversionError as error:
            raise FunctionCallValidationError(str(error)) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # OpenHands' parser fails with these for JSON arguments that are no object of the right types.
            raise FunctionCallValidationError(f"The tool call's arguments cannot be used: {describe(error)}") from error
        for action in actions:
            _check_texts(action)
        return actions

    def _emit(self, action: Action) -> Action:
        if isinstance(action, AgentFinishAction) and self._session is not None and self._session.stop is None:
            self._end(StopReason.TERMINATED)
        return action

    def _finish(self, stop: StopReason) -> Action:
        self._end(stop)
        return AgentFinishAction(final_thought=f"The episode is over: {stop.value}.")

    def _end(self, stop: StopReason) -> None:
        assert self._session is not None
        self._session.end_here(stop)
        if self._standalone is not None:
            self._store()

    def _store(self, stop: StopReason | None = None, failure: Failure | None = None) -> None:
        """Store a standalone episode with its evidence, and end it."""
        session, standalone = self._session, self._standalone
        assert session is not None and standalone is not None and self._state is not None
        evidence, failure = end_evidence(runtime_of(self._state.session_id), session, failure)
        session.evidence = evidence or session.evidence
        standalone.keep(stop=stop, failure=failure)
        self._session = self._standalone = None


def _last_event(state: State) -> int:
    """The id of the last event in the agent's history; -1 when that is empty."""
    return state.history[-1].id if state.history else -1


def _check_texts(action: Action) -> None:
    """OpenHands copies a call's arguments into actions unchecked: a number as a command would fail in the runtime."""
    for field in fields(action):
        value = getattr(action, field.name)
        if field.type in (str, "str") and not isinstance(value, str):
            raise FunctionCallValidationError(f"The argument {field.name!r} must be text, got {value!r:.80}")


register("RLAgent", RLAgent)
watch_for_rl_section()
