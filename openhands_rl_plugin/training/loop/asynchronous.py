"""The asynchronous loop: rollouts continue while the policy is trained.

The stages are those of ``stages``; only the iterations differ. Rollouts run all the time, each on the newest weights at
its start. An iteration takes finished groups, trains on them and publishes new weights, on which later episodes start.
An episode that would be staler than ``max_staleness`` when it is trained on is not started yet; one that became so
because others finished first is dropped and counted. Every token keeps the logprob of the version that sampled it, so
that ``[rl.training] correction`` gives it the right importance weight.

The state records the consumed groups, and the batch of an iteration before training on it. So a killed run loses
nothing and trains on nothing twice: finished episodes that are in no batch are read from the storage, and an
interrupted iteration continues with its batch.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from openhands_rl_plugin.config.rl import LoopSettings
from openhands_rl_plugin.core.errors import InfrastructureError, StorageError
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Adapter, FailureKind, Probe, Trajectory
from openhands_rl_plugin.training.loop.groups import (
    Group,
    GroupRunner,
    OutageTolerantRunner,
    OutageTolerantServer,
    RolloutBuffer,
)
from openhands_rl_plugin.training.loop.plan import ChosenBatch, LoopPlan, LoopState, PolicyLineage, StageRecord
from openhands_rl_plugin.training.loop.stages import ClosedLoop, LoopListener, LoopParts, LoopStages, iteration_name

if TYPE_CHECKING:
    from openhands_rl_plugin.models.adapters.publisher import PublishReport


def make_loop(
    plan: LoopPlan, parts: LoopParts, settings: LoopSettings, listener: LoopListener | None = None
) -> ClosedLoop | AsyncLoop:
    """The loop of ``[rl.loop] kind``."""
    return ClosedLoop(plan, parts, listener) if settings.kind == "sync" else AsyncLoop(plan, parts, settings, listener)


class AsyncLoop(LoopStages):
    """Runs a plan to its end, with rollouts and training at the same time.

    The publisher must keep ``settings.kept_versions`` loaded, so that episodes end on the version that they started on.
    """

    def __init__(
        self, plan: LoopPlan, parts: LoopParts, settings: LoopSettings, listener: LoopListener | None = None
    ) -> None:
        self._server = OutageTolerantServer(parts.publisher, settings.patience, self._tell)
        self._served: dict[str, str] = {}  # version -> its model name on the server
        self._patient = OutageTolerantRunner(parts.runner, self._server)
        evaluator = OutageTolerantRunner(parts.evaluator, self._server) if parts.evaluator is not None else None
        super().__init__(plan, replace(parts, runner=self._patient, evaluator=evaluator), listener)
        self._settings = settings
        self._at = ""

    async def run(self) -> LoopState:
        """Run all stages.

        Raises as ``ClosedLoop.run`` does, and ``InfrastructureError`` when the model server is unavailable for longer
        than ``patience``.
        """
        if (adapter := self._adapter()) is not None:
            await self._bring_into_use(adapter)
        await self._begin()
        await self._reinforce()
        await self._stage("evaluate-final", self._evaluate)
        return self._state

    async def _reinforce(self) -> None:
        player = GroupRunner(self._plan, self._patient, self._parts.storage, self._server, self._newest)
        await player.look()
        buffer = self._supply(player)
        try:
            async with asyncio.TaskGroup() as tasks:
                buffer.start(tasks)
                for index in range(self._plan.iterations):
                    name = iteration_name(index)
                    known = self._state.record(name) is not None
                    await self._stage(name, partial(self._iterate, buffer=buffer, player=player))
                    if not known:
                        buffer.close(self._batch_size, self._limit)
                buffer.stop()
        except ExceptionGroup as errors:
            # All episodes fail for the same reason when a run is stopped: the first error is enough.
            raise errors.exceptions[0] from errors

    async def _iterate(self, stage: str, buffer: RolloutBuffer, player: GroupRunner) -> StageRecord:
        self._at = stage
        started = time.time()
        batch, played = await self._batch(stage, buffer)
        chosen = time.time()
        where = TrajectoryFilter(ids=batch.trajectories)
        metrics = await self._judge(where, played)
        credit = await self._credit(where, played)
        metrics |= credit.baseline.as_floats() | self._of_proposals(played)
        adapter = None
        trainer = learned = None
        if credit.samples:
            trainer = await self._reinforcement_trainer()
            learned = await self._learn(stage, self._update(trainer), credit.samples)
            metrics |= learned.as_floats() | {"training_seconds": time.time() - chosen}
        metrics |= self._staleness(batch, played)
        if trainer is not None and learned is not None:
            adapter = await self._publish(stage, trainer, learned.steps, metrics)
            await self._save_trainer(trainer, adapter)
            trainer.finish()
        metrics |= player.meter.read() | {"training_waiting_share": (chosen - started) / (time.time() - started)}
        record = self._record(stage, started, metrics, adapter)
        return record.model_copy(update={"groups": (*batch.groups, *batch.dropped)})

    async def _batch(self, stage: str, buffer: RolloutBuffer) -> tuple[ChosenBatch, list[Trajectory]]:
        batch = self._state.batch
        if batch is not None and batch.stage == stage:
            return batch, await self._stored(batch)
        groups, dropped, stale = await self._fresh_groups(stage, buffer)
        played = [trajectory for group in groups for trajectory in group.trajectories]
        _require_some(played)
        batch = ChosenBatch(
            stage=stage,
            groups=tuple(group.number for group in groups),
            trajectories=tuple(trajectory.id for trajectory in played),
            dropped=tuple(dropped),
            stale=stale,
        )
        self._save(self._state.with_batch(batch))
        return batch, played

    async def _fresh_groups(self, stage: str, buffer: RolloutBuffer) -> tuple[list[Group], list[int], int]:
        """Enough groups without their stale episodes, the numbers of wholly stale groups, and the stale episodes."""
        lineage, most = PolicyLineage.of_run(self._plan.base_model, self._state), self._settings.max_staleness
        groups: list[Group] = []
        dropped: list[int] = []
        stale = 0
        while len(groups) < self._batch_size:
            self._listener.advanced(stage, "waiting for episodes", len(groups), self._batch_size)
            group = await buffer.take()
            fresh = tuple(each for each in group.trajectories if each.failure or not lineage.is_too_stale(each, most))
            stale += len(group.trajectories) - len(fresh)
            if len(fresh) < len(group.trajectories) and all(each.failure for each in fresh):
                dropped.append(group.number)
                buffer.close(1)
            else:
                groups.append(Group(group.number, fresh))
        return sorted(groups, key=lambda group: group.number), dropped, stale

    async def _stored(self, batch: ChosenBatch) -> list[Trajectory]:
        where = TrajectoryFilter(ids=batch.trajectories)
        found = {trajectory.id: trajectory async for trajectory, _ in self._parts.storage.find(where)}
        if missing := len(batch.trajectories) - len(found):
            raise StorageError(
                f"{missing} episodes of {batch.stage} are no longer in the storage; restore them, or remove "
                f'"batch" from {self._parts.state_file} to choose others'
            )
        return [found[identity] for identity in batch.trajectories]

    def _staleness(self, batch: ChosenBatch, played: list[Trajectory]) -> dict[str, float]:
        valid = [trajectory for trajectory in played if trajectory.failure is None]
        staleness = PolicyLineage.of_run(self._plan.base_model, self._state).staleness(valid)
        return {
            "staleness": staleness.mean,
            "staleness_max": float(staleness.largest),
            "episodes_stale": float(batch.stale),
            "groups_dropped": float(len(batch.dropped)),
        }

    def _supply(self, player: GroupRunner) -> RolloutBuffer:
        used = {number for record in self._state.records for number in record.groups}
        batch = self._state.batch
        held = batch.groups if batch is not None else ()
        used.update(held, batch.dropped if batch is not None else ())
        return RolloutBuffer(player.play, used=used, held=len(held), limit=self._limit)

    @property
    def _batch_size(self) -> int:
        """Number of groups in the batch of an iteration."""
        return min(self._plan.tasks_per_iteration, len(self._plan.training))

    @property
    def _limit(self) -> int:
        """Number of groups that may be open now; none is started that no iteration will train on."""
        done = sum(self._state.record(iteration_name(index)) is not None for index in range(self._plan.iterations))
        return min(self._settings.max_staleness + 1, self._plan.iterations - done) * self._batch_size

    def _newest(self) -> str:
        adapter = self._state.adapter
        return self._plan.base_model if adapter is None else self._served.get(adapter, adapter)

    async def _bring_into_use(self, adapter: Adapter, probe: Probe | None = None) -> PublishReport:
        report = await self._server.publish(adapter, probe)
        self._served[adapter.name] = await self._parts.publisher.served_model(adapter)
        return report

    def _tell(self, why: str) -> None:
        self._listener.advanced(self._at, f"paused: {why}" if why else "going on", 0, 1)


def _require_some(played: list[Trajectory]) -> None:
    """Raise ``InfrastructureError`` where a whole batch failed because of the infrastructure; no group is consumed."""
    lost = [each.failure for each in played if each.failure and each.failure.kind is FailureKind.INFRASTRUCTURE]
    if played and len(lost) == len(played):
        raise InfrastructureError(
            f"all {len(played)} episodes of a batch failed because of the infrastructure, the last with: "
            f"{lost[-1].message}. Nothing was trained on them: fix the cause, then start the same command again"
        )
