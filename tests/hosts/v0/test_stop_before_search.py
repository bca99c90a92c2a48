"""A user who stops the agent while it gets ready for a search, and who sets it running again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from needs import needs_bubblewrap
from openhands.controller.state.state import State
from openhands.core.schema import AgentState
from openhands.core.setup import create_agent
from openhands.events import EventSource
from openhands.events.action import ChangeAgentStateAction, MessageAction
from openhands.events.event import Event
from openhands.llm.llm_registry import LLMRegistry
from openhands.memory.condenser.impl.no_op_condenser import NoOpCondenser
from openhands.memory.view import View
from openhands.server.services.conversation_stats import ConversationStats
from scripted_model import ScriptedModel, call, says, serve

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.types import EpisodeRequest, StrategySpec, Task
from openhands_rl_plugin.hosts.shared.episode import HostEpisode, bind_episode
from openhands_rl_plugin.hosts.shared.options import HostOptions
from openhands_rl_plugin.hosts.v0.controller_session import (
    SessionController,
    SessionEventStream,
    SessionMemory,
    controller_config,
)
from openhands_rl_plugin.hosts.v0.runtime import WorkspaceRuntime
from openhands_rl_plugin.hosts.v0.session_state import is_stop

pytestmark = needs_bubblewrap

SID = "stopped-before-search"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        model.policies["finisher"] = lambda body: says(None, call("finish", {"message": "done"}, f"id{body['seed']}"))
        yield model


class HearingRuntime(WorkspaceRuntime):
    """Tells when it has heard a stop."""

    heard = threading.Event()

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if is_stop(event):
            self.heard.set()


class StoppingCondenser(NoOpCondenser):
    """The user stops the agent while it condenses for the first time, and the runtime hears it at once."""

    def __init__(self, stream: SessionEventStream) -> None:
        super().__init__()
        self._stream = stream
        self._stopped = False

    def condensed_history(self, state: State) -> View:
        if not self._stopped:
            self._stopped = True
            self._stream.add_event(ChangeAgentStateAction(AgentState.STOPPED), EventSource.USER)
            assert HearingRuntime.heard.wait(20)
        return super().condensed_history(state)


def bound(server: ScriptedModel) -> HostEpisode:
    options = {"n": 2, "seed": 3}
    return HostEpisode(
        EpisodeRequest(task=Task(id="t", environment="workspace", instruction="Finish."), run_id="r", group_id="g"),
        RLSettings(serving=ServingSettings(base_url=server.url, model="finisher", request_timeout=20.0)),
        strategy=registry.build("strategies", "BestOfN", options),
        strategy_spec=StrategySpec(name="BestOfN", options=options),
        base_model="finisher",
        environment_mode=False,
    )


def test_the_search_that_would_follow_does_not_begin_and_the_next_one_does(server: ScriptedModel):
    states: list[AgentState] = []
    stands: dict[AgentState, threading.Event] = {state: threading.Event() for state in AgentState}

    def on_state(state: AgentState) -> None:
        states.append(state)
        stands[state].set()

    episode = bound(server)
    config = controller_config(episode.settings, HostOptions(environment_mode=False))
    with bind_episode(episode):
        llms = LLMRegistry(config)
        agent = create_agent(config, llms)
        stream = SessionEventStream(SID, lambda failure: pytest.fail(str(failure)))
        agent.condenser = StoppingCondenser(stream)
        runtime = HearingRuntime(config=config, event_stream=stream, llm_registry=llms, sid=SID, headless_mode=True)
    asyncio.run(runtime.connect())
    memory = SessionMemory(stream, SID, lambda failure: pytest.fail(str(failure)))
    memory.set_runtime_info(runtime, {}, str(runtime.workspace_root))
    SessionController(
        agent=agent,
        conversation_stats=ConversationStats(None, SID, None),
        iteration_delta=config.max_iterations,
        event_stream=stream,
        on_state=on_state,
    )
    try:
        stream.add_event(MessageAction(content="Finish."), EventSource.USER)
        assert stands[AgentState.STOPPED].wait(60)
        assert not [node for node in episode.tree.nodes if node.sampled]
        stream.add_event(MessageAction(content="Go on."), EventSource.USER)
        assert stands[AgentState.FINISHED].wait(60)
        assert [node for node in episode.tree.nodes if node.sampled]
        assert states == [AgentState.RUNNING, AgentState.STOPPED, AgentState.RUNNING, AgentState.FINISHED]
    finally:
        runtime.close()
        stream.close()
