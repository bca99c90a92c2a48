"""Episodes of ours for TRL's ``AsyncGRPOTrainer``: its ``rollout_worker``, in a thread of the trainer's process."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import queue
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy

from openhands_rl_plugin.apps.rollout.play import play
from openhands_rl_plugin.apps.rollout.tasks import GivenTask
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rollout import PlayOptions, as_trainer_names
from openhands_rl_plugin.core.concurrency import Job, LoopThread
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, RLError, TrainingError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.rollout.strategies.together import together
from openhands_rl_plugin.training.credit.estimators import ESTIMATORS, RolloutBatch
from openhands_rl_plugin.training.packages import check_package
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout
from openhands_rl_plugin.trajectories.exchange.trainers.trl import ARRAYS, queued_rows

_ADAPTER = "trl-policy"
_EMPTY_GROUPS = 3
"""So many groups in a row without a valid episode are no accident."""
_PAUSE, _AWAY = 0.1, 5.0
"""Seconds before a full queue, and a server that did not answer, are looked at again."""


class TRLRolloutWorker:
    """Plays groups of ``group_size`` episodes of ``tasks``, one after the other and again from the first, and queues
    their segments with the group's advantages. What TRL calls a group is one here.

    ``options`` name the endpoint; an episode ends on the version that it began on. ``served``: what the endpoint calls
    a version; by default ``trl-policy-v3``, as TRL publishes an adapter, and 0 is ``options.model``. ``temperature`` is
    that of ``AsyncGRPOConfig``. ``groups`` are played at the same time, and wait while ``queue_rows`` are queued, best
    those of a step or two: what waits for more steps than ``max_staleness``, TRL throws away. Failed episodes are left
    out, and so are groups whose rewards are equal. Raises ``ConfigError``; what goes wrong later, ``check_health``
    raises in the trainer.
    """

    def __init__(
        self,
        tasks: Sequence[GivenTask],
        options: PlayOptions,
        *,
        storage: TrajectoryStorage | None = None,
        algorithm: Literal["grpo", "rloo", "dr-grpo"] = "grpo",
        group_size: int = 8,
        groups: int = 4,
        queue_rows: int = 64,
        temperature: float = 1.0,
        served: Callable[[int], str] | None = None,
    ) -> None:
        check_package("trl", "a rollout worker")
        if not tasks or group_size < 2 or min(groups, queue_rows) < 1:
            raise ConfigError("a rollout worker needs a task, groups of two episodes or more, and room for one group")
        self._settings = options.settings()
        sampled = self._settings.sampling.temperature
        if sampled != temperature:
            raise ConfigError(
                f"[rl.sampling] temperature is {sampled:g} and that of the trainer {temperature:g}: logprobs at two "
                "temperatures have no ratio; set both to one value"
            )
        self._temperature = temperature
        self._tasks, self._options, self._storage = tasks, options, storage
        self._estimator, self._size, self._groups = ESTIMATORS[algorithm], group_size, groups
        self._served = served or (lambda version: _served_by_trl(options.model, version))
        self._version = 0
        self._run_id = f"{options.run_id or 'trl'}-{uuid.uuid4().hex}"  # a former run's episodes are of other weights
        self._thread: LoopThread | None = None
        self._job: Job[None] | None = None
        self._failure: RLError | None = None
        self._ended = False
        self._empty = 0
        self._beat = time.monotonic()
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(queue_rows)
        """``RolloutSample``s."""
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        """What is measured of each group."""

    def start(self) -> None:
        """Begin to play."""
        if self._thread is None:
            self._beat, self._ended, self._failure, self._empty = time.monotonic(), False, None, 0
            self._thread = LoopThread("trl-rollouts")
            self._job = self._thread.start(self._play_all())

    def stop(self) -> None:
        """Cancel the episodes in flight, and wait until they have cleaned up. Idempotent."""
        if self._job is not None:
            self._job.cancel()
        if self._thread is not None:
            self._thread.close()
        self._thread = self._job = None

    def update_model_version(self, model_version: int) -> None:
        """Episodes that begin from now on are of this version."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise what ended the rollouts, and ``TrainingError`` where no episode ends any more."""
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise TrainingError("the rollouts have ended: start the worker again")
        idle = time.monotonic() - self._beat
        if idle > stale_after_s + self._options.timeout:
            raise TrainingError(
                f"no episode has ended for {idle:.0f} s, which is more than a timeout of {self._options.timeout:g} s "
                "and heartbeat_stale_after_s: is the model's server still there?"
            )

    async def _play_all(self) -> None:
        storage = self._storage or open_storage(self._settings)
        numbers = itertools.count()
        try:
            await together(self._play_groups(numbers, storage) for _ in range(self._groups))
        except RLError as error:
            self._failure = error
        finally:
            self._ended = True
            if self._storage is None:
                await storage.close()

    async def _play_groups(self, numbers: Iterator[int], storage: TrajectoryStorage) -> None:
        for number in numbers:
            version = self._version
            try:
                played = await self._play_group(number, version, storage)
            except InfrastructureError:
                self._empty += 1
                if self._empty >= _EMPTY_GROUPS:
                    raise
                await asyncio.sleep(_AWAY)
                continue
            for row in self._rows(played, number, version):
                while self.rollout_buffer.full():
                    self._beat = time.monotonic()  # the trainer is slower, which is no fault here
                    await asyncio.sleep(_PAUSE)
                self.rollout_buffer.put_nowait(_rollout_sample(row))

    async def _play_group(self, number: int, version: int, storage: TrajectoryStorage) -> list[PlayedRollout]:
        named = {"model": self._served(version), "run_id": self._run_id, "group_id": f"{self._run_id}/{number}"}

        async def one(sample: int) -> PlayedRollout:
            options = self._options.model_copy(update={**named, "sample": sample})
            played = await play(self._tasks[number % len(self._tasks)], options, storage=storage)
            self._beat = time.monotonic()
            return played

        return await together(one(sample) for sample in range(self._size))

    def _rows(self, played: Sequence[PlayedRollout], number: int, version: int) -> list[Mapping[str, Any]]:
        """The rows of a group. Raises ``TrainingError`` where no group has anything to learn from."""
        if off := next((each.off_policy for each in played if each.off_policy), ""):
            raise TrainingError(f"answers that are no samples of the policy cannot be reinforced: {off}")
        valid = [each for each in played if each.reward is not None and each.segments]
        rewards = [each.reward for each in valid if each.reward is not None]
        measured = {"rollout/failed": float(len(played) - len(valid)), "rollout/equal": float(len(set(rewards)) < 2)}
        self.metrics_queue.put(measured | ({"rollout/reward": sum(rewards) / len(rewards)} if rewards else {}))
        self._empty = 0 if valid else self._empty + 1
        if self._empty >= _EMPTY_GROUPS:
            why = next((each.failure.message for each in played if each.failure is not None), "nothing was sampled")
            why = as_trainer_names(why, "options", "TRL", ())
            raise TrainingError(f"{self._empty} groups in a row have no valid episode; the last one: {why}")
        if len(set(rewards)) < 2:
            return []
        lengths = [sum(sum(segment.mask) for segment in each.segments) for each in valid]
        advantages = self._estimator(RolloutBatch(rewards, [0] * len(rewards), lengths))
        made: list[Mapping[str, Any]] = []
        for each, advantage in zip(valid, advantages, strict=True):
            made += queued_rows(
                [segment.model_copy(update={"advantage": advantage}) for segment in each.segments],
                group_id=number,
                model_version=version,
                metrics={"reward": each.reward or 0.0, "turns": float(each.turns)},
                temperature=self._temperature,
            )
        return made


def _served_by_trl(model: str, version: int) -> str:
    return PolicyRef(base_model=model, adapter=_ADAPTER, version=version).served_name if version else model


def _rollout_sample(row: Mapping[str, Any]) -> Any:
    kind = importlib.import_module("trl.experimental.async_grpo.async_rollout_worker").RolloutSample
    arrays = {name: numpy.asarray(row[name], dtype) for name, dtype in ARRAYS.items()}
    return kind(**{**row, **arrays}, enqueued_at=time.time())
