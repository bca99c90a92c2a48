"""ONE episode, by the same code for training and for production: observe, decide, act, until a limit is reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary
from openhands_rl_plugin.core.protocols import Environment, Forkable, LLMEngine, Strategy, TrajectoryStorage, info_of
from openhands_rl_plugin.core.records import EpisodeStart, trajectory_id
from openhands_rl_plugin.core.tree import ClippedWorld, DraftNode, EpisodeTree, clip
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
    FailureKind,
    JsonObject,
    Limits,
    Message,
    Observation,
    PolicyRef,
    SamplingParams,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Trajectory,
)
from openhands_rl_plugin.rollout.journal import EpisodeJournal, EpisodeSink, JournalledEngine, stored_episode


def failed_episode(
    request: EpisodeRequest,
    failure: Failure,
    *,
    strategy: StrategySpec,
    base_model: str,
    started: float,
    unfinished: Trajectory | None = None,
) -> Trajectory:
    """An episode that ended with ``failure``, with what is stored of it. ``started`` is in seconds since the epoch."""
    tree = EpisodeTree() if unfinished is None else EpisodeTree.thaw(unfinished)
    return tree.freeze(
        request,
        trajectory_id=trajectory_id(request),
        strategy=strategy,
        policy=PolicyRef.from_served_name(base_model, request.served_model or base_model),
        stop=StopReason.ERROR,
        times=Times(started=started if unfinished is None else unfinished.times.started, finished=time.time()),
        failure=failure,
    )


_Begin = Callable[[Task, Limits], Awaitable[None]]


class AgentSession:
    """Runs one episode of one environment. Single use, like the environment it owns.

    With a ``storage`` the episode is stored as it runs: a completion before it is executed, an observation before
    the next completion is requested.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        strategy: Strategy,
        strategy_spec: StrategySpec,
        engine: LLMEngine,
        policy: PolicyRef,
        limits: Limits | None = None,
        tools: Sequence[JsonObject] = (),
        storage: EpisodeSink | None = None,
    ) -> None:
        self._environment = environment
        self._strategy = strategy
        self._spec = strategy_spec
        self._engine = engine
        self._policy = policy
        self._limits = limits or Limits()
        self._storage = storage
        self._journal: EpisodeJournal | None = None
        self._given_tools = tuple(tools)
        self.tree = EpisodeTree(tools=self._offered(), clock=time.time)

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run until a limit is reached. Failures are part of the result; raises ``StorageError``."""
        start = self._start(request)
        if self._storage is not None:
            self._journal = EpisodeJournal(self._storage, start)
        return await self._run(request, start.started, self._open)

    async def resume(self, request: EpisodeRequest, unfinished: Trajectory) -> Trajectory | None:
        """Resume a stored episode of ``request``, in an environment that is brought back to its state.

        Its actions are executed again, and no stored completion is sampled again; the time limit starts again.
        ``None`` when the stored episode is not one of this session, or the environment does not answer as it did:
        then the environment is used up, and the episode has to be restarted.
        """
        start = self._start(request, unfinished.times.started)
        # The tools of an environment may be known after its reset only; ``_replay`` compares them.
        if start.model_copy(update={"tools": unfinished.tools}) != EpisodeStart.of(unfinished):
            return None
        self.tree = EpisodeTree.thaw(unfinished, clock=time.time)
        if self._storage is not None:
            self._journal = EpisodeJournal.resumed(self._storage, unfinished)
        try:
            return await self._run(request, start.started, self._replay)
        except _DivergedError:
            return None

    def _start(self, request: EpisodeRequest, started: float | None = None) -> EpisodeStart:
        return EpisodeStart.for_request(
            request,
            strategy=self._spec,
            policy=self._policy,
            tools=self.tree.tools,
            started=time.time() if started is None else started,
        )

    async def _run(self, request: EpisodeRequest, started: float, begin: _Begin) -> Trajectory:
        limits = request.task.limits or self._limits
        try:
            stop, failure = await self._play_until_stopped(request, limits, begin)
            evidence, lost = await self._gather_evidence()
        finally:
            await self._close()
        failure = failure or lost
        trajectory = self.tree.freeze(
            request,
            trajectory_id=trajectory_id(request),
            strategy=self._spec,
            policy=self._policy,
            stop=StopReason.ERROR if failure else stop,
            times=Times(started=started, finished=time.time()),
            evidence=evidence,
            failure=failure,
        )
        if self._journal is not None:
            await self._journal.end(trajectory)
        return trajectory

    async def _play_until_stopped(
        self, request: EpisodeRequest, limits: Limits, begin: _Begin
    ) -> tuple[StopReason, Failure | None]:
        try:
            try:
                async with asyncio.timeout(limits.timeout):
                    await begin(request.task, limits)
                    stop = await self._play(limits)
            except TimeoutError:
                stop = StopReason.TIMEOUT
            await self._cut()
            return stop, None
        except CaughtFailure as caught:
            return StopReason.ERROR, caught.failure

    async def _gather_evidence(self) -> tuple[JsonObject | None, Failure | None]:
        try:
            with boundary(FailureKind.ENVIRONMENT, "environment.evidence"):
                return await self._environment.evidence(), None
        except CaughtFailure as caught:
            return None, caught.failure

    async def _open(self, task: Task, limits: Limits) -> None:
        self.tree.observe(await self._reset(task, limits))
        self.tree.tools = self._offered()
        if self._journal is not None:
            self._journal.start = self._journal.start.model_copy(update={"tools": self.tree.tools})
        await self._keep()

    def _offered(self) -> tuple[JsonObject, ...]:
        return self._given_tools or info_of(self._environment).tools

    async def _replay(self, task: Task, limits: Limits) -> None:
        """Replay the actions, then execute the committed answer, which may not have been executed."""
        path = [self.tree.nodes[index] for index in self.tree.path()]
        if not path:
            return await self._open(task, limits)
        answer = await self._reset(task, limits)
        if self._offered() != self.tree.tools:
            raise _DivergedError
        at = _heard(path, 0, answer)
        while at < len(path) and path[at].executed:
            answer = await self._step(path[at].message, limits)
            if answer.reward != path[at].reward:
                raise _DivergedError
            at = _heard(path, at + 1, answer)
        self.tree.terminated, self.tree.truncated = answer.terminated, answer.truncated
        if at < len(path):
            await self._act(limits)

    async def _play(self, limits: Limits) -> StopReason:
        engine = self._engine
        live = self._environment
        world = ClippedWorld(live, limits) if isinstance(live, Forkable) else None
        if self._journal is not None:
            engine = JournalledEngine(engine, self._journal, self.tree)
        self.tree.longest_prompt = limits.max_prompt_length
        while (stop := reached(self.tree, limits)) is None:
            self.tree.turns_left = limits.max_turns - self.tree.turns
            with boundary(FailureKind.MODEL, "strategy.decide"):
                chosen = await self._strategy.decide(self.tree, engine, world)
            self.tree.commit(chosen)
            await self._keep()
            await self._act(limits)
        return stop

    async def _cut(self) -> None:
        """Ask for the reward of an episode that a limit cut, where it is paid at the end only."""
        if self.tree.terminated or self.tree.truncated or not self.tree.turns:
            return
        if self.tree.answered and (reward := await truncation_reward(self._environment)) is not None:
            self.tree.pay(reward)
            await self._keep()

    async def _act(self, limits: Limits) -> None:
        self.tree.observe(await self._step(self.tree.action, limits))
        await self._keep()

    async def _reset(self, task: Task, limits: Limits) -> Observation:
        reserve_forks(self._environment, getattr(self._strategy, "forks", 0))
        with boundary(FailureKind.ENVIRONMENT, "environment.reset"):
            return clip(await self._environment.reset(task), limits)

    async def _step(self, action: Message, limits: Limits) -> Observation:
        with boundary(FailureKind.ENVIRONMENT, "environment.step"):
            return clip(await self._environment.step(action), limits)

    async def _keep(self) -> None:
        if self._journal is not None:
            await self._journal.keep(self.tree)

    async def _close(self) -> None:
        # A failed close leaks a server-side episode but does not affect the finished one.
        with suppress(CaughtFailure), boundary(FailureKind.INFRASTRUCTURE, "environment.close"):
            await self._environment.close()


def reserve_forks(environment: Environment, forks: int) -> None:
    """Let the next ``reset`` find room for ``forks`` forks as well, where the environment's server has bounds."""
    if (reserve := getattr(environment, "reserve", None)) is not None:
        reserve(forks)


