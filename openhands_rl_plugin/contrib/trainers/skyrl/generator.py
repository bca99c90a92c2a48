"""Episodes of OpenHands for SkyRL's trainer. Imported by the Python that has SkyRL."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Mapping
from typing import Any

from openhands_rl_plugin.apps.rollout.episode_program import EpisodeProgram
from openhands_rl_plugin.apps.rollout.pythons import check_release
from openhands_rl_plugin.core.errors import ConfigError, TrainingError
from openhands_rl_plugin.rollout.strategies.together import together
from openhands_rl_plugin.trajectories.exchange.trainers.skyrl import batch_columns

check_release("skyrl", "0.4")
from skyrl.train.generators.base import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
)

TASK = "task"
"""The column of the data set with the task: an id of a suite, or a whole row as JSON."""

_NEUTRAL: dict[str, object] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop": None}
# Said by SkyRL in every batch, and without a say in an episode.
_IDLE = {"min_tokens", "skip_special_tokens", "include_stop_str_in_output", "logprobs"}


class OpenHandsGenerator(GeneratorInterface):
    """Plays one episode for each row of a batch, ``concurrency`` at the same time, each a process of ``program``.

    SkyRL says the temperature and the length of an answer. Needs ``generator.step_wise_trajectories=true``: the
    segments of an episode are rows of one trajectory, and an episode that failed has none. Raises ``ConfigError``, and
    ``TrainingError`` for a batch in which no episode is valid: then nothing of it is trained.
    """

    def __init__(
        self, program: EpisodeProgram, base_url: str, model: str, base_model: str, *, concurrency: int = 32
    ) -> None:
        if concurrency < 1:
            raise ConfigError("openhands.concurrency has to be 1 or more")
        self._program, self._concurrency = program, concurrency
        self._endpoint = {"base_url": base_url, "model": model, "base_model": base_model}
        self._run_id = f"skyrl-{uuid.uuid4().hex}"  # a former run's episodes: other weights
        self._batches = itertools.count()

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """The rows of the episodes, in the order of the batch."""
        identities, tasks = input_batch["trajectory_ids"], _tasks(input_batch)
        if identities is None:
            raise ConfigError("a batch without trajectory_ids does not say which episodes are compared")
        said = input_batch["batch_metadata"]
        evaluation = said is not None and said.training_phase == "eval"
        sampling = _sampling(input_batch["sampling_params"] or {})
        batch, free = next(self._batches), asyncio.Semaphore(self._concurrency)

        async def one(task: str, identity: Any) -> Any:
            named = {"group_id": f"{self._run_id}/{batch}/{identity.instance_id}", "sample": identity.repetition_id}
            async with free:
                return await self._program.play(task, **self._endpoint, run_id=self._run_id, **named, **sampling)

        played = await together(one(*each) for each in zip(tasks, identities, strict=True))
        valid = [None if isinstance(each, str) else each for each in played]
        if not evaluation and (off := next((each.off_policy for each in valid if each and each.off_policy), "")):
            raise TrainingError(f"answers that are no samples of the policy cannot be reinforced: {off}")
        if not any(valid):
            why = next(each for each in played if isinstance(each, str))
            raise TrainingError(f"no episode of {len(played)} in the batch is valid, and nothing is trained: {why}")
        names = [each.instance_id for each in identities]
        return batch_columns(valid, identities, names, temperature=sampling["temperature"], evaluation=evaluation)


def _tasks(batch: GeneratorInput) -> list[str]:
    extras: list[dict[str, Any]] = batch["env_extras"] or []
    tasks = [each.get(TASK) for each in extras]
    if len(tasks) != len(batch["prompts"]) or not all(isinstance(each, str) and each for each in tasks):
        raise ConfigError(f"every row of SkyRL's data set needs a column {TASK!r}, with an id or a row as JSON")
    return [str(each) for each in tasks]


def _sampling(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What SkyRL's ``sampling_params`` come to. Raises ``ConfigError`` for what an episode is not sampled with."""
    for name, value in asked.items():
        if name in _IDLE or name in ("temperature", "max_tokens"):
            continue
        if value is not None and (name not in _NEUTRAL or value != _NEUTRAL[name]):
            raise ConfigError(f"generator.sampling_params: {name} = {value} cannot be honoured; leave it out")
    found: dict[str, Any] = {"temperature": float(asked.get("temperature", 1.0))}
    return found | ({"max_response_length": asked["max_tokens"]} if asked.get("max_tokens") else {})
