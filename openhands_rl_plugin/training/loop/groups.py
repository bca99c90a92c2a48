"""Rolls out groups of episodes, each on the newest weights at its start, and retries infrastructure failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, FailureKind, Trajectory
from openhands_rl_plugin.rollout.many import RolloutPlan
from openhands_rl_plugin.training.loop.plan import LoopPlan
from openhands_rl_plugin.training.loop.rollout_buffer import Group, ThroughputMeter
from openhands_rl_plugin.training.loop.server_outage import OutageTolerantRunner, OutageTolerantServer

_RETRIES = 2  # as many as OPENHANDS_RL_RETRIES has by default: a third failure in a row is seldom chance
_BACKOFF = Backoff(first=0.5, longest=10.0)  # short: waiting for a server that is down is done in server_outage


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
