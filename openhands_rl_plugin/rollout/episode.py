"""One episode: observe, decide, act, until a limit is reached. Training and production use the same code.

``EpisodeJournal`` stores an episode while it runs, so that a killed run keeps every recorded completion.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

from pydantic import JsonValue

from openhands_rl_plugin.core.concurrency import on_loop, shielded
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, StorageError, boundary
from openhands_rl_plugin.core.protocols import (
    EnvInfo,
    Environment,
    Forkable,
    LLMEngine,
    Strategy,
    TrajectoryStorage,
    info_of,
)
from openhands_rl_plugin.core.records import (
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    NodeMark,
    TrajectoryFilter,
    trajectory_id,
)
from openhands_rl_plugin.core.tree import EpisodeTree, clip
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
    FailureKind,
    JsonObject,
    Limits,
    Message,
    Node,
    Observation,
    PolicyRef,
    SamplingParams,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Trajectory,
)

_Facts = tuple[float | None, bool, float | None, int, JsonValue]
"""The fields of a node that a mark sets: reward, simulated, value, visits, and the strategy's notes."""


def failed_episode(
    request: EpisodeRequest,
    failure: Failure,
    *,
    strategy: StrategySpec,
    base_model: str,
    started: float,
    unfinished: Trajectory | None = None,
) -> Trajectory:
    """Make a trajectory that ended with ``failure``, with the stored nodes. ``started``: seconds since the epoch."""
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


