"""``RLAgent`` inside OpenHands' controller: the CodeAct agent with a strategy for every turn, fully recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from litellm.exceptions import ContextWindowExceededError
from litellm.types.utils import ModelResponse
from openhands.agenthub.codeact_agent.codeact_agent import CodeActAgent
from openhands.controller.state.state import State
from openhands.core.config import AgentConfig
from openhands.core.exceptions import FunctionCallConversionError, FunctionCallValidationError
from openhands.core.logger import openhands_logger
from openhands.events.action import Action, AgentFinishAction, MessageAction, NullAction
from openhands.events.action.message import SystemMessageAction
from openhands.events.event import Event
from openhands.llm.fn_call_converter import convert_fncall_messages_to_non_fncall_messages
from openhands.llm.llm_registry import LLMRegistry
from openhands.llm.llm_utils import check_tools
from openhands.llm.router import RouterLLM
from openhands.memory.condenser.condenser import Condensation
from openhands.memory.condenser.impl.no_op_condenser import NoOpCondenser

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, boundary, describe
from openhands_rl_plugin.core.messages import WireMessage
from openhands_rl_plugin.core.tree import CHARACTERS_PER_TOKEN
from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason
from openhands_rl_plugin.hosts.compact_prompt import SYSTEM, compact_tools, system_prompt
from openhands_rl_plugin.hosts.shared.episode import HostEpisode, SessionWorld, current_episode
from openhands_rl_plugin.hosts.shared.first_prompt import FirstPrompt, too_long
from openhands_rl_plugin.hosts.shared.litellm_calls import split_provider
from openhands_rl_plugin.hosts.shared.options import check_engine_setting
from openhands_rl_plugin.hosts.shared.sandboxed_workspace import WorkspaceConversation
from openhands_rl_plugin.hosts.shared.sessions import EnvironmentHost, deciding, end_evidence, runtime_of, stop_deciding
from openhands_rl_plugin.hosts.shared.standalone_run import StandaloneRun, standalone_episode
from openhands_rl_plugin.hosts.v0.condensation import CompactMemory, record_condenser, recorded_condensations
from openhands_rl_plugin.hosts.v0.engine import ControllerEngine, HostTurn, described_tools
from openhands_rl_plugin.hosts.v0.environment_runtime import EnvironmentActions
from openhands_rl_plugin.hosts.v0.registration import register
from openhands_rl_plugin.hosts.v0.session_state import controller_end
from openhands_rl_plugin.hosts.v0.settings import (
    RLAgentHostConfig,
    check_reward,
    host_settings,
    refuse,
    watch_for_rl_section,
)
from openhands_rl_plugin.hosts.v0.workspace_world import ForkableRuntime, Position, WorkspaceWorld

ENVIRONMENT_RUNTIME = "EnvironmentRuntime"
WORKSPACE_RUNTIME = "WorkspaceRuntime"

# Model names for which OpenHands leaves out its worked example of a tool call.
_WITHOUT_EXAMPLE = ("openhands-lm", "devstral")
_NOT_ISOLATED = '. A workspace without isolation cannot be forked: [rl.workspace] isolation = "bubblewrap"'
_TOOLS_OF_OTHER_RUNTIMES = frozenset({"browser", "execute_ipython_cell"})


@dataclass
class _ActiveEpisode:
    """The state of one episode. ``standalone`` stores it when no runner does."""

    episode: HostEpisode
    engine: ControllerEngine
    conversation: WorkspaceConversation
    environment: EnvironmentActions
    standalone: StandaloneRun | None


class RLAgent(CodeActAgent):
    """The agent that OpenHands loads by the name "RLAgent": CodeAct, with a strategy that decides every turn.

    The Python API ``openhands_rl_plugin.RLAgent`` is another class (``apps.rl_agent``), which runs without
    OpenHands. This one runs the bound episode, or else an episode of its own, which it stores itself.

    In workspace mode the model gets CodeAct's prompt and tools. In environment mode it gets only the environment's
    observations, and its answers are the actions of the environment, which runs behind OpenHands' runtime.
    """

    config_model = RLAgentHostConfig

    _state: State | None = None
    _active: _ActiveEpisode | None = None

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
        self._served_model: str | None = None
        self._workspace = llm_registry.config.workspace_base or ""
        record_condenser(self.condenser)
        if bound is not None:
            check_reward(self._settings.reward, config.runtime)
            self._active = self._begin(bound)
            return
        try:
            check_reward(self._settings.reward, config.runtime)
            self._served_model = self._check_first_prompt()
        except RLError as error:
            refuse(error)

    def _check_first_prompt(self) -> str | None:
        """Raises ``RLError`` when the run cannot begin; returns the served name of the adapter that it samples from."""
        check_engine_setting(self._settings)
        llm = self.llm.config
        key = {"api_key": llm.api_key.get_secret_value() if llm.api_key else None}
        first = FirstPrompt(self._settings, llm.model_dump() | key)
        first.check_server()
        if not self._environment_mode:
            system = self.get_system_message()
            prompt = [{"role": "system", "content": system.content if system else ""}, {"role": "user", "content": "."}]
            native = self.llm.is_function_calling_active()
            first.check_length(
                prompt if native else self._described_in_prompt(prompt, self._offered), self._offered if native else ()
            )
        return first.adapter_in_use()

    def step(self, state: State) -> Action:
        """The next action: a pending one, or the first of a new answer.

        Raises OpenHands' own exceptions for an answer that it cannot parse and for a model server that fails.
        """
        self._state = state
        if self.pending_actions:
            return self._emit(self.pending_actions.popleft())
        if self._active is None:
            self._active = self._begin_standalone(state)
        step = self._step_in_environment if self._environment_mode else self._step_in_workspace
        return step(self._active, state)

    def reset(self) -> None:
        """Called by the controller when it stops or fails: cancels a running search and stores a standalone episode."""
        super().reset()
        if self._state is None:
            return
        stop_deciding(self._state.session_id, _last_event(self._state))
        if self._active is not None and self._active.standalone is not None:
            self._store(self._active, *controller_end(self._state.agent_state.value, self._state.last_error))

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

    def _begin_standalone(self, state: State) -> _ActiveEpisode:
        episode = standalone_episode(
            self._settings,
            session=state.session_id,
            instruction=self._get_initial_user_message(state.history).content,
            base_model=self._settings.serving.model or split_provider(self.llm.config.model)[1],
            environment_mode=self._environment_mode,
            served_model=self._served_model,
            workspace=self._workspace,
        )
        return self._begin(episode, StandaloneRun(episode))

    def _begin(self, episode: HostEpisode, standalone: StandaloneRun | None = None) -> _ActiveEpisode:
        if (longest := episode.limits.max_obs_length) is not None:
            # OpenHands cuts observations by this key; the configuration object is this LLM's own copy.
            config = self.llm.config
            config.max_message_chars = min(config.max_message_chars, longest * CHARACTERS_PER_TOKEN)
        read_actions = None if self._environment_mode else self._read_actions
        engine = ControllerEngine(self.llm, episode, read_actions, compact=self._compact)
        return _ActiveEpisode(
            episode=episode,
            engine=engine,
            conversation=WorkspaceConversation(episode.tree, engine.said),
            environment=EnvironmentActions(),
            standalone=standalone,
        )

    def _step_in_workspace(self, active: _ActiveEpisode, state: State) -> Action:
        latest = state.get_last_user_message()
        if latest is not None and latest.content.strip() == "/exit":
            return self._finish(active, StopReason.NO_ACTION)
        with recorded_condensations(active.episode, state):
            view = self.condenser.condensed_history(state)
        if isinstance(view, Condensation):
            return view.action
        initial = self._get_initial_user_message(state.history)
        write = partial(self._prompt, initial, view.forgotten_event_ids)
        turn = self._workspace_turn(active, state, *write(view.events))
        if (stop := active.episode.limit_reached()) is not None:
            return self._finish(active, stop)
        runtime, world = runtime_of(state.session_id), None
        if isinstance(runtime, ForkableRuntime) and runtime.forkable:
            world = WorkspaceWorld(runtime, Position(tuple(view.events), turn), active.engine, write)
        return self._decide(active, state, turn, world)

    def _prompt(
        self, initial: MessageAction, forgotten: set[int], events: Sequence[Event]
    ) -> tuple[Sequence[WireMessage], Sequence[WireMessage]]:
        """The prompt for these events, as OpenHands passes it to its LLM and as the LLM sends it."""
        prompt = self.llm.format_messages_for_llm(self._get_messages(list(events), initial, forgotten))
        if self.llm.is_function_calling_active():
            return prompt, prompt
        return prompt, self._described_in_prompt(prompt, self._offered)

    @property
    def _offered(self) -> list[Any]:
        return check_tools(self.tools, self.llm.config)

    def _workspace_turn(
        self, active: _ActiveEpisode, state: State, prompt: Sequence[WireMessage], wire: Sequence[WireMessage]
    ) -> HostTurn:
        """What OpenHands would send now. Moves the tree's head to the end of that prompt."""
        tools, tree = self._offered, active.episode.tree
        rewritten = active.conversation.follow(wire)
        if self.llm.is_function_calling_active():
            tree.tools = tree.tools or tuple(tools)
        return HostTurn(
            session=state.session_id,
            step=state.iteration_flag.current_value,
            path=tree.messages(),
            prompt=prompt,
            wire=wire,
            tools=tools,
            rewritten=rewritten,
            model_metadata=state.to_llm_metadata(model_name=self.llm.config.model, agent_name=self.name),
        )

    def _described_in_prompt(self, prompt: list[Any], tools: list[Any]) -> Sequence[WireMessage]:
        """The prompt as it is sent to a model without native tool calls."""
        if self._compact:
            return described_tools(prompt, tools)
        example = not any(name in self.llm.config.model for name in _WITHOUT_EXAMPLE)
        return convert_fncall_messages_to_non_fncall_messages(prompt, tools, add_in_context_learning_example=example)

    def _step_in_environment(self, active: _ActiveEpisode, state: State) -> Action:
        if not active.environment.opened:
            return active.environment.reset()
        active.episode.observe(active.environment.reply(state.history))
        if active.episode.failure is not None:
            return self._finish(active, StopReason.ERROR)
        if (stop := active.episode.limit_reached()) is not None:
            return self._finish(active, stop)
        runtime = runtime_of(state.session_id)
        world = runtime.world(active.episode.limits) if isinstance(runtime, EnvironmentHost) else None
        turn = HostTurn(session=state.session_id, step=state.iteration_flag.current_value)
        return self._decide(active, state, turn, world)

    def _decide(self, active: _ActiveEpisode, state: State, turn: HostTurn, world: SessionWorld | None) -> Action:
        episode = active.episode
        active.engine.open(turn)
        episode.failure = None
        job = background().start(episode.decide(active.engine, world))
        try:
            with deciding(turn.session, job, _last_event(state)), boundary(FailureKind.MODEL, "strategy.decide"):
                chosen = job.result()
        except asyncio.CancelledError:
            return NullAction()
        except ConfigError as error:
            bare = world is None and isinstance(runtime_of(turn.session), ForkableRuntime)
            refused = ConfigError(f"{error}{_NOT_ISOLATED if bare else ''}")
            episode.refuse(refused)
            raise refused from error
        except CaughtFailure as caught:
            return self._undecided(active, caught)
        episode.turns += 1
        node = episode.tree.nodes[chosen]
        if self._environment_mode:
            episode.tree.commit(chosen)
            episode.keep()
            return active.environment.act(node.message)
        outcome = active.engine.answers.of(node.message)
        if outcome.error is not None:
            # The answer stays off the executed path: OpenHands reports the error to the model, without the answer.
            episode.keep()
            raise outcome.error
        active.conversation.acted(chosen)
        episode.keep()
        self.pending_actions.extend(outcome.fresh_actions())
        return self._emit(self.pending_actions.popleft())

    def _undecided(self, active: _ActiveEpisode, caught: CaughtFailure) -> Action:
        """Raise OpenHands' own exception, which its controller handles. Without a condenser, a full context window
        ends the episode."""
        active.episode.failure = caught.failure
        error = caught.__cause__
        host_error = (error and error.__cause__) or error or caught
        assert isinstance(host_error, Exception)
        if isinstance(host_error, ContextWindowExceededError):
            if not active.episode.turns:
                # No condenser can make the first prompt shorter: OpenHands would try until its limit of iterations.
                openhands_logger.error(str(too_long("too many tokens", self._settings.max_response_length, "size")))
                return self._finish(active, StopReason.ERROR)
            if self._environment_mode or isinstance(self.condenser, NoOpCondenser):
                active.episode.failure = None
                return self._finish(active, StopReason.MAX_TOKENS)
        raise host_error

    def _read_actions(self, response: ModelResponse) -> Sequence[Action]:
        try:
            actions = self.response_to_actions(response)
        except FunctionCallConversionError as error:
            raise FunctionCallValidationError(str(error)) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # OpenHands' parser fails with these for JSON arguments that are no object of the right types.
            raise FunctionCallValidationError(f"The tool call's arguments cannot be used: {describe(error)}") from error
        for action in actions:
            _check_texts(action)
        return actions

    def _emit(self, action: Action) -> Action:
        if isinstance(action, AgentFinishAction) and self._active is not None:
            self._end(self._active, StopReason.TERMINATED)
        return action

    def _finish(self, active: _ActiveEpisode, stop: StopReason) -> Action:
        self._end(active, stop)
        return AgentFinishAction(final_thought=f"The episode is over: {stop.value}.")

    def _end(self, active: _ActiveEpisode, stop: StopReason) -> None:
        active.episode.end_here(stop)
        if active.standalone is not None:
            self._store(active)

    def _store(self, active: _ActiveEpisode, stop: StopReason | None = None, failure: Failure | None = None) -> None:
        """Store a standalone episode with its evidence, and end it."""
        assert active.standalone is not None and self._state is not None
        runtime = runtime_of(self._state.session_id)
        evidence, failure = end_evidence(runtime, active.episode, failure)
        active.episode.evidence = evidence or active.episode.evidence
        active.standalone.keep(stop=stop, failure=failure)
        self._active = None


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
