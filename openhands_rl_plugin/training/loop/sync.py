"""The synchronous loop: evaluate, SFT on demonstrations, then roll out, score, train and publish, and evaluate.

While the policy is trained nothing is rolled out. ``asynchronous`` does both at the same time.
"""

from __future__ import annotations

import time

from openhands_rl_plugin.training.loop.plan import LoopState, StageRecord
from openhands_rl_plugin.training.loop.stages import LoopListener as LoopListener
from openhands_rl_plugin.training.loop.stages import LoopParts as LoopParts
from openhands_rl_plugin.training.loop.stages import LoopStages, iteration_name


class ClosedLoop(LoopStages):
    """Runs a plan to its end, one stage after the other."""

    async def run(self) -> LoopState:
        """Run all stages. Raises ``StorageError``, ``TrainingError`` or ``PublishError`` with the state intact."""
        if (adapter := self._adapter()) is not None:
            await self._bring_into_use(adapter)
        await self._begin()
        for index in range(self._plan.iterations):
            await self._stage(iteration_name(index), self._iterate)
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
        metrics |= credit.baseline.as_floats() | {"rollout_seconds": rolled_out - started}
        if not credit.samples:
            return self._record(stage, started, metrics)
        trainer = await self._reinforcement_trainer()
        learned = await self._learn(stage, trainer.reinforce, credit.samples)
        metrics |= learned.as_floats() | {"training_seconds": time.time() - rolled_out}
        adapter = await self._publish(stage, trainer, learned.steps, metrics)
        await self._save_trainer(trainer, adapter)
        trainer.finish()
        return self._record(stage, started, metrics, adapter)