class Episode:
    """One episode while it runs: its tree, its limits, its journal and its end. Every host records into one.

    The episode is the ``LLMEngine`` of its own strategy. Without an ``engine`` the strategy cannot sample; scripted
    ones need none. ``turns`` counts the chosen completions, also malformed ones. ``error``: an error that must stop the
    whole run.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        *,
        strategy: Strategy,
        strategy_spec: StrategySpec,
        policy: PolicyRef,
        limits: Limits,
        tools: Sequence[JsonObject] = (),
        engine: LLMEngine | None = None,
    ) -> None:
        self.request = request
        self.strategy = strategy
        self.strategy_spec = strategy_spec
        self.policy = policy
        self.limits = request.task.limits or limits
        self.tree = EpisodeTree(tools=tools, clock=time.time)
        self.turns = 0
        self.stop: StopReason | None = None
        self.failure: Failure | None = None
        self.evidence: JsonObject | None = None
        self.error: StorageError | ConfigError | None = None
        self.started = self._began = time.time()
        self._engine = engine
        self._journal: EpisodeJournal | None = None

    @property
    def episode_seed(self) -> int | None:
        """The engine's seed of this episode, which a search combines with its own; ``None`` if it has none."""
        return getattr(self._engine, "episode_seed", None)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Store the nodes so far, then sample ``n`` completions.

        Raises what the engine raises, ``StorageError``, and ``ConfigError`` without an engine.
        """
        if self._engine is None:
            raise ConfigError("the strategy samples completions, but its runner was made without an engine")
        await self.keep_up()
        return await self._engine.complete(messages, tools=tools, n=n, sampling=sampling)

    def store_in(self, storage: TrajectoryStorage) -> None:
        """Store the episode while it runs."""
        self._journal = EpisodeJournal(storage, self._start())

    def resume(self, unfinished: Trajectory, storage: TrajectoryStorage | None) -> bool:
        """Continue a stored episode; its time limit starts again. returns false for another episode."""
        self.started = unfinished.times.started
        # An environment may know its tools only after the reset.
        if self._start().model_copy(update={"tools": unfinished.tools}) != EpisodeStart.of(unfinished):
            return False
        self.tree = EpisodeTree.thaw(unfinished, clock=time.time)
        if storage is not None:
            self._journal = EpisodeJournal.resumed(storage, unfinished)
        return True

    async def decide(self, world: Forkable | None) -> int:
        """Let the strategy choose the node to execute. ``world``: the live environment, if it can be forked.

        The strategy samples from this object by ``complete``, and adds each completion as a node by ``tree.propose``.

        Raises ``CaughtFailure`` if no completion can be sampled, and ``ConfigError``. Both are kept for ``freeze``.
        """
        self.failure = None
        self.tree.turns_left = self.limits.max_turns - max(self.turns, self.tree.turns)
        self.tree.longest_prompt = self.limits.max_prompt_length
        try:
            with boundary(FailureKind.MODEL, "strategy.decide"):
                chosen = await self.strategy.decide(self.tree, self, world)
        except CaughtFailure as caught:
            self.failure = caught.failure
            raise
        except ConfigError as error:
            self.refuse(error)
            raise
        self.turns += 1
        return chosen

    def refuse(self, error: ConfigError) -> None:
        """Fail the episode with an error of the settings, which also stops the run."""
        self.error = error
        self.failure = Failure(kind=FailureKind.ENVIRONMENT, message=str(error)[:500], boundary="strategy.decide")

    def observe(self, observation: Observation) -> None:
        """Add an environment's observation, cut to ``max_obs_length``."""
        self.tree.observe(clip(observation, self.limits))

    def reward_last_action(self, reward: float) -> None:
        """Add ``reward`` to the last action of an episode that a limit cut, even if the limit interrupted it."""
        if self.tree.turns:
            self.tree.add_reward(reward)

    def limit_reached(self) -> StopReason | None:
        """Why the episode is over: its environment ended it, or a limit is reached; ``None`` if it continues."""
        tree, limits = self.tree, self.limits
        if tree.terminated:
            return StopReason.TERMINATED
        if tree.truncated:
            return StopReason.TRUNCATED
        if max(self.turns, tree.turns) >= limits.max_turns:
            return StopReason.MAX_TURNS
        if limits.max_prompt_length is not None and tree.prompt_length() > limits.max_prompt_length:
            return StopReason.MAX_TOKENS
        if limits.timeout is not None and time.time() - self._began > limits.timeout:
            return StopReason.TIMEOUT
        return None

    async def keep_up(self, *, answers: bool = False) -> None:
        """Store the nodes since the last call. Raises ``StorageError``.

        ``answers``: only if a completion is among them.
        """
        if self._journal is None or (answers and not self._journal.lacks_answers(self.tree)):
            return
        try:
            await self._journal.keep(self.tree)
        except StorageError as error:
            self.error = error
            raise

    def freeze(
        self, *, stop: StopReason | None = None, failure: Failure | None = None, evidence: JsonObject | None = None
    ) -> Trajectory:
        """The episode as a trajectory. With a failure its stop reason is ``ERROR``.

        The episode's own failure takes precedence over ``failure``, because it came first. The arguments ``stop`` and
        ``evidence`` take precedence over its own.
        """
        failure = self.failure = self.failure or failure
        return self.tree.freeze(
            self.request,
            trajectory_id=trajectory_id(self.request),
            strategy=self.strategy_spec,
            policy=self.policy,
            stop=StopReason.ERROR if failure else stop or self.stop or StopReason.NO_ACTION,
            times=Times(started=self.started, finished=time.time()),
            evidence=self.evidence if evidence is None else evidence,
            failure=failure,
        )

    async def end(self, trajectory: Trajectory) -> None:
        """Close the episode in the storage, if it is stored while it runs. Raises ``StorageError``."""
        if self._journal is not None:
            await self._journal.end(trajectory)

    def _start(self) -> EpisodeStart:
        request = self.request
        return EpisodeStart(
            id=trajectory_id(request),
            run_id=request.run_id,
            group_id=request.group_id,
            task=request.task,
            strategy=self.strategy_spec,
            policy=self.policy,
            started=self.started,
        )


