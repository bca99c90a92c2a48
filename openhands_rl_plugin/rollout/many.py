"""Many episodes: groups, bounded concurrency, replacement of failed ones, resume, progress."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Self

from pydantic import Field, model_validator

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import EpisodeRunner, TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, trajectory_id
from openhands_rl_plugin.core.types import EpisodeRequest, FailureKind, Frozen, SamplingParams, Task, Trajectory

_BACKOFF = Backoff(first=0.5, longest=10.0)
"""A busy server or sandbox is back within seconds; ``retries`` is 2 by default, so a bad episode costs two of them."""

OnFinished = Callable[[Trajectory], None]


class RolloutPlan(Frozen):
    """Which episodes to run. ``run_id`` names them: the same plan under the same run id resumes.

    Every task is run ``samples_per_task`` times; these episodes form one group (one baseline). ``retries`` bounds
    the replacements of an episode that failed because of the infrastructure. Raises
    ``ConfigError`` when two tasks have the same id, also of different environments: their episodes would be one group.
    """

    run_id: str
    tasks: tuple[Task, ...]
    samples_per_task: int = Field(default=1, ge=1)
    served_model: str | None = None
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    concurrency: int = Field(default=10, ge=1)
    retries: int = Field(default=2, ge=0)

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        for identity, times in Counter(task.id for task in self.tasks).items():
            if times > 1:
                raise ConfigError(
                    f"{times} tasks of run {self.run_id!r} have the id {identity!r}: give each an id of its own,"
                    " or raise samples_per_task to run one task several times"
                )
        return self

    def requests(self) -> tuple[EpisodeRequest, ...]:
        """One request an episode, with seeds that depend on nothing but the plan."""
        seeds = random.Random(f"{self.seed}/{self.run_id}")
        return tuple(
            EpisodeRequest(
                task=task,
                run_id=self.run_id,
                group_id=f"{self.run_id}/{task.id}",
                sample=sample,
                seed=seeds.randrange(2**31),
                served_model=self.served_model,
                sampling=self.sampling,
            )
            for task in self.tasks
            for sample in range(self.samples_per_task)
        )


async def roll_out(
    plan: RolloutPlan, runner: EpisodeRunner, storage: TrajectoryStorage, on_finished: OnFinished | None = None
) -> tuple[Trajectory, ...]:
    """Run the episodes that the store does not hold yet; return one trajectory a request, in the order of the plan.

    Each episode is stored as soon as it ends, failed ones too; a runner that has the storage too stores it while it
    runs, and resumes or restarts the episodes that a killed run left unfinished. Only one process at a time may execute
    a run. An episode that failed because of the infrastructure is replaced up to ``plan.retries`` times a call; after
    that its failed trajectory is returned.
    """
    where = TrajectoryFilter(run_id=plan.run_id)
    stored = {trajectory.id: trajectory async for trajectory, _ in storage.find(where)}
    gate = asyncio.Semaphore(plan.concurrency)

    async def play(request: EpisodeRequest) -> Trajectory:
        async with gate:
            trajectory = await play_until_valid(request, runner, storage, stored, retries=plan.retries)
        if on_finished is not None:
            on_finished(trajectory)
        return trajectory

    try:
        async with asyncio.TaskGroup() as group:
            episodes = [group.create_task(play(request)) for request in plan.requests()]
    except ExceptionGroup as errors:
        # What stops a run (a full disk, say) stops every episode in the same way: one of them is enough.
        raise errors.exceptions[0] from errors
    return tuple(episode.result() for episode in episodes)


async def play_until_valid(
    request: EpisodeRequest,
    runner: EpisodeRunner,
    storage: TrajectoryStorage,
    stored: Mapping[str, Trajectory],
    *,
    retries: int = 2,
    again: Collection[FailureKind] = (FailureKind.INFRASTRUCTURE,),
) -> Trajectory:
    """One episode: the one in ``stored``, or a new one, which is stored, and replaced after a failure of ``again``.

    ``retries`` are counted per call, so that an episode that failed in an earlier process is tried again.
    """
    failed = attempt = 0
    while True:
        request = request.model_copy(update={"attempt": attempt})
        trajectory = stored.get(trajectory_id(request))
        is_new = trajectory is None
        if trajectory is None:
            if failed:
                await _BACKOFF.wait(failed)
            trajectory = await runner.run(request)
            await storage.add(trajectory)
        failed += is_new
        if failed > retries or trajectory.failure is None or trajectory.failure.kind not in again:
            return trajectory
        attempt += 1
