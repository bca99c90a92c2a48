"""``RLAgent`` inside OpenHands' controller: the CodeAct agent, with a strategy deciding and everything recorded."""

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
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary, describe
from openhands_rl_plugin.core.messages import WireMessage
from openhands_rl_plugin.core.tree import CHARACTERS_PER_TOKEN
from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason
from openhands_rl_plugin.hosts.shared.episode import HostEpisode, SessionWorld, current_episode
from openhands_rl_plugin.hosts.shared.sessions import (
    EnvironmentHost,
    EpisodeRuntime,
    deciding,
    runtime_of,
    stop_deciding,
)
from openhands_rl_plugin.hosts.shared.standalone_run import StandaloneRun, standalone_episode
from openhands_rl_plugin.hosts.shared.workspace_conversation import WorkspaceConversation
from openhands_rl_plugin.hosts.v0.engine import ControllerEngine, HostTurn
from openhands_rl_plugin.hosts.v0.environment_actions import EnvironmentActions
from openhands_rl_plugin.hosts.v0.recorder import split_provider
from openhands_rl_plugin.hosts.v0.registration import register
from openhands_rl_plugin.hosts.v0.session_state import controller_end
from openhands_rl_plugin.hosts.v0.settings import RLAgentHostConfig, host_settings, watch_for_rl_section
from openhands_rl_plugin.hosts.v0.workspace_world import ForkableRuntime, Position, WorkspaceWorld

ENVIRONMENT_RUNTIME = "EnvironmentRuntime"
WORKSPACE_RUNTIME = "WorkspaceRuntime"

# Model names for which OpenHands leaves out its worked example of a tool call.
_WITHOUT_EXAMPLE = ("openhands-lm", "devstral")
_NOT_ISOLATED = ". This workspace has no isolation, without which it is not forked: install bubblewrap"
_TOOLS_OF_OTHER_RUNTIMES = frozenset({"browser", "execute_ipython_cell"})


@dataclass
class _Play:
    """What belongs to one episode. ``keeper`` is there when nobody but the agent would store it."""

    episode: HostEpisode
    engine: ControllerEngine
    conversation: WorkspaceConversation
    dialogue: EnvironmentActions
    keeper: StandaloneRun | None