class RecordedFork:
    """An environment, or a fork of one, whose observations are clipped to the limits, as recorded ones are."""

    def __init__(self, environment: Any, limits: Limits) -> None:
        self._environment, self._limits = environment, limits
        self.reset, self.evidence, self.close = environment.reset, environment.evidence, environment.close

    @property
    def info(self) -> EnvInfo:
        """The info of the environment."""
        return info_of(self._environment)

    async def step(self, action: Message) -> Observation:
        """Execute a completion; the observation is cut to ``max_obs_length``."""
        return clip(await self._environment.step(action), self._limits)

    async def fork(self) -> RecordedFork:
        """A copy of the environment in its current state."""
        return RecordedFork(await self._environment.fork(), self._limits)


class LiveEnvironment:
    """One episode of one environment, for the host that steps it.

    ``failure`` is the first one. ``conclude`` sets ``evidence``, and ``owed`` if a limit cut the episode: the reward of
    the last action, from an environment that gives a reward only at the end.
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.evidence: JsonObject | None = None
        self.failure: Failure | None = None
        self.owed: float | None = None
        self._begun = self._answered = self._ended = self._closed = False
        self._concluding = asyncio.Lock()

    def world(self, limits: Limits) -> Forkable | None:
        """The environment, for a search to fork; ``None`` if it cannot be forked."""
        return RecordedFork(self.environment, limits) if isinstance(self.environment, Forkable) else None

    async def reset(self, task: Task) -> Observation:
        """Begin the episode. Raises ``CaughtFailure``."""
        self._begun = True
        return await self._met("reset", lambda: self.environment.reset(task))

    async def step(self, action: Message) -> Observation:
        """Execute a completion. Raises ``CaughtFailure``."""
        self._answered = False
        observation = await self._met("step", lambda: self.environment.step(action))
        self._answered = not (observation.terminated or observation.truncated)
        return observation

    async def conclude(self, *, cut: bool = True) -> None:
        """Collect the evidence of an episode that began, then close the environment; a second call waits for the first.

        ``cut``: whether a limit ends the episode.
        """
        async with self._concluding:
            try:
                if self._begun and not self._ended:
                    self._ended = True
                    await self._gather(cut)
            finally:
                await self.close()

    async def _gather(self, cut: bool) -> None:
        with suppress(CaughtFailure):
            cut_short = getattr(self.environment, "cut_short", None)
            if cut and self._answered and self.failure is None and cut_short is not None:
                end: Observation | None = await self._met("cut_short", cut_short)
                self.owed = None if end is None else end.reward
        with suppress(CaughtFailure):
            self.evidence = await self._met("evidence", lambda: self.environment.evidence())

    async def close(self) -> None:
        """Close the environment, once. A failed close leaks a server-side episode, but the episode stays valid."""
        closed, self._closed = self._closed, True
        if not closed:
            with suppress(CaughtFailure), boundary(FailureKind.INFRASTRUCTURE, "environment.close"):
                await self.environment.close()

    async def _met[T](self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        ended = self._ended
        try:
            with boundary(FailureKind.ENVIRONMENT, f"environment.{what}"):
                return await call()
        except CaughtFailure as caught:
            if ended == self._ended:  # otherwise the episode's end interrupted the call
                self.failure = self.failure or caught.failure
            raise


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
        engine: LLMEngine | None,
        policy: PolicyRef,
        limits: Limits | None = None,
        storage: TrajectoryStorage | None = None,
    ) -> None:
        self._live = LiveEnvironment(environment)
        self._episode = partial(
            Episode,
            strategy=strategy,
            strategy_spec=strategy_spec,
            policy=policy,
            limits=limits or Limits(),
            engine=engine,
        )
        self._storage = storage

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run until a limit is reached. Failures are part of the result; raises ``StorageError``."""
        stop, failure, live = StopReason.TIMEOUT, None, self._live
        episode = self._episode(request, tools=self._offered())
        if self._storage is not None:
            episode.store_in(self._storage)
        try:
            try:
                async with asyncio.timeout(episode.limits.timeout):
                    await self._open(episode)
                    stop = await self._roll_out(episode)
            except TimeoutError:
                pass
            except CaughtFailure as caught:
                failure = caught.failure
            await live.conclude(cut=failure is None)
        finally:
            await live.close()
        if live.owed is not None:
            episode.reward_last_action(live.owed)
        trajectory = episode.freeze(stop=stop, failure=failure or live.failure, evidence=live.evidence)
        await episode.end(trajectory)
        return trajectory

    async def _roll_out(self, episode: Episode) -> StopReason:
        while (stop := episode.limit_reached()) is None:
            episode.tree.commit(await episode.decide(self._live.world(episode.limits)))
            await episode.keep_up()
            episode.observe(await self._live.step(episode.tree.action))
            await episode.keep_up()
        return stop

    async def _open(self, episode: Episode) -> None:
        episode.observe(await self._live.reset(episode.request.task))
        episode.tree.tools = self._offered()
        await episode.keep_up()

    def _offered(self) -> tuple[JsonObject, ...]:
        return info_of(self._live.environment).tools


