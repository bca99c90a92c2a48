"""Rolls out groups of episodes, each on the newest weights at its start, and retries infrastructure failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import httpx

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import InfrastructureError, PublishError
from openhands_rl_plugin.core.protocols import EpisodeRunner, TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, trajectory_id
from openhands_rl_plugin.core.types import Adapter, EpisodeRequest, FailureKind, Probe, Trajectory
from openhands_rl_plugin.rollout.many import RolloutPlan
from openhands_rl_plugin.training.loop.plan import LoopPlan

if TYPE_CHECKING:
    from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher, PublishReport


_OUTAGE_BACKOFF = Backoff(first=0.5, longest=15.0)  # short beside the time that a server needs to load a model
_MODEL_SERVER = frozenset({FailureKind.INFRASTRUCTURE, FailureKind.MODEL})


class OutageTolerantServer:
    """The server of a publisher. ``patience`` is in seconds.

    ``tell`` is called with the cause of a wait, and with ``""`` at its end.

    A restarted server has lost its adapters, so the health check publishes the version in use again. While only the
    base model is in use, any response is enough.
    """

    def __init__(self, publisher: AdapterPublisher, patience: float, tell: Callable[[str], None]) -> None:
        self.outages = 0
        """Number of outages so far."""
        self._publisher = publisher
        self._patience = patience
        self._tell = tell
        self._adapter: Adapter | None = None
        self._there = asyncio.Event()
        self._there.set()
        self._turn = asyncio.Lock()
        self._checked = -1.0

    async def publish(self, adapter: Adapter, probe: Probe | None = None) -> PublishReport:
        """As ``AdapterPublisher.publish``, as soon as the server is available.

        Raises ``InfrastructureError`` when it is unavailable for longer than ``patience``, ``PublishError`` when the
        server refuses.
        """
        async with self._turn:
            report = await self._answer(lambda: self._publisher.publish(adapter, probe))
            self._adapter = adapter
            return report

    async def available(self) -> None:
        """Return at once unless the server is known to be unavailable; then wait for it."""
        await self._there.wait()

    async def check(self) -> None:
        """Wait until it responds and has the version in use loaded, if there is one. Raises as ``publish`` does."""
        asked = time.monotonic()
        async with self._turn:
            # Another caller may have checked while this one waited for the lock.
            if self._checked >= asked:
                return
            started = time.monotonic()
            if (adapter := self._adapter) is None:
                await self._answer(self._publisher.loaded)
            else:
                await self._answer(lambda: self._publisher.publish(adapter))
            self._checked = started

    async def _answer[T](self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of ``ask``, retried until the server responds."""
        deadline, failures = time.monotonic() + self._patience, 0
        while True:
            try:
                answer = await ask()
            except PublishError as error:
                if not isinstance(error.__cause__, httpx.TransportError | httpx.HTTPStatusError):
                    raise
                self._note_away(str(error))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise InfrastructureError(
                        f"the model server was unavailable for {self._patience:g} s ([rl.loop] patience): {error}. "
                        "Episodes and trained weights are kept: start the server, then the same command again"
                    ) from error
                failures += 1
                await _OUTAGE_BACKOFF.wait(failures, at_most=left)
            else:
                if not self._there.is_set():
                    self._there.set()
                    self._tell("")
                return answer

    def _note_away(self, why: str) -> None:
        if self._there.is_set():
            self._there.clear()
            self.outages += 1
        self._tell(why)


