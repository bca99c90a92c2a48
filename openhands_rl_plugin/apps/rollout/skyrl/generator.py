"""Episodes of OpenHands for SkyRL's trainer. Imported by the Python that has SkyRL."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import Mapping
from typing import Any

from openhands_rl_plugin.apps.rollout.play import play
from openhands_rl_plugin.apps.rollout.skyrl.release import check_skyrl
from openhands_rl_plugin.apps.rollout.tasks import GivenTask
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rollout import PlayOptions
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, TrainingError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.rollout.strategies.together import together
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout
from openhands_rl_plugin.trajectories.exchange.trainers.skyrl import batch_columns

check_skyrl()
from skyrl.train.generators.base import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
)

TASK = "task"
"""The column of the data set with the task: an id, a row, or a row as JSON text."""

_NEUTRAL: dict[str, object] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop": None}
# Said by SkyRL in every batch, and without a say in an episode.
_IDLE = {"min_tokens", "skip_special_tokens", "include_stop_str_in_output", "logprobs"}
_AWAY = 5.0
"""Seconds before an episode is played again."""


class OpenHandsGenerator(GeneratorInterface):
    """Plays one episode for each row of a batch, ``concurrency`` at the same time; ``options`` name the endpoint.

    SkyRL says the temperature and the length of an answer. Needs ``generator.step_wise_trajectories=true``: the
    segments of an episode are rows of one trajectory, and an episode that failed has none. One that failed of the
    infrastructure is played up to ``tries`` times. Raises ``ConfigError``, and ``TrainingError`` for a batch in which
    no episode is valid: then nothing of it is trained.
    """

    def __init__(
        self,
        options: PlayOptions,
        *,
        storage: TrajectoryStorage | None = None,
        concurrency: int = 32,
        tries: int = 2,
    ) -> None:
        if min(concurrency, tries) < 1:
            raise ConfigError("openhands.concurrency and openhands.tries have to be 1 or more")
        self._settings = options.settings()
        self._options, self._storage = options, storage
        self._concurrency, self._tries = concurrency, tries
        self._run_id = f"{options.run_id or 'skyrl'}-{uuid.uuid4().hex}"  # a former run's episodes: other weights
        self._batches = itertools.count()

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """The rows of the episodes, in the order of the batch."""
        identities, tasks = input_batch["trajectory_ids"], _tasks(input_batch)
        if identities is None:
            raise ConfigError("a batch without trajectory_ids does not say which episodes are compared")
        said = input_batch["batch_metadata"]
        evaluation = said is not None and said.training_phase == "eval"
        sampling = _sampling(input_batch["sampling_params"] or {}, self._options.temperature)
        options = self._options.model_copy(update={**sampling, "run_id": self._run_id})
        batch, free = next(self._batches), asyncio.Semaphore(self._concurrency)
        storage = self._storage or open_storage(self._settings)
        try:
            played = await together(
                self._played(
                    task, options, f"{self._run_id}/{batch}/{each.instance_id}", each.repetition_id, storage, free
                )
                for task, each in zip(tasks, identities, strict=True)
            )
        finally:
            if self._storage is None:
                await storage.close()
        if not evaluation and (off := next((each.off_policy for each in _rollouts(played) if each.off_policy), "")):
            raise TrainingError(f"answers that are no samples of the policy cannot be reinforced: {off}")
        valid = [None if isinstance(each, str) else each for each in played]
        if not any(valid):
            why = next(each for each in played if isinstance(each, str))
            raise TrainingError(f"no episode of {len(played)} in the batch is valid, and nothing is trained: {why}")
        names = [each.instance_id for each in identities]
        return batch_columns(valid, identities, names, temperature=sampling["temperature"], evaluation=evaluation)

    async def _played(
        self,
        task: GivenTask,
        options: PlayOptions,
        group_id: str,
        repetition: int,
        storage: TrajectoryStorage,
        free: asyncio.Semaphore,
    ) -> PlayedRollout | str:
        """The episode, or why there is none that is valid."""
        why = ""
        for number in range(self._tries):
            # A failed episode is stored under its own names, too.
            named = {"group_id": group_id if not number else f"{group_id}/again-{number}", "sample": repetition}
            if number:
                await asyncio.sleep(_AWAY)
            try:
                async with free:
                    played = await play(task, options.model_copy(update=named), storage=storage)
            except InfrastructureError as error:
                why = str(error)
                continue
            if played.failure is None and played.reward is not None and played.segments:
                return played
            why = played.failure.message if played.failure is not None else "it has no reward or no token ids"
            if played.failure is None or played.failure.kind is not FailureKind.INFRASTRUCTURE:
                break
        return why


def _rollouts(played: list[PlayedRollout | str]) -> list[PlayedRollout]:
    return [each for each in played if not isinstance(each, str)]


def _tasks(batch: GeneratorInput) -> list[GivenTask]:
    extras: list[dict[str, Any]] = batch["env_extras"] or []
    if len(extras) != len(batch["prompts"]) or not all(each.get(TASK) for each in extras):
        raise ConfigError(f"every row of SkyRL's data set needs a column {TASK!r}, with an id or a whole row")
    return [_task(each[TASK]) for each in extras]


def _task(value: Any) -> GivenTask:
    """Rows as JSON text, because a data set has one schema for all rows."""
    if not isinstance(value, str) or not value.lstrip().startswith("{"):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"the column {TASK!r} has a row that is no JSON: {error}") from error


def _sampling(asked: Mapping[str, Any], own: float | None) -> dict[str, Any]:
    """What SkyRL's ``sampling_params`` come to. Raises ``ConfigError`` for what an episode is not sampled with."""
    for name, value in asked.items():
        if name in _IDLE or name in ("temperature", "max_tokens"):
            continue
        if value is not None and (name not in _NEUTRAL or value != _NEUTRAL[name]):
            raise ConfigError(f"generator.sampling_params: {name} = {value} cannot be honoured; leave it out")
    temperature = float(asked.get("temperature", 1.0))
    if own is not None and own != temperature:
        raise ConfigError(
            f"openhands.options.temperature is {own:g} and SkyRL's {temperature:g}: logprobs at two temperatures have "
            "no ratio; leave it out"
        )
    found: dict[str, Any] = {"temperature": temperature}
    return found | ({"max_response_length": asked["max_tokens"]} if asked.get("max_tokens") else {})