class SessionRunner:
    """An ``EpisodeRunner`` over ``AgentSession``. The factories are called once per session, so nothing is shared.

    ``make_engine`` may be left out for a strategy that samples nothing. With a ``storage``, episodes are stored while
    they run. A finished episode that is found there is not repeated; an unfinished one restarts.
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
        def session(request: EpisodeRequest) -> AgentSession:
            return AgentSession(
                environment=make_environment(request),
                strategy=make_strategy(request),
                strategy_spec=strategy_spec,
                engine=make_engine(request) if make_engine is not None else None,
                policy=PolicyRef.from_served_name(base_model, request.served_model or base_model),
                limits=limits,
                storage=storage,
            )

        self._session = session
        self._storage = storage

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run one episode; a failed one comes back with ``failure`` set. Raises ``StorageError``."""
        stored = await stored_episode(self._storage, trajectory_id(request)) if self._storage is not None else None
        if stored is not None and stored.stop is not StopReason.UNFINISHED:
            return stored
        return await self._session(request).run(request)


def on_its_loop(storage: TrajectoryStorage, loop: asyncio.AbstractEventLoop) -> Any:
    """A storage that calls ``storage`` on its own event loop ``loop``, whatever loop it is used on.

    A method that ``storage`` has not, such as a pipe to another process, does nothing. Raises what the storage raises,
    and ``InfrastructureError`` when that loop is closed before the call.
    """
    return _StorageOnLoop(storage, loop)


class _StorageOnLoop:
    def __init__(self, storage: TrajectoryStorage, loop: asyncio.AbstractEventLoop) -> None:
        self._storage = storage
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*given: Any) -> Any:
            if (method := getattr(self._storage, name, None)) is not None:
                return await on_loop(self._loop, method(*given))

        return call