class OutageTolerantRunner:
    """An ``EpisodeRunner`` that starts no episode during an outage.

    An episode that failed because of the server is returned after the outage.
    """

    def __init__(self, runner: EpisodeRunner, server: OutageTolerantServer) -> None:
        self._runner = runner
        self._server = server

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run one episode. Raises ``InfrastructureError`` when the server stays unavailable."""
        await self._server.available()
        trajectory = await self._runner.run(request)
        if trajectory.failure is not None and trajectory.failure.kind in _MODEL_SERVER:
            await self._server.check()
        return trajectory

    async def close(self) -> None:
        """Close the wrapped runner."""
        await self._runner.close()


@dataclass(frozen=True)
class Group:
    """The episodes of one task that are compared with each other; ``number`` counts the groups of a run."""

    number: int
    trajectories: tuple[Trajectory, ...]


class RolloutBuffer:
    """Rolls out groups concurrently and returns finished ones, the oldest first.

    ``held``: the number of groups that were returned before. A group is open from its start until ``close``, which is
    called for the groups of a batch when the weights trained on it are in use. So with a ``limit`` of ``(max_staleness
    + 1)`` batches an episode that starts now is at most ``max_staleness`` versions old when it is trained on, unless
    others overtake it.
    """

    def __init__(
        self, play: Callable[[int], Awaitable[Group]], *, used: Collection[int], held: int, limit: int
    ) -> None:
        self._play = play
        self._numbers = (number for number in count() if number not in used)
        self._open = held
        self._limit = limit
        self._finished: dict[int, Group] = {}
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Roll out as tasks of ``tasks`` until ``stop``; an error in one of them cancels all."""
        self._spawn(tasks, self._produce(tasks))

    def stop(self) -> None:
        """Cancel the rollouts in progress; their turns so far are stored."""
        for task in self._tasks:
            task.cancel()

    async def take(self) -> Group:
        """Wait for a finished group; the oldest one."""
        while not self._finished:
            self._more.clear()
            await self._more.wait()
        return self._finished.pop(min(self._finished))

    def close(self, groups: int, limit: int | None = None) -> None:
        """Close ``groups`` of the returned groups; from now on at most ``limit`` may be open."""
        self._open -= groups
        self._limit = self._limit if limit is None else limit
        self._room.set()

    async def _produce(self, tasks: asyncio.TaskGroup) -> None:
        for number in self._numbers:
            while self._open >= self._limit:
                self._room.clear()
                await self._room.wait()
            self._open += 1
            self._spawn(tasks, self._finish(number))

    async def _finish(self, number: int) -> None:
        self._finished[number] = await self._play(number)
        self._more.set()

    def _spawn(self, tasks: asyncio.TaskGroup, work: Awaitable[None]) -> None:
        task = tasks.create_task(_awaited(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class ThroughputMeter:
    """Throughput of the rollout slots."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._busy = 0
        self._finished = 0
        self._worked = 0.0
        self._since = self._start = time.monotonic()

    @contextmanager
    def episode(self) -> Iterator[None]:
        """Occupy one slot during the block; count an episode unless the block raises."""
        self._change(1)
        try:
            yield
            self._finished += 1
        finally:
            self._change(-1)

    def read(self) -> dict[str, float]:
        """Episodes per hour and the share of idle slots, since the last reading."""
        self._change(0)
        seconds = max(self._since - self._start, 1e-9)
        figures = {
            "rollouts_an_hour": 3600 * self._finished / seconds,
            "rollouts_waiting_share": 1 - self._worked / (seconds * self._places),
        }
        self._finished, self._worked, self._start = 0, 0.0, self._since
        return figures

    def _change(self, by: int) -> None:
        now = time.monotonic()
        self._worked += self._busy * (now - self._since)
        self._since = now
        self._busy += by


async def _awaited(work: Awaitable[None]) -> None:
    await work


_RETRIES = 2  # as many as OPENHANDS_RL_RETRIES has by default: a third failure in a row is seldom chance
_BACKOFF = Backoff(first=0.5, longest=10.0)  # short: waiting for a server that is down is done above


class GroupRunner:
    """Rolls out groups by number: group n is of training task n modulo their count.

    ``newest`` returns the weights that an episode starts on. All groups together use ``plan.concurrency`` slots.
    """

    def __init__(
        self,
        plan: LoopPlan,
        runner: OutageTolerantRunner,
        storage: TrajectoryStorage,
        server: OutageTolerantServer,
        newest: Callable[[], str],
    ) -> None:
        self.run_id = f"{plan.run_id}/rollouts"
        self.meter = ThroughputMeter(plan.concurrency)
        self._plan = plan
        self._runner = runner
        self._storage = storage
        self._server = server
        self._newest = newest
        self._gate = asyncio.Semaphore(plan.concurrency)
        self._begun: frozenset[str] = frozenset()

    async def look(self) -> None:
        """Read which groups an earlier process has started. Raises ``StorageError``."""
        where = TrajectoryFilter(run_id=self.run_id)
        self._begun = frozenset([summary.group_id async for summary in self._storage.summaries(where)])

    async def play(self, number: int) -> Group:
        """The episodes of a group; stored ones are not rolled out again. Raises errors that must stop a run."""
        requests = self._requests(number)
        stored: dict[str, Trajectory] = {}
        if (group_id := requests[0].group_id) in self._begun:
            where = TrajectoryFilter(run_id=self.run_id, group_id=group_id)
            stored = {trajectory.id: trajectory async for trajectory, _ in self._storage.find(where)}
        episodes = (self._play_until_valid(request, stored) for request in requests)
        # A task group inside the loop's task group would nest the error in two exception groups.
        return Group(number, tuple(await _all(*(asyncio.ensure_future(each) for each in episodes))))

    def _requests(self, number: int) -> tuple[EpisodeRequest, ...]:
        task = self._plan.training[number % len(self._plan.training)]
        plan = RolloutPlan(
            run_id=f"{self.run_id}/{number:06d}",
            tasks=(task,),
            samples_per_task=self._plan.samples_per_task,
            sampling=self._plan.sampling,
            seed=self._plan.seed,
        )
        return tuple(request.model_copy(update={"run_id": self.run_id}) for request in plan.requests())

    async def _play_until_valid(self, request: EpisodeRequest, stored: dict[str, Trajectory]) -> Trajectory:
        last, attempts = _last_stored(request, stored)
        # Retries are counted per process: an episode that failed in an earlier one is tried again.
        if last is not None and not _failed_for(last, FailureKind.INFRASTRUCTURE):
            return last
        failed = 0
        while True:
            request = request.model_copy(update={"attempt": attempts})
            if failed:
                await _BACKOFF.wait(failed)
            outages = self._server.outages
            trajectory, asked = await self._play(request)
            excused = self._server.outages != outages
            # The server refuses a version that it has unloaded, or lost in a restart, as unknown.
            outdated = (excused or asked != self._newest()) and _failed_for(trajectory, FailureKind.MODEL)
            if not (outdated or _failed_for(trajectory, FailureKind.INFRASTRUCTURE)):
                return trajectory
            failed += not excused
            if failed > _RETRIES:
                return trajectory
            attempts += 1

    async def _play(self, request: EpisodeRequest) -> tuple[Trajectory, str]:
        async with self._gate:
            await self._server.available()
            newest = self._newest()
            with self.meter.episode():
                trajectory = await self._runner.run(request.model_copy(update={"served_model": newest}))
            await self._storage.add(trajectory)
        return trajectory, newest


def _last_stored(request: EpisodeRequest, stored: dict[str, Trajectory]) -> tuple[Trajectory | None, int]:
    """The last stored attempt, and the number of stored attempts."""
    last, attempt = None, 0
    while (found := stored.get(trajectory_id(request.model_copy(update={"attempt": attempt})))) is not None:
        last, attempt = found, attempt + 1
    return last, attempt


def _failed_for(trajectory: Trajectory, kind: FailureKind) -> bool:
    return trajectory.failure is not None and trajectory.failure.kind is kind


async def _all[T](*tasks: asyncio.Task[T] | asyncio.Future[T]) -> list[T]:
    """All results, or the first error, after which the other tasks are cancelled."""
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