async def truncation_reward(environment: Environment) -> float | None:
    """The reward that the last action gets where a limit ends the episode after it. Raises ``CaughtFailure``."""
    if (cut_short := getattr(environment, "cut_short", None)) is None:
        return None
    with boundary(FailureKind.ENVIRONMENT, "environment.cut_short"):
        observation: Observation | None = await cut_short()
    return None if observation is None else observation.reward


class _DivergedError(Exception):
    """An environment does not answer as it did when the episode was recorded."""


def _heard(path: Sequence[DraftNode], at: int, answer: Observation) -> int:
    """Where ``path`` continues after ``answer``, which has to be what is recorded from ``at`` on."""
    end = at + len(answer.messages)
    if [node.message for node in path[at:end] if not node.sampled] != list(answer.messages):
        raise _DivergedError
    if end < len(path) and (not path[end].sampled or answer.terminated or answer.truncated):
        raise _DivergedError
    return end


def reached(tree: EpisodeTree, limits: Limits) -> StopReason | None:
    """The reason to stop now, or ``None``."""
    if tree.terminated:
        return StopReason.TERMINATED
    if tree.truncated:
        return StopReason.TRUNCATED
    if tree.turns >= limits.max_turns:
        return StopReason.MAX_TURNS
    if limits.max_prompt_length is not None and context_tokens(tree) > limits.max_prompt_length:
        return StopReason.MAX_TOKENS
    return None


