"""The synchronous loop: evaluate, SFT on demonstrations, then roll out, score, train and publish, and evaluate.

While the policy is trained nothing is rolled out. ``asynchronous`` does both at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.credit.credit import credited_samples
from openhands_rl_plugin.training.loop.pivots import Pivots, pivot_stage
from openhands_rl_plugin.training.loop.plan import LoopPlan, LoopState, StageRecord
from openhands_rl_plugin.training.loop.stages import LoopListener as LoopListener
from openhands_rl_plugin.training.loop.stages import LoopParts as LoopParts
from openhands_rl_plugin.training.loop.stages import LoopStages, iteration_name


class ClosedLoop(LoopStages):
    """Runs a plan to its end, one stage after the other."""

    def __init__(self, plan: LoopPlan, parts: LoopParts, listener: LoopListener | None = None) -> None:
        super().__init__(plan, parts, listener)
        self._pivots = Pivots(plan, parts)

    async def run(self) -> LoopState:
        """Run all stages. Raises ``StorageError``, ``TrainingError`` or ``PublishError`` with the state intact."""
        if (adapter := self._adapter()) is not None:
            await self._bring_into_use(adapter)
        await self._begin()
        for index in range(self._plan.iterations):
            await self._stage(iteration_name(index), self._iterate)
            for update in range(self._plan.pivot_updates if self._plan.pivots else 0):
                await self._stage(pivot_stage(index, update), partial(self._decide, index, update))
        await self._stage("evaluate-final", self._evaluate)
        return self._state

    async def _iterate(self, stage: str) -> StageRecord:
        started = time.time()
        tasks = self._plan.tasks_of_iteration(int(stage.rsplit("-", 1)[1]))
        run_id = self._run_id(stage)
        groups = {task.id: f"{run_id}/{task.id}" for task in tasks}
        prefixes = {task.id: await self._prefixes.choose(task, run_id, groups[task.id]) for task in tasks}
        played = await self._roll_out(stage, tasks, self._plan.samples_per_task, self._plan.sampling, prefixes=prefixes)
        rolled_out = time.time()
        metrics = await self._judge(self._where(stage), played)
        metrics |= await self._prefixed(run_id, [*groups.values()], played)
        credit = await self._credit(self._where(stage), played)
        metrics |= credit.baseline.as_floats() | self._of_proposals(played)
        metrics["rollout_seconds"] = rolled_out - started
        return await self._train(stage, started, credit.samples, metrics)

    async def _decide(self, index: int, update: int, stage: str) -> StageRecord:
        """An update on single decisions of the iteration's episodes."""
        started = time.time()
        served, advance = await self._served_model(), partial(self._listener.advanced, stage)
        groups = await self._pivots.groups(index, update, served, advance)
        settings = self._plan.reinforcement.model_copy(
            update={"tree": "path", "step_rewards": "episode", "state_weight": 0.0, "repeat_penalty": 0.0}
        )
        credit = credited_samples(groups.answers, groups.values, settings)
        metrics = groups.metrics | credit.baseline.as_floats() | {"rollout_seconds": time.time() - started}
        return await self._train(stage, started, credit.samples, metrics)

    async def _train(
        self, stage: str, started: float, samples: Sequence[Sample], metrics: dict[str, float]
    ) -> StageRecord:
        """Train on the samples of a stage and publish; where there are none, the weights stay as they are."""
        if not samples:
            return self._record(stage, started, metrics)
        began = time.time()
        trainer = await self._reinforcement_trainer()
        learned = await self._learn(stage, self._update(trainer), samples)
        metrics |= learned.as_floats() | {"training_seconds": time.time() - began}
        adapter = await self._publish(stage, trainer, learned.steps, metrics)
        await self._save_trainer(trainer, adapter)
        trainer.finish()
        return self._record(stage, started, metrics, adapter)
