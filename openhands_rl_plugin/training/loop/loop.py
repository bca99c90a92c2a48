"""The training loop: evaluate, demonstrate and fine-tune, then roll out, train and publish again and again, evaluate.

Rollouts run all the time, each on the newest weights at its start. An iteration takes finished groups, trains on them
and publishes new weights, on which later episodes start. An episode that would be staler than ``max_staleness`` when it
is trained on is not started yet: 0, as in a synchronous loop, lets rollouts and training take turns. Where one became
so because others finished first, its group is dropped and counted. Every token keeps the logprob of the version that
sampled it, so that ``[rl.training] correction`` gives it the right importance weight.

Every stage ends with one atomic write of the run's state, and every stage can be repeated. The state records the
consumed groups, and the batch of an iteration before training on it. So a killed run loses nothing and trains on
nothing twice: finished episodes that are in no batch are read from the storage, an interrupted iteration continues with
its batch, and an adapter whose stage did not end is followed by a later version.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.core.errors import InfrastructureError, StorageError, TrainingError
from openhands_rl_plugin.core.machine import forget_unused
from openhands_rl_plugin.core.protocols import EpisodeRunner, Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Adapter, FailureKind, Probe, Sample, SamplingParams, Task, Trajectory
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.scoring import rescore, stored_rewards
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.data.dataset import Episodes, TrainingDataset, is_failed, nothing_learnt
from openhands_rl_plugin.training.data.demonstrations import demonstration_samples, load_tokenizer
from openhands_rl_plugin.training.learn import build_dataset, create_version, make_trainer
from openhands_rl_plugin.training.loop.plan import (
    ChosenBatch,
    LoopPlan,
    LoopState,
    StageRecord,
    is_too_stale,
    iteration_name,
    success_metrics,
)
from openhands_rl_plugin.training.loop.rollouts import (
    DifficultyPool,
    Group,
    GroupRunner,
    OutageTolerantRunner,
    OutageTolerantServer,
    RolloutBuffer,
)
from openhands_rl_plugin.training.teacher import ServedTeacher, taught_dataset

if TYPE_CHECKING:
    from openhands_rl_plugin.config.rl import TrainingSettings
    from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher, PublishReport
    from openhands_rl_plugin.models.adapters.store import AdapterStore
    from openhands_rl_plugin.training.trainer.trainer import Trainer


log = redacting_logger(__name__)


class _CancelledTraining(Exception):
    """Stops the thread of a cancelled training."""


STATE = "state.json"
PROBE = "Instruction: [SEP] Find me soft cotton socks with color: blue [SEP] Back to Search [SEP] Buy Now"
"""Ordinary text: trainer and server must give the same logprobs for it before a new adapter is used."""


class LoopListener:
    """Callbacks of a loop. The base class ignores all of them; override those that you need."""

    def stage_started(self, name: str) -> None:
        """A stage starts."""

    def noted(self, line: str) -> None:
        """How training will be done: what is trained, how the model is computed, who can serve the result."""

    def advanced(self, stage: str, activity: str, done: int, total: int) -> None:
        """``done`` of ``total`` episodes or optimiser steps of an activity of the stage are finished."""

    def stage_finished(self, record: StageRecord) -> None:
        """A stage ended, or was already finished when the run was resumed."""


Lessons = Callable[[Sequence[Trajectory]], Sequence[Trajectory]]


@dataclass(frozen=True)
class LoopParts:
    """The components of a loop. ``demonstrator`` runs the demonstrations, ``runner`` all other episodes; ``evaluator``
    those on held-out tasks, where these run in another way.
    ``model``: the folder of the base model; ``directory``: of the state of the run.

    ``reward`` is used for evaluation and reports; ``objective`` is maximised by training. ``lessons``: what the warm
    start imitates, made of the demonstrations that succeeded.
    """

    runner: EpisodeRunner
    demonstrator: EpisodeRunner | None
    storage: TrajectoryStorage
    reward: Reward
    objective: Reward
    adapters: AdapterStore
    publisher: AdapterPublisher
    model: Path
    directory: Path
    lessons: Lessons | None = None
    evaluator: EpisodeRunner | None = None


class TrainingLoop:
    """Runs a plan to its end, from the state in its state file.

    The publisher must keep ``kept_versions`` of ``[rl.loop]`` loaded, so that episodes end on the version that they
    started on.
    ``on_saved`` gets the state after each stage, and the loop waits for it.
    """

    def __init__(
        self,
        plan: LoopPlan,
        parts: LoopParts,
        listener: LoopListener | None = None,
        on_saved: Callable[[LoopState], Awaitable[None]] | None = None,
    ) -> None:
        self._plan = plan
        self._parts = parts
        self._settings, self._loop = plan.settings, plan.settings.loop
        self._listener = listener or LoopListener()
        self._on_saved = on_saved
        self._state = LoopState.load(parts.directory / STATE)
        self._tokenizer = load_tokenizer(str(parts.model))
        self._trainer: Trainer | None = None
        self._served: dict[str, str] = {}  # version -> its model name on the server
        self._server = OutageTolerantServer(parts.publisher, self._loop.patience, self._note_outage)
        self._imitates = algorithm_of(plan.settings.training).kind == "imitation"
        self._runner = OutageTolerantRunner(parts.runner, self._server)
        self._evaluator = OutageTolerantRunner(parts.evaluator or parts.runner, self._server)
        self._stage_name = ""

    async def run(self) -> LoopState:
        """Run all stages. Raises ``StorageError``, ``TrainingError`` or ``PublishError`` with the state intact.

        Raises ``InfrastructureError`` when the model server is unavailable for longer than ``patience``, or a whole
        batch failed because of the infrastructure.
        """
        if (adapter := self._adapter()) is not None:
            await self._bring_into_use(adapter)
        await self._begin()
        await self._reinforce()
        if self._loop.iterations or not self._plan.demonstrations:  # a warm start alone is evaluated once
            await self._stage("evaluate-final", self._evaluate)
        return self._state

    async def _stage(self, name: str, work: Callable[[str], Awaitable[StageRecord]]) -> bool:
        """Do the stage unless it is finished; whether it was done now."""
        if (known := self._state.record(name)) is not None:
            self._listener.stage_finished(known)
            return False
        self._stage_name = name
        self._listener.stage_started(name)
        record = await work(name)
        self._save(self._state.with_record(record))
        self._listener.stage_finished(record)
        if self._on_saved is not None:
            await self._on_saved(self._state)
        return True

    async def _begin(self) -> None:
        """The stages before reinforcement learning."""
        if self._state.record("evaluate-base") is None:  # what cannot be trained or served fails before any episode
            for line in (await self._make_trainer(self._settings.training)).notes:
                self._listener.noted(line)
            forget_unused()
        await self._stage("evaluate-base", partial(self._evaluate, first=self._loop.base_held_out or None))
        if not self._plan.demonstrations:
            return
        await self._stage("demonstrate", self._demonstrate)
        await self._stage("warm-start", self._warm_start)
        await self._stage("evaluate-warm-start", self._evaluate)

    async def _evaluate(self, stage: str, first: int | None = None) -> StageRecord:
        """Evaluate on the held-out tasks, or on the ``first`` of them."""
        sampling = self._settings.sampling_params()
        return await self._measure(stage, self._plan.held_out[:first], sampling, self._evaluator)

    async def _demonstrate(self, stage: str) -> StageRecord:
        runner = self._parts.demonstrator or self._runner
        return await self._measure(stage, self._plan.demonstrations, SamplingParams(), runner)

    async def _measure(
        self, stage: str, tasks: Sequence[Task], sampling: SamplingParams, runner: EpisodeRunner
    ) -> StageRecord:
        """One episode of each task, and how many of them succeeded."""
        started, finished = time.time(), count(1)
        plan = RolloutPlan(
            run_id=self._run_id(stage),
            tasks=tuple(tasks),
            served_model=self._newest(),
            sampling=sampling,
            seed=self._settings.sampling.seed,
            concurrency=self._settings.max_workers,
        )
        self._listener.advanced(stage, "episodes", 0, len(tasks))  # the first one may take a minute
        episodes = await roll_out(
            plan,
            runner,
            self._parts.storage,
            lambda _: self._listener.advanced(stage, "episodes", next(finished), len(tasks)),
        )
        where = TrajectoryFilter(run_id=self._run_id(stage))
        rewards = await self._rewards(self._parts.reward, where, episodes)
        return self._record(stage, started, success_metrics(episodes, rewards, self._plan.succeeded))

    async def _warm_start(self, stage: str) -> StageRecord:
        started = time.time()
        where = TrajectoryFilter(run_id=self._run_id("demonstrate"), failed=False)
        episodes = [trajectory async for trajectory, _ in self._parts.storage.find(where)]
        rewards = await self._rewards(self._parts.reward, where, episodes)
        judged = zip(episodes, rewards, strict=True)
        good = [each for each, reward in judged if reward is not None and self._plan.succeeded(each, reward)]
        if not good:
            raise TrainingError(
                f"none of the {len(episodes)} demonstrations succeeded; is the environment the right one?"
            )
        good.sort(key=lambda trajectory: trajectory.id)
        make = self._parts.lessons
        lessons = good if make is None else await asyncio.to_thread(make, good)
        samples = [each for lesson in lessons for each in demonstration_samples(lesson, self._tokenizer)]
        trainer = await self._make_trainer(self._plan.warm_start)
        metrics = await self._learn(stage, trainer, samples, sft=True)
        adapter = await self._publish(stage, trainer, metrics)
        trainer.finish()
        return self._record(stage, started, metrics, adapter)

    async def _reinforce(self) -> None:
        plan, bounds = self._plan, (self._loop.min_success, self._loop.max_success)
        pool = DifficultyPool(plan.training, bounds, newest=self._loop.samples_per_task, enough=plan.batch_size)
        groups = GroupRunner(plan, self._runner, self._parts.storage, self._newest, pool)
        await groups.look(self._parts.reward.version)
        held, batch = 0, self._state.batch
        used = {number for record in self._state.records for number in record.groups}
        if batch is not None:
            held = len(batch.groups)
            used.update(batch.groups, batch.dropped)
        buffer = RolloutBuffer(groups.play, used=used, held=held, limit=self._limit)
        try:
            async with asyncio.TaskGroup() as tasks:
                buffer.start(tasks)
                for index in range(self._loop.iterations):
                    if await self._stage(iteration_name(index), partial(self._iterate, buffer=buffer, pool=pool)):
                        buffer.close(plan.batch_size, self._limit)
                buffer.stop()
        except ExceptionGroup as errors:
            # All episodes fail for the same reason when a run is stopped: the first error is enough.
            raise errors.exceptions[0] from errors

    async def _iterate(self, stage: str, buffer: RolloutBuffer, pool: DifficultyPool) -> StageRecord:
        """Take a batch of groups, train on it and publish; where nothing can be learnt, the weights stay."""
        started = time.time()
        batch, episodes = await self._batch(stage, buffer)
        chosen = time.time()
        where = TrajectoryFilter(ids=batch.trajectories)
        rewards = await self._rewards(self._parts.reward, where, episodes)
        for trajectory, reward in zip(episodes, rewards, strict=True):
            if reward is not None:
                pool.note(trajectory.task.id, trajectory.id, self._plan.succeeded(trajectory, reward))
        dataset = await self._dataset(where, episodes)
        metrics = {
            **success_metrics(episodes, rewards, self._plan.succeeded),
            **dataset.as_floats(),
            "rollout_seconds": chosen - started,
            "episodes_stale": float(batch.stale),
            "groups_dropped": float(len(batch.dropped)),
        }
        adapter = None
        if dataset.samples:
            trainer = await self._reinforcement_trainer()
            learned = await self._learn(stage, trainer, dataset.samples, sft=self._imitates)
            metrics |= learned | {"training_seconds": time.time() - chosen}
            adapter = await self._publish(stage, trainer, metrics)
            await asyncio.to_thread(trainer.save_state, self._trainer_directory(adapter))
            trainer.finish()
        record = self._record(stage, started, metrics, adapter)
        return record.model_copy(update={"groups": (*batch.groups, *batch.dropped)})

    async def _batch(self, stage: str, buffer: RolloutBuffer) -> tuple[ChosenBatch, list[Trajectory]]:
        """The batch of an interrupted stage, or one of finished groups, which is saved before it is used."""
        batch = self._state.batch
        if batch is not None and batch.stage == stage:
            return batch, await self._stored(batch)
        groups, dropped = await self._fresh_groups(stage, buffer)
        episodes = [trajectory for group in groups for trajectory in group.trajectories]
        lost = [each.failure for each in episodes if each.failure and each.failure.kind is FailureKind.INFRASTRUCTURE]
        if episodes and len(lost) == len(episodes):  # no group is consumed
            raise InfrastructureError(
                f"all {len(episodes)} episodes of a batch failed because of the infrastructure, the last with: "
                f"{lost[-1].message}. Nothing was trained on them: fix the cause, then start the same command again"
            )
        batch = ChosenBatch(
            stage=stage,
            groups=tuple(group.number for group in groups),
            trajectories=tuple(trajectory.id for trajectory in episodes),
            dropped=tuple(group.number for group in dropped),
            stale=sum(len(group.trajectories) for group in dropped),
        )
        self._save(self._state.with_batch(batch))
        return batch, episodes

    async def _fresh_groups(self, stage: str, buffer: RolloutBuffer) -> tuple[list[Group], list[Group]]:
        """Enough groups, by number, and those that were dropped for an episode that is too stale."""
        lineage = [self._settings.serving.model, *(each.adapter for each in self._state.records if each.adapter)]
        # By turns nothing is sampled ahead, so that nothing can be stale.
        most, each = (self._loop.max_staleness if self._loop.kind == "async" else None), self._loop.samples_per_task
        groups, dropped = list[Group](), list[Group]()
        while True:
            self._listener.advanced(stage, "episodes", len(groups) * each, self._plan.batch_size * each)
            if len(groups) == self._plan.batch_size:
                return sorted(groups, key=lambda group: group.number), dropped
            group = await buffer.take()
            valid = [trajectory for trajectory in group.trajectories if trajectory.failure is None]
            if most is not None and any(is_too_stale(trajectory, lineage, most) for trajectory in valid):
                dropped.append(group)
                buffer.close(1)
            else:
                groups.append(group)

    async def _stored(self, batch: ChosenBatch) -> list[Trajectory]:
        where = TrajectoryFilter(ids=batch.trajectories)
        found = {trajectory.id: trajectory async for trajectory, _ in self._parts.storage.find(where)}
        if missing := len(batch.trajectories) - len(found):
            raise StorageError(f"{missing} episodes of {batch.stage} are no longer in the storage; restore them")
        return [found[identity] for identity in batch.trajectories]

    @property
    def _limit(self) -> int:
        """Number of groups that may be open now; none is started that no iteration will train on."""
        done = sum(self._state.record(iteration_name(index)) is not None for index in range(self._loop.iterations))
        return min(self._loop.staleness + 1, self._loop.iterations - done) * self._plan.batch_size

    def _newest(self) -> str:
        """The name of the run's current weights on the model server."""
        adapter = self._state.adapter
        return self._settings.serving.model if adapter is None else self._served.get(adapter, adapter)

    def _note_outage(self, why: str) -> None:
        self._listener.advanced(self._stage_name, f"paused: {why}" if why else "going on", 0, 1)

    async def _dataset(self, where: TrajectoryFilter, episodes: Sequence[Trajectory]) -> TrainingDataset:
        """The training data of a batch; it may be empty."""
        settings = self._settings.training
        rewards = await self._rewards(self._parts.objective, where, episodes)
        rewarded = algorithm_of(settings).rewarded
        judged = zip(episodes, rewards, strict=True)
        valid = [(each, reward) for each, reward in judged if not is_failed(each, rewarded=rewarded)]
        scored = Episodes(tuple(each for each, _ in valid), tuple(reward for _, reward in valid))
        dataset = build_dataset(scored, settings, regroup=False)
        unusable = [each for each in dataset.excluded if each.startswith(("off_", "no_tokens"))]
        if unusable and not (dataset.samples or dataset.excluded["no_signal"]):
            raise TrainingError(nothing_learnt(settings, dataset.excluded))
        serving, model = self._settings.serving, self._parts.model

        def policy() -> ServedTeacher:
            return ServedTeacher(serving.base_url, self._newest(), serving.api_key())

        dataset = await taught_dataset(dataset, scored, settings, model, self._adapter(), policy)
        for line in dataset.warnings():
            self._listener.noted(line)
        return dataset

    async def _rewards(
        self, reward: Reward, where: TrajectoryFilter, episodes: Sequence[Trajectory]
    ) -> list[float | None]:
        """Rewards, computed once per reward version, whichever stage or process needs them."""
        await rescore(self._parts.storage, reward, where)
        return await stored_rewards(self._parts.storage, reward, episodes)

    async def _make_trainer(self, training: TrainingSettings) -> Trainer:
        given = self._parts.model, training, self._settings, self._settings.serving.model, self._adapter()
        return await asyncio.to_thread(make_trainer, *given)

    async def _reinforcement_trainer(self) -> Trainer:
        if self._trainer is None:
            forget_unused()  # frees the warm start's model before the next one is loaded
            adapter = self._adapter()
            trainer = await self._make_trainer(self._settings.training)
            if adapter is not None and (saved := self._trainer_directory(adapter)).exists():
                await asyncio.to_thread(trainer.load_state, saved)
            self._trainer = trainer
        return self._trainer

    async def _publish(self, stage: str, trainer: Trainer, metrics: dict[str, float]) -> Adapter:
        """Publish the weights as a new version with ``metrics``."""
        adapter, probe = await asyncio.to_thread(
            create_version,
            trainer,
            self._parts.adapters,
            self._settings.serving.adapter,
            base_model=self._settings.serving.model,
            parent=self._adapter(),
            steps=int(metrics["steps"]),
            metrics=metrics,
            probe_ids=self._tokenizer.encode(PROBE, add_special_tokens=False),
        )
        assert adapter is not None  # a loop is one process
        self._save(self._state.model_copy(update={"made": (*self._state.made, adapter.name)}))
        report = await self._bring_into_use(adapter, probe)
        self._listener.advanced(stage, f"published {adapter.name}", 1, 1)
        metrics["publish_seconds"] = report.seconds
        return adapter

    async def _bring_into_use(self, adapter: Adapter, probe: Probe | None = None) -> PublishReport:
        """As ``AdapterPublisher.publish``, again while the server is away; later episodes ask for the name in
        ``_served``."""
        report = await self._server.publish(adapter, probe)
        self._served[adapter.name] = await self._parts.publisher.served_model(adapter)
        return report

    def _adapter(self) -> Adapter | None:
        # The state decides, not the pointer: a killed stage may have published a version that is not in the state.
        name = self._state.adapter
        return self._parts.adapters.get(name) if name is not None else None

    async def _learn(self, stage: str, trainer: Trainer, samples: Sequence[Sample], *, sft: bool) -> dict[str, float]:
        """Train in a thread: torch releases the GIL while it computes.

        Cancellation waits for the optimiser step in progress only.
        """
        cancelled = threading.Event()

        def advanced(progress: Mapping[str, float]) -> None:
            if cancelled.is_set():
                raise _CancelledTraining
            self._listener.advanced(stage, "training", int(progress["done"]), int(progress["total"]))

        learn = trainer.sft if sft else trainer.reinforce
        try:
            return await asyncio.to_thread(learn, samples, advanced, run=self._parts.directory / "training" / stage)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def _save(self, state: LoopState) -> None:
        state.save(self._parts.directory / STATE)
        self._state = state

    def _record(
        self, stage: str, started: float, metrics: dict[str, float], adapter: Adapter | None = None
    ) -> StageRecord:
        name = adapter.name if adapter is not None else self._state.adapter
        return StageRecord(name=stage, adapter=name, metrics=metrics, started=started, finished=time.time())

    def _run_id(self, stage: str) -> str:
        return f"{self._plan.run_id}/{stage}"

    def _trainer_directory(self, adapter: Adapter) -> Path:
        return self._parts.directory / "trainer" / adapter.name