class RLAgent(CodeActAgent):
    """The agent that OpenHands loads by the name "RLAgent": CodeAct whose every turn a strategy decides.

    The Python API ``openhands_rl_plugin.RLAgent`` is another class (``apps.agent.rl_agent``), which runs without
    OpenHands. This one plays the bound episode, or its own, which it stores itself.

    In workspace mode the model gets CodeAct's prompt and tools. In environment mode it gets only what the environment
    says, and its answers go to the environment, which stands behind OpenHands' runtime.
    """

    config_model = RLAgentHostConfig

    _state: State | None = None
    _play: _Play | None = None

    def __init__(self, config: AgentConfig, llm_registry: LLMRegistry) -> None:
        bound = current_episode()
        self._runtime = (config.runtime or "").rpartition(".")[2]
        self._environment_mode = bound.environment_mode if bound else self._runtime == ENVIRONMENT_RUNTIME
        super().__init__(config, llm_registry)
        if isinstance(self.llm, RouterLLM):
            raise ConfigError("RLAgent needs one model for a whole episode; remove [model_routing] from config.toml")
        self._settings = bound.settings if bound else host_settings(config, llm_registry.config)
        if bound is not None:
            self._play = self._begin(bound)

    def step(self, state: State) -> Action:
        """The next action: one that is pending, or the first of a newly decided answer.

        Raises OpenHands' own exceptions: for an answer that it cannot read, and for a model server that fails.
        """
        self._state = state
        if self.pending_actions:
            return self._hand_over(self.pending_actions.popleft())
        if self._play is None:
            self._play = self._begin_own(state)
        step = self._step_in_environment if self._environment_mode else self._step_in_workspace
        return step(self._play, state)

    def reset(self) -> None:
        """Called by the controller when it stops or fails: no step will follow, so a search that is under way is ended,
        and an own episode is stored."""
        super().reset()
        if self._state is None:
            return
        stop_deciding(self._state.session_id, _last_heard(self._state))
        if self._play is not None and self._play.keeper is not None:
            self._keep(self._play, *controller_end(self._state.agent_state.value, self._state.last_error))

    def get_system_message(self) -> SystemMessageAction | None:
        """CodeAct's, or none in environment mode: the environment opens the conversation itself."""
        return None if self._environment_mode else super().get_system_message()

    def _get_tools(self) -> list[Any]:
        tools = super()._get_tools()
        if self._runtime != WORKSPACE_RUNTIME:
            return tools
        return [tool for tool in tools if tool["function"]["name"] not in _TOOLS_OF_OTHER_RUNTIMES]

    def _begin_own(self, state: State) -> _Play:
        episode = standalone_episode(
            self._settings,
            session=state.session_id,
            instruction=self._get_initial_user_message(state.history).content,
            base_model=self._settings.serving.model or split_provider(self.llm.config.model)[1],
            environment_mode=self._environment_mode,
        )
        return self._begin(episode, StandaloneRun(episode))

    def _begin(self, episode: HostEpisode, keeper: StandaloneRun | None = None) -> _Play:
        if (longest := episode.limits.max_obs_length) is not None:
            # OpenHands cuts observations by this key; the configuration object is this LLM's own copy.
            config = self.llm.config
            config.max_message_chars = min(config.max_message_chars, longest * CHARACTERS_PER_TOKEN)
        return _Play(
            episode=episode,
            engine=ControllerEngine(self.llm, episode, None if self._environment_mode else self._read_actions),
            conversation=WorkspaceConversation(episode.tree),
            dialogue=EnvironmentActions(),
            keeper=keeper,
        )

    def _step_in_workspace(self, play: _Play, state: State) -> Action:
        latest = state.get_last_user_message()
        if latest is not None and latest.content.strip() == "/exit":
            return self._finish(play, StopReason.NO_ACTION)
        view = self.condenser.condensed_history(state)
        if isinstance(view, Condensation):
            return view.action
        initial = self._get_initial_user_message(state.history)
        write = partial(self._write, initial, view.forgotten_event_ids)
        turn = self._workspace_turn(play, state, *write(view.events))
        if (stop := play.episode.limit_reached()) is not None:
            return self._finish(play, stop)
        runtime, world = runtime_of(state.session_id), None
        if isinstance(runtime, ForkableRuntime) and runtime.forkable:
            world = WorkspaceWorld(runtime, Position(tuple(view.events), turn), play.engine, write)
        return self._decide(play, state, turn, world)

    def _write(
        self, initial: MessageAction, forgotten: set[int], events: Sequence[Event]
    ) -> tuple[Sequence[WireMessage], Sequence[WireMessage]]:
        """The prompt over these events, as OpenHands gives it to its LLM and as that sends it."""
        prompt = self.llm.format_messages_for_llm(self._get_messages(list(events), initial, forgotten))
        if self.llm.is_function_calling_active():
            return prompt, prompt
        return prompt, self._described_in_prompt(prompt, self._offered)

    @property
    def _offered(self) -> list[Any]:
        return check_tools(self.tools, self.llm.config)

    def _workspace_turn(
        self, play: _Play, state: State, prompt: Sequence[WireMessage], wire: Sequence[WireMessage]
    ) -> HostTurn:
        """What OpenHands would send now; afterwards the tree's head is the end of it."""
        tools, tree = self._offered, play.episode.tree
        rewritten = play.conversation.follow(wire)
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
        """The prompt as OpenHands sends it to a model without native tool calls."""
        example = not any(name in self.llm.config.model for name in _WITHOUT_EXAMPLE)
        return convert_fncall_messages_to_non_fncall_messages(prompt, tools, add_in_context_learning_example=example)

    def _step_in_environment(self, play: _Play, state: State) -> Action:
        if not play.dialogue.opened:
            return play.dialogue.reset()
        play.episode.observe(play.dialogue.reply(state.history))
        if play.episode.failure is not None:
            return self._finish(play, StopReason.ERROR)
        if (stop := play.episode.limit_reached()) is not None:
            return self._finish(play, stop)
        runtime = runtime_of(state.session_id)
        world = runtime.world(play.episode.limits) if isinstance(runtime, EnvironmentHost) else None
        turn = HostTurn(session=state.session_id, step=state.iteration_flag.current_value)
        return self._decide(play, state, turn, world)

    def _decide(self, play: _Play, state: State, turn: HostTurn, world: SessionWorld | None) -> Action:
        episode = play.episode
        play.engine.open(turn)
        episode.failure = None
        job = background().start(episode.decide(play.engine, world))
        try:
            with deciding(turn.session, job, _last_heard(state)), boundary(FailureKind.MODEL, "strategy.decide"):
                chosen = job.result()
        except asyncio.CancelledError:
            return NullAction()
        except ConfigError as error:
            bare = world is None and isinstance(runtime_of(turn.session), ForkableRuntime)
            refused = ConfigError(f"{error}{_NOT_ISOLATED if bare else ''}")
            episode.refuse(refused)
            raise refused from error
        except CaughtFailure as caught:
            return self._undecided(play, caught)
        episode.turns += 1
        node = episode.tree.nodes[chosen]
        if self._environment_mode:
            episode.tree.commit(chosen)
            episode.keep()
            return play.dialogue.act(node.message)
        outcome = play.engine.outcome(node.message)
        if outcome.error is not None:
            # The answer stays beside the acted path: OpenHands tells the model what was wrong, but never replays it.
            episode.keep()
            raise outcome.error
        play.conversation.acted(chosen)
        episode.keep()
        self.pending_actions.extend(outcome.fresh_actions())
        return self._hand_over(self.pending_actions.popleft())

    def _undecided(self, play: _Play, caught: CaughtFailure) -> Action:
        """Give OpenHands its own exception back, which it knows how to handle; without a condenser a full context
        window is an end."""
        play.episode.failure = caught.failure
        error = caught.__cause__
        host_error = (error and error.__cause__) or error or caught
        assert isinstance(host_error, Exception)
        stuck = self._environment_mode or isinstance(self.condenser, NoOpCondenser)
        if isinstance(host_error, ContextWindowExceededError) and stuck:
            play.episode.failure = None
            return self._finish(play, StopReason.MAX_TOKENS)
        raise host_error

    def _read_actions(self, response: ModelResponse) -> Sequence[Action]:
        try:
            actions = self.response_to_actions(response)
        except FunctionCallConversionError as error:
            raise FunctionCallValidationError(str(error)) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            # Arguments that are JSON, but not an object of the right types, trip OpenHands' reading of them.
            raise FunctionCallValidationError(f"The tool call's arguments cannot be used: {describe(error)}") from error
        for action in actions:
            _check_texts(action)
        return actions

    def _hand_over(self, action: Action) -> Action:
        if isinstance(action, AgentFinishAction) and self._play is not None:
            self._end(self._play, StopReason.TERMINATED)
        return action

    def _finish(self, play: _Play, stop: StopReason) -> Action:
        self._end(play, stop)
        return AgentFinishAction(final_thought=f"The episode is over: {stop.value}.")

    def _end(self, play: _Play, stop: StopReason) -> None:
        play.episode.end_here(stop)
        if play.keeper is not None:
            self._keep(play)

    def _keep(self, play: _Play, stop: StopReason | None = None, failure: Failure | None = None) -> None:
        """Store an own episode with its evidence; nothing is played any more."""
        assert play.keeper is not None and self._state is not None
        runtime = runtime_of(self._state.session_id)
        if isinstance(runtime, EpisodeRuntime):
            evidence, broken = runtime.conclude()
            play.episode.evidence, failure = evidence or play.episode.evidence, failure or broken
        play.keeper.keep(stop=stop, failure=failure)
        self._play = None


def _last_heard(state: State) -> int:
    """The id of the last event that the controller has come to, of those that it tells the agent of."""
    return state.history[-1].id if state.history else -1


def _check_texts(action: Action) -> None:
    """OpenHands puts a call's arguments into actions unchecked; a number for a command would fail in the runtime."""
    for field in fields(action):
        value = getattr(action, field.name)
        if field.type in (str, "str") and not isinstance(value, str):
            raise FunctionCallValidationError(f"The argument {field.name!r} must be text, got {value!r:.80}")


register("RLAgent", RLAgent)
watch_for_rl_section()
