"""Episodes in sessions of OpenHands' ``AgentController``: many in one process.

As ``openhands.core.main.run_controller``, but without signal handlers, polling and state on disk. A failure in any of a
session's threads ends it; OpenHands' own loop would wait forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

from openhands.agenthub import Agent
from openhands.controller import AgentController
from openhands.controller.state.state import State
from openhands.core.config import AgentConfig, LLMConfig, OpenHandsConfig, SandboxConfig
from openhands.core.config.condenser_config import create_condenser_config
from openhands.core.main import auto_continue_response
from openhands.core.schema import AgentState
from openhands.core.setup import create_agent
from openhands.events import EventSource, EventStream
from openhands.events.action import MessageAction, NullAction
from openhands.events.event import Event
from openhands.events.observation import AgentStateChangedObservation
from openhands.llm.llm_registry import LLMRegistry
from openhands.memory.memory import Memory
from openhands.runtime.runtime_status import RuntimeStatus
from openhands.server.services.conversation_stats import ConversationStats
from openhands.storage.memory import InMemoryFileStore

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, boundary, describe
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, altering_parameters
from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason
from openhands_rl_plugin.hosts.shared.sessions import (
    ITERATIONS_A_TURN,
    RL_AGENT,
    HostOptions,
    HostSession,
    SessionHostRunner,
    llm_settings,
    make_llm,
)
from openhands_rl_plugin.hosts.v0.agent import WORKSPACE_RUNTIME, RLAgent, controller_end, record_agent
from openhands_rl_plugin.hosts.v0.runtime import WorkspaceRuntime
from openhands_rl_plugin.session.session import Session

_ENDS = frozenset({AgentState.FINISHED, AgentState.REJECTED, AgentState.ERROR, AgentState.STOPPED, AgentState.PAUSED})


class ControllerSession(HostSession):
    """Runs one episode by OpenHands' controller."""

    _controller: AgentController | None = None

    def start(self, instruction: str) -> None:
        """As in ``HostSession``."""
        config = controller_config(self.episode.settings, self.options, self.episode)
        llms = LLMRegistry(config)
        stats = ConversationStats(None, self.id, None)
        llms.subscribe(stats.register_llm)
        agent = create_agent(config, llms)
        if not isinstance(agent, RLAgent):
            record_agent(agent, self.episode)
        stream = SessionEventStream(self.id, self.finish, self._on_state)
        self.opened.callback(stream.close)
        runtime = WorkspaceRuntime(config, stream, llms, self.id, status_callback=self._on_status, headless_mode=True)
        self.opened.callback(runtime.close)
        asyncio.run(runtime.connect())
        memory: Any = SessionMemory(stream, self.id)
        memory.set_runtime_status = partial(self._on_status, "error")
        memory.set_conversation_instructions(None)
        memory.set_runtime_info(runtime, {}, str(runtime.workspace_root))
        memory.load_user_workspace_microagents(runtime.get_microagents_from_selected_repo(None))
        self._controller = AgentController(
            agent=agent, conversation_stats=stats, iteration_delta=config.max_iterations, event_stream=stream
        )
        stream.add_event(MessageAction(content=instruction), EventSource.USER)

    def reason(self, end: Failure | StopReason | None) -> tuple[StopReason | None, Failure | None, str]:
        """As in ``HostSession``."""
        state = self._controller.state if self._controller is not None else State()
        stop, failure = (
            controller_end(state) if end is None else (None, end) if isinstance(end, Failure) else (end, None)
        )
        return stop, failure, state.last_error

    def _on_state(self) -> None:
        assert self._controller is not None
        state = self._controller.get_state()
        if state.agent_state is AgentState.AWAITING_USER_INPUT:
            users = [each for each in state.history if isinstance(each, MessageAction) and each.source == "user"]
            text = self.reply(len(users) - 1, auto_continue_response(state))
            self._controller.event_stream.add_event(MessageAction(content=text), EventSource.USER)
        elif state.agent_state in _ENDS:
            self.finish(None)

    def _on_status(self, level: str, status: RuntimeStatus, message: str) -> None:
        """An error of the runtime or of the memory, after which the controller would wait forever."""
        if level == "error":
            what = f"{status.value}: {message}" if message else status.value
            self.finish(Failure(kind=FailureKind.INFRASTRUCTURE, message=what[:500], boundary="openhands.runtime"))


class ControllerRunner(SessionHostRunner):
    """An ``EpisodeRunner`` over real OpenHands sessions in this process, which work in workspaces."""

    session = ControllerSession
    agents = staticmethod(Agent.list_agents)


