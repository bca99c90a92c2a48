"""Rolls out groups of episodes: of which tasks, on which weights, how far ahead of training, and what is retried.

A group is all episodes of one task that are compared with each other. ``DifficultyPool`` draws its task,
``GroupRunner`` rolls it out on the newest weights, ``RolloutBuffer`` bounds how many are ahead of the training, and
``OutageTolerantServer`` waits for a model server that is away.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import InfrastructureError, PublishError
from openhands_rl_plugin.core.protocols import EpisodeRunner, TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Adapter, EpisodeRequest, FailureKind, Probe, Task, Trajectory
from openhands_rl_plugin.models.engines.client import ServerError
from openhands_rl_plugin.rollout.many import RolloutPlan, play_until_valid
from openhands_rl_plugin.training.loop.plan import LoopPlan, iteration_name

if TYPE_CHECKING:
    from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher, PublishReport


_OUTAGE_BACKOFF = Backoff(first=0.5, longest=15.0)  # short compared with the time that a server needs to load a model
_MODEL_SERVER = frozenset({FailureKind.INFRASTRUCTURE, FailureKind.MODEL})
"""A version that a server has unloaded, or lost in a restart, is refused as unknown: a failure of the model."""


class OutageTolerantServer:
    """The server of a publisher. ``patience`` is in seconds.

    ``tell`` is called with the cause of a wait, and with ``""`` at its end.

    A restarted server has lost its adapters, so the health check publishes the version in use again. While only the
    base model is in use, any response is enough.
    """

    def __init__(self, publisher: AdapterPublisher, patience: float, tell: Callable[[str], None]) -> None:
        self._publisher = publisher
        self._patience = patience
        self._tell = tell
        self._adapter: Adapter | None = None
        self._turn = asyncio.Lock()

    async def publish(self, adapter: Adapter, probe: Probe | None = None) -> PublishReport:
        """As ``AdapterPublisher.publish``, as soon as the server is available.

        Raises ``InfrastructureError`` when it is unavailable for longer than ``patience``, ``PublishError`` when the
        server refuses.
        """
        async with self._turn:
            report = await self._answer(lambda: self._publisher.publish(adapter, probe))
            self._adapter = adapter
            return report

    async def check(self) -> None:
        """Wait until it responds and has the version in use loaded, if there is one. Raises as ``publish`` does."""
        async with self._turn:
            if (adapter := self._adapter) is None:
                await self._answer(self._publisher.loaded)
            else:
                await self._answer(lambda: self._publisher.publish(adapter))

    async def _answer[T](self, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of ``ask``, retried until the server responds."""
        deadline, failures = time.monotonic() + self._patience, 0
        while True:
            try:
                answer = await ask()
            except PublishError as error:
                if not isinstance(error.__cause__, ServerError):
                    raise
                left = deadline - time.monotonic()
                if left <= 0:
                    raise InfrastructureError(
                        f"the model server was unavailable for {self._patience:g} s ([rl.loop] patience): {error}. "
                        "Episodes and trained weights are kept: start the server, then the same command again"
                    ) from error
                self._tell(str(error))
                failures += 1
                await _OUTAGE_BACKOFF.wait(failures, at_most=left)
            else:
                if failures:
                    self._tell("")
                return answer


class OutageTolerantRunner:
    """An ``EpisodeRunner`` that returns an episode that failed because of the server after the outage."""

    def __init__(self, runner: EpisodeRunner, server: OutageTolerantServer) -> None:
        self._runner = runner
        self._server = server

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run one episode. Raises ``InfrastructureError`` when the server stays unavailable."""
        trajectory = await self._runner.run(request)
        if trajectory.failure is not None and trajectory.failure.kind in _MODEL_SERVER:
            await self._server.check()
        return trajectory


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
        self._limit = limit
        self._room = asyncio.Semaphore(limit - held)
        self._finished: asyncio.PriorityQueue[tuple[int, Group]] = asyncio.PriorityQueue()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Roll out as tasks of ``tasks`` until ``stop``; an error in one of them cancels all."""
        self._producer = tasks.create_task(self._produce(tasks))

    def stop(self) -> None:
        """Start no more groups. When the last batch is closed, none is in progress."""
        self._producer.cancel()

    async def take(self) -> Group:
        """Wait for a finished group; the oldest one."""
        return (await self._finished.get())[1]

    def close(self, groups: int, limit: int | None = None) -> None:
        """Close ``groups`` of the returned groups; from now on at most ``limit`` may be open."""
        limit = self._limit if limit is None else limit
        for _ in range(groups + limit - self._limit):
            self._room.release()
        self._limit = limit

    async def _produce(self, tasks: asyncio.TaskGroup) -> None:
        for number in self._numbers:
            await self._room.acquire()
            tasks.create_task(self._finish(number))

    async def _finish(self, number: int) -> None:
        self._finished.put_nowait((number, await self._play(number)))