def context_tokens(tree: EpisodeTree) -> int:
    """Length of the next prompt: the recorded ids where there are any, plus an estimate for the text after them."""
    return tree.prompt_length()


_REPLAYS = 2
"""An environment that answered otherwise once may have been disturbed; twice, the episode restarts."""


class NoEngine:
    """The engine of strategies that sample nothing, such as a script."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Raises ``ConfigError``: a strategy that samples needs an engine."""
        raise ConfigError("the strategy samples completions, but its runner was made without an engine")


class SessionRunner:
    """An ``EpisodeRunner`` over ``AgentSession``. The factories are called once per session, so nothing is shared.

    ``make_engine`` may be left out for a strategy that samples nothing. With a ``storage``, episodes are stored while
    they run. A finished episode that is found there is not repeated; an unfinished one is resumed if its
    environment can be brought back to the same state, else it restarts.
    """

    def __init__(
        self,
        *,
        make_environment: Callable[[EpisodeRequest], Environment],
        make_strategy: Callable[[EpisodeRequest], Strategy],
        make_engine: Callable[[EpisodeRequest], LLMEngine] | None = None,
        strategy_spec: StrategySpec,
        base_model: str,
        limits: Limits | None = None,
        storage: TrajectoryStorage | None = None,
    ) -> None:
        self._make_environment = make_environment
        self._make_strategy = make_strategy
        self._make_engine = make_engine or (lambda request: NoEngine())
        self._spec = strategy_spec
        self._base_model = base_model
        self._limits = limits
        self._storage = storage

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run one episode; a failed one comes back with ``failure`` set. Raises ``StorageError``."""
        if self._storage is not None and (stored := await stored_episode(self._storage, trajectory_id(request))):
            if stored.stop is not StopReason.UNFINISHED:
                return stored
            for _ in range(_REPLAYS):
                if (resumed := await self._session(request).resume(request, stored)) is not None:
                    return resumed
        return await self._session(request).run(request)

    async def close(self) -> None:
        """Does nothing: no resource outlives an episode."""

    def _session(self, request: EpisodeRequest) -> AgentSession:
        return AgentSession(
            environment=self._make_environment(request),
            strategy=self._make_strategy(request),
            strategy_spec=self._spec,
            engine=self._make_engine(request),
            policy=PolicyRef.from_served_name(self._base_model, request.served_model or self._base_model),
            limits=self._limits,
            storage=self._storage,
        )