class SessionEventStream(EventStream):
    """An event stream in memory that reports its subscribers' exceptions and can be closed while they run.

    ``on_state`` is called after each change of the agent's state, in the controller's thread.
    """

    def __init__(self, sid: str, on_failure: Callable[[Failure | RLError], None], on_state: Callable[[], None]) -> None:
        super().__init__(sid, InMemoryFileStore())
        self._on_failure, self._on_state = on_failure, on_state
        self._events: list[Event] = []

    def add_event(self, event: Event, source: EventSource) -> None:
        """As in OpenHands, but there are neither files nor copies."""
        holder: Any = event
        with self._lock:
            holder._id, holder._source, holder._timestamp = self.cur_id, source, datetime.now().isoformat()
            self.cur_id += 1
            self._events.append(event)
            self._queue.put(event)
        if isinstance(event, AgentStateChangedObservation):
            self._on_state()

    def search_events(self, *args: Any, reverse: bool = False, **more: Any) -> Iterator[Event]:
        """All events, in order or from the last."""
        return iter(self._events[::-1] if reverse else self._events[:])

    def _make_error_handler(self, callback_id: str, subscriber_id: Any) -> Callable[[Any], None]:
        """As in OpenHands, but an exception of a subscriber ends the session instead of being logged."""

        def check(call: Any) -> None:
            try:
                with boundary(FailureKind.INFRASTRUCTURE, f"openhands.{subscriber_id.value}"):
                    call.result()
            except CaughtFailure as caught:
                self._on_failure(caught.failure)
            except RLError as error:
                self._on_failure(error)

        return check

    def close(self) -> None:
        """Deliver no more events, wait for running callbacks, then end the subscribers' threads."""
        self._stop_flag.set()
        self._queue.put(NullAction())  # wakes the queue's thread, which checks the flag every 0.1 s
        self._queue_thread.join()
        for pools in self._thread_pools.values():
            for pool in pools.values():
                # OpenHands' ``close`` stops a subscriber's event loop even while a callback runs on it.
                pool.shutdown(wait=True)
        super().close()


class SessionMemory(Memory):
    """OpenHands' memory without the microagents in the user's home, which are not part of a task."""

    def _load_user_microagents(self) -> None:
        return None


# Condensers that ask a model.
_ASKING = frozenset({"llm", "llm_attention", "structured"})


def controller_config(settings: RLSettings, options: HostOptions, episode: Session | None = None) -> OpenHandsConfig:
    """A configuration for the model server of ``[rl.serving]`` and a workspace.

    The served model, limits and sampling are those of ``episode``, by default those of the settings. OpenHands'
    iteration limit only backs up the episode's own turn limit; an agent other than ``RLAgent`` has no other limit.
    ``RLAgent`` sets the sampling of each call itself. Raises ``ConfigError`` for an LLM or a condenser that OpenHands
    refuses.
    """
    model, limits, sampling = settings.serving.model, settings.limits(), settings.sampling_params()
    if episode is not None:
        model, limits = episode.request.served_model or model, episode.limits
        sampling = episode.sampling_for(None, 0)
    # OpenHands sends these with every call: it drops an ``extra_body`` that a call has of its own.
    extra = altering_parameters({name: getattr(sampling, name) for name in NEUTRAL_PARAMETERS})
    llm = make_llm(
        LLMConfig,
        llm_settings(settings, options, model, limits),
        temperature=settings.sampling.temperature if sampling.temperature is None else sampling.temperature,
        top_p=sampling.top_p or settings.sampling.top_p,
        seed=sampling.seed,
        modify_params=False,
        completion_kwargs={"extra_body": extra} if extra else None,
    )
    kind = str(options.condenser.get("type", "noop"))
    asks = {"llm_config": llm} if kind in _ASKING else {}
    try:
        condenser = create_condenser_config(kind, {**options.condenser, **asks})
    except ValueError as error:
        raise ConfigError(f"condenser {options.condenser}: {describe(error)}") from error
    config = AgentConfig(
        enable_browsing=False,
        enable_jupyter=False,
        enable_mcp=False,
        enable_plan_mode=False,
        enable_stuck_detection=options.stuck_detection,
        enable_history_truncation=False,
        condenser=condenser,
    )
    return OpenHandsConfig(
        llms={"llm": llm},
        agents={"agent": config, options.agent: config.model_copy(deep=True)},
        default_agent=options.agent,
        workspace_base=str(options.folder) if options.folder is not None else None,
        runtime=WORKSPACE_RUNTIME,
        file_store="memory",
        enable_browser=False,
        max_iterations=limits.max_turns * ITERATIONS_A_TURN + 2 if options.agent == RL_AGENT else limits.max_turns,
        sandbox=SandboxConfig(timeout=options.command_timeout),
    )
