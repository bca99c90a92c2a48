"""``AgentRuntime``: serves a trained policy with the rollout code, the tools and the limits of its training."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence

from openhands_rl_plugin.apps.endpoint.events import AgentEvent, AgentResult, Answer, Stopped
from openhands_rl_plugin.apps.endpoint.streaming import TextStreamingEngine
from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.protocols import LLMEngine, Strategy, TrajectoryStorage
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Limits,
    Message,
    PolicyRef,
    SamplingParams,
    StrategySpec,
    Task,
)
from openhands_rl_plugin.environments.tools.environment import ToolBase, ToolEnvironment, ToolListener, ToolOptions
from openhands_rl_plugin.models.engines.seeded import SeededEngine, merge_sampling
from openhands_rl_plugin.rollout.session import AgentSession
from openhands_rl_plugin.rollout.strategies.react import StandardReActStrategy

DEFAULT_LIMITS = Limits(max_turns=32, max_response_length=2048, timeout=600.0)
_REACT = StrategySpec(name="StandardReAct")


class AgentRuntime:
    """Answers conversations with a policy and tools.

    Args:
        engine: the policy.
        tools: beside, or in place of, those that ``options.tools`` names; ``None`` takes the latter. A tool that keeps
            a state belongs into the options, by name: what is given here is shared by all conversations.
        policy: what the engine samples from, for the records.
        options: of the ``ToolEnvironment``.
        limits: of one request. ``max_response_length`` bounds each of the model's answers.
        sampling: defaults for parameters that a request leaves unset.
        make_strategy, strategy_spec: how a turn is decided, ReAct by default. Only ReAct's answers are streamed: others
            look at answers that are never given.
        storage: where every conversation is recorded, under ``run_id``; nowhere by default. Stays open.
    """

    def __init__(
        self,
        engine: LLMEngine,
        tools: Sequence[ToolBase] | None = None,
        *,
        policy: PolicyRef,
        options: ToolOptions | None = None,
        limits: Limits = DEFAULT_LIMITS,
        sampling: SamplingParams | None = None,
        make_strategy: Callable[[], Strategy] | None = None,
        strategy_spec: StrategySpec = _REACT,
        storage: TrajectoryStorage | None = None,
        run_id: str = "agent",
    ) -> None:
        self.policy = policy
        self._engine = engine
        self._tools = tools
        self._options = options or ToolOptions()
        self._limits = limits
        self._sampling = sampling or SamplingParams()
        self._make_strategy = make_strategy
        self._spec = strategy_spec
        self._storage = storage
        self._run_id = run_id
        # Invalid tools fail here, not in the first request.
        self._environment()

    async def run(
        self, messages: Sequence[Message], *, sampling: SamplingParams | None = None, name: str = ""
    ) -> AgentResult:
        """Answer a conversation. ``sampling`` holds the request's own wishes; its ``seed`` is that of an episode.

        ``name`` identifies the recorded episode and must be new; one is made up by default. Failures are part of the
        result; raises ``StorageError``.
        """
        return await self._run_episode(messages, sampling, name, self._environment(), self._engine)

    async def stream(
        self, messages: Sequence[Message], *, sampling: SamplingParams | None = None, name: str = ""
    ) -> AsyncIterator[AgentEvent]:
        """As ``run``, but yields events while the agent works. Closing the iterator ends the episode."""
        events: asyncio.Queue[AgentEvent | None] = asyncio.Queue()
        environment = self._environment(events.put_nowait)
        text_engine = None
        if environment.speaks and self._make_strategy is None:
            text_engine = TextStreamingEngine(self._engine, environment, events.put_nowait)
        episode = asyncio.create_task(
            self._run_episode(
                messages, sampling, name, environment, text_engine if text_engine is not None else self._engine
            )
        )
        episode.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            yield _last(episode.result(), text_engine)
        finally:
            episode.cancel()
            await asyncio.wait({episode})

    def _environment(self, listener: ToolListener | None = None) -> ToolEnvironment:
        return ToolEnvironment(self._options, tools=self._tools, listener=listener)

    async def _run_episode(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None,
        name: str,
        environment: ToolEnvironment,
        engine: LLMEngine,
    ) -> AgentResult:
        name = name or uuid.uuid4().hex
        wanted = sampling or SamplingParams()
        session = AgentSession(
            environment=environment,
            strategy=self._make_strategy() if self._make_strategy is not None else StandardReActStrategy(),
            strategy_spec=self._spec,
            engine=SeededEngine(engine, self._merged(wanted), wanted.seed),
            policy=self.policy,
            limits=self._limits,
            storage=self._storage,
        )
        task = Task(id=name, environment="tools", data={"messages": [to_wire(message) for message in messages]})
        trajectory = await session.run(EpisodeRequest(task=task, run_id=self._run_id, group_id=name, sampling=wanted))
        answer = trajectory.evidence.get("answer")
        if not isinstance(answer, str) or trajectory.failure is not None:
            answer = None
        return AgentResult(answer=answer, trajectory=trajectory)

    def _merged(self, wanted: SamplingParams) -> SamplingParams:
        """The request's parameters over the runtime's defaults; ``max_tokens`` is bounded by the limits."""
        bound = self._limits.max_response_length
        merged = merge_sampling(wanted, self._sampling)
        return merged.model_copy(update={"max_tokens": min(merged.max_tokens or bound, bound)})


def _last(result: AgentResult, text_engine: TextStreamingEngine | None) -> Answer | Stopped:
    if result.answer is None:
        return Stopped(reason=result.stop, result=result)
    streamed = text_engine is not None and text_engine.streamed_text == result.answer
    return Answer(text=result.answer, result=result, streamed=streamed)