class DifficultyPool:
    """Draws training tasks in their order, around and around, and passes over those that are too hard or too easy.

    The difficulty of a task is the success rate of its newest attempts, which ``note`` collects: the task is drawn
    while that lies within ``bounds``, and while it has fewer than ``_LEAST_ATTEMPTS`` of them. Where fewer tasks than
    ``enough`` are left, every task is drawn again, as a policy that has changed may fare otherwise.
    """

    def __init__(self, tasks: Sequence[Task], bounds: tuple[float, float], *, newest: int, enough: int) -> None:
        self._tasks = deque(tasks)
        self._low, self._high = bounds
        self._newest = max(newest, _LEAST_ATTEMPTS)
        self._enough = enough
        self._attempts: dict[str, dict[str, bool]] = {task.id: {} for task in tasks}

    def note(self, task: str, episode: str, success: bool) -> None:
        """An attempt at the task of that id, newer than those before; one of another task does not count."""
        self._attempts.get(task, {})[episode] = success

    def draw(self) -> Task:
        """The next task."""
        fitting = {task.id for task in self._tasks if self._fits(task.id)}
        if len(fitting) < self._enough:
            fitting = self._attempts.keys()
        while True:
            self._tasks.append(task := self._tasks.popleft())
            if task.id in fitting:
                return task

    def drawn(self, task: Task) -> None:
        """An earlier process drew it: all others come before it."""
        self._tasks.remove(task)
        self._tasks.append(task)

    def _fits(self, task: str) -> bool:
        newest = [*self._attempts[task].values()][-self._newest :]
        return len(newest) < _LEAST_ATTEMPTS or self._low <= sum(newest) / len(newest) <= self._high


_LEAST_ATTEMPTS = 4  # fewer say little: of two attempts at a task of even odds, both fare alike half of the time


class GroupRunner:
    """Rolls out groups by number, under the name of the iteration that they are begun for.

    ``newest`` returns the weights that an episode starts on. All groups together run ``[rl] max_workers`` episodes at a
    time.
    """

    def __init__(
        self,
        plan: LoopPlan,
        runner: OutageTolerantRunner,
        storage: TrajectoryStorage,
        newest: Callable[[], str],
        pool: DifficultyPool,
    ) -> None:
        self._plan, self._loop = plan, plan.settings.loop
        self._runner = runner
        self._storage = storage
        self._newest = newest
        self._pool = pool
        self._gate = asyncio.Semaphore(plan.settings.max_workers)
        self._begun: dict[int, Task] = {}

    async def look(self, reward_version: str) -> None:
        """Read which groups an earlier process has started, and how this policy fared at the tasks so far.

        Raises ``StorageError``.
        """
        runs = {f"{self._plan.run_id}/{iteration_name(index)}" for index in range(self._loop.iterations)}
        adapter = self._plan.settings.serving.adapter
        wheres = TrajectoryFilter(adapter=adapter), *(TrajectoryFilter(run_id=run) for run in runs)
        found = {each.id: each for where in wheres async for each in self._storage.summaries(where)}
        tasks = {task.id: task for task in self._plan.training}
        known = {(task.environment, task.id) for task in self._plan.training}
        ours = (each for each in found.values() if each.run_id in runs or (each.environment, each.task_id) in known)
        attempts = sorted(ours, key=lambda each: each.times.finished)
        scores = await self._storage.scores([each.id for each in attempts])
        for each in attempts:
            own = [one.reward for one in scores.get(each.id, ()) if one.reward_version == reward_version]
            reward = own[-1] if own else each.judged  # of a verdict in the evidence no score is stored
            if each.failure is None and reward is not None:
                success = self._plan.is_success(each.episode_return, each.stop, reward)
                self._pool.note(each.task_id, each.id, success)
            number, _, task = each.group_id.removeprefix(f"{each.run_id}/").partition("/")
            if each.run_id in runs and task == each.task_id:
                self._begun[int(number)] = tasks[task]
        for number in sorted(self._begun):
            self._pool.drawn(self._begun[number])

    async def play(self, number: int) -> Group:
        """The episodes of a group; stored ones are not rolled out again. Raises errors that must stop a run."""
        begun = self._begun.get(number)
        requests = self._requests(number, begun or self._pool.draw())
        stored: dict[str, Trajectory] = {}
        if begun is not None:
            where = TrajectoryFilter(run_id=requests[0].run_id, group_id=requests[0].group_id)
            stored = {trajectory.id: trajectory async for trajectory, _ in self._storage.find(where)}
        attempts = (play_until_valid(each, self, self._storage, stored, again=_MODEL_SERVER) for each in requests)
        episodes = [asyncio.ensure_future(attempt) for attempt in attempts]
        try:
            # A task group inside the loop's task group would nest the error in two exception groups.
            return Group(number, tuple(await asyncio.gather(*episodes)))
        finally:
            for episode in episodes:
                episode.cancel()

    def _requests(self, number: int, task: Task) -> tuple[EpisodeRequest, ...]:
        iteration = min(number // self._plan.batch_size, self._loop.iterations - 1)
        run_id = f"{self._plan.run_id}/{iteration_name(iteration)}"
        plan = RolloutPlan(
            run_id=f"{run_id}/{number:06d}",
            tasks=(task,),
            samples_per_task=self._loop.samples_per_task,
            sampling=self._plan.settings.sampling_params(),
            seed=self._plan.settings.sampling.seed,
        )
        return tuple(request.model_copy(update={"run_id": run_id}) for request in plan.requests())

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """One try at an episode, on the newest weights at its start."""
        async with self._gate:
            return await self._runner.run(request.model_copy(update={"served_model": self._newest()}))
