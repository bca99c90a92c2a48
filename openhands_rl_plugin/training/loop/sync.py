"""The synchronous loop: evaluate, SFT on demonstrations, then roll out, score, train and publish, and evaluate.

While the policy is trained nothing is rolled out. ``asynchronous`` does both at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from openhands_rl_plugin.core.types import Sample
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
        played = await self._roll_out(stage, tasks, self._plan.samples_per_task, self._plan.sampling)
        rolled_out = time.time()
        metrics = await self._judge(self._where(stage), played)
        credit = await self._credit(self._where(stage), played)
        metrics |= credit.baseline.as_floats() | self._of_proposals(played)
        metrics["rollout_seconds"] = rolled_out - started
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