class EpisodeJournal:
    """Stores one episode from its first node to its end. What it holds survives a crash once ``keep`` has returned.

    The episode is opened by the first write, which drops an unfinished one of the same id: its nodes are no
    part of this one. Writes run one at a time; a started one is awaited even when its caller is cancelled.
    Of stored nodes only what may change is remembered, so that a gateway may hold hundreds of long episodes.
    """

    def __init__(self, storage: TrajectoryStorage, start: EpisodeStart) -> None:
        self.start = start
        self.storage: Any = storage
        self._begun = False
        self._ended = False
        self._head: int | None = None
        # Of the stored actions; what an environment or a host added does not change.
        self._facts: dict[int, _Facts] = {}
        # A digest of what each stored node's metadata says.
        self._noted: list[int] = []
        self._turn = asyncio.Lock()

    @classmethod
    def resumed(cls, storage: TrajectoryStorage, unfinished: Trajectory) -> Self:
        """The journal of an episode that continues after the nodes that are stored."""
        journal = cls(storage, EpisodeStart.of(unfinished))
        journal._begun = True
        journal._remember(unfinished.nodes, (), unfinished.head)
        return journal

    def lacks_answers(self, tree: EpisodeTree) -> bool:
        """Whether an answer of ``tree`` is not stored, or the episode is not open yet."""
        return not self._begun or any(node.sampled for node in tree.nodes[len(self._noted) :])

    async def keep(self, tree: EpisodeTree) -> None:
        """Store the nodes and marks that came since the last call; nothing after ``end``. Raises ``StorageError``."""
        await shielded(self._keep(tree))

    async def end(self, trajectory: Trajectory) -> None:
        """Store what is left of the frozen episode and close it. Raises ``StorageError``."""
        await shielded(self._close(trajectory))

    async def _keep(self, tree: EpisodeTree) -> None:
        async with self._turn:
            if self._ended:
                return
            if not self._begun:
                await self.storage.drop((self.start.id,))
                await self.storage.begin(self.start.model_copy(update={"tools": tree.tools or self.start.tools}))
                self._begun = True
            marks = self._changes(tree.nodes)
            new = tree.nodes[len(self._noted) :]
            if new or marks or tree.head != self._head:
                await self._grow(tuple(Node(**vars(node)) for node in new), marks, tree.head)

    async def _close(self, trajectory: Trajectory) -> None:
        async with self._turn:
            # No growth can express what a host noted on an earlier node: then the episode is stored again as a whole.
            known = [_digest(node) for node in trajectory.nodes[: len(self._noted)]]
            if not self._begun or self._noted != known:
                await self.storage.add(trajectory)
            else:
                marks, nodes = self._changes(trajectory.nodes), trajectory.nodes[len(known) :]
                if marks or nodes:
                    await self._grow(nodes, marks, trajectory.head)
                await self.storage.end(EpisodeEnd.of(trajectory))
            self._ended = True

    async def _grow(self, nodes: tuple[Node, ...], marks: tuple[NodeMark, ...], head: int | None) -> None:
        first = len(self._noted)
        await self.storage.grow(
            EpisodeGrowth(trajectory_id=self.start.id, first=first, nodes=nodes, head=head, marks=marks)
        )
        self._remember(nodes, marks, head)

    def _changes(self, nodes: Sequence[Node]) -> tuple[NodeMark, ...]:
        """Marks for the stored actions that are not any more as they were stored."""
        return tuple(_mark(at, now) for at, was in self._facts.items() if (now := _facts(nodes[at])) != was)

    def _remember(self, nodes: Sequence[Node], marks: Sequence[NodeMark], head: int | None) -> None:
        for mark in marks:
            search = self._facts[mark.index][-1] if mark.search is None else mark.search
            self._facts[mark.index] = mark.reward, mark.simulated, mark.value, mark.visits, search
        self._facts |= {at: _facts(node) for at, node in enumerate(nodes, len(self._noted)) if node.sampled}
        self._noted += map(_digest, nodes)
        self._head = head


async def stored_episode(storage: TrajectoryStorage, trajectory_id: str) -> Trajectory | None:
    """A stored episode, finished or not; ``None`` if unknown, or in a write-only storage. Raises ``StorageError``."""
    find: Any = getattr(storage, "find", None)
    if find is None:
        return None
    where = TrajectoryFilter(ids=(trajectory_id,), finished=None)
    return next(iter([found async for found, _ in find(where)]), None)


def _digest(node: Node) -> int:
    """A hash of the node's metadata that a host may change, without that of search."""
    return hash(repr({name: value for name, value in node.metadata.items() if name != "search"}))


def _facts(node: Node) -> _Facts:
    return node.reward, node.simulated, node.value, node.visits, node.metadata.get("search")


def _mark(index: int, facts: _Facts) -> NodeMark:
    reward, simulated, value, visits, search = facts
    return NodeMark(index=index, reward=reward, simulated=simulated, value=value, visits=visits, search=search)
