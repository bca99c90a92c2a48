"""OpenHands as the generator of SkyRL 0.4 train. Imported by the Python that has SkyRL; OpenHands is in another one.

python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=openhands_rl_plugin.contrib.trainers.skyrl ...
"""

# No postponed annotations: SkyRL reads the types of the fields.
import asyncio
import itertools
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.config import BaseConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl.train.utils import initialize_ray, validate_cfg

from openhands_rl_plugin.apps.rollout.rollout import roll_out
from openhands_rl_plugin.contrib.trainers.rows import batch_columns
from openhands_rl_plugin.core.errors import ConfigError, TrainingError
from openhands_rl_plugin.rollout.strategies.search import together

TASK = "task"
"""The column of the data set with the task: an id of a suite, or a whole row as JSON."""

_NEUTRAL: dict[str, object] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop": None}


class OpenHandsGenerator(GeneratorInterface):
    """Rolls out one episode for each row of a batch, ``openhands.concurrency`` at a time, each in a process.

    SkyRL sets the temperature and the length of a completion. Needs ``generator.step_wise_trajectories=true``: the
    segments of an episode are rows of one trajectory, and an episode that failed has none. Raises ``ConfigError``, and
    ``TrainingError`` for a batch in which no episode is valid: then nothing of it is trained.
    """

    def __init__(self, cfg: Any, endpoint: str) -> None:
        check_config(cfg)
        base = cfg.generator.inference_engine.served_model_name or cfg.trainer.policy.model.path
        where = {"base_url": f"{endpoint.rstrip('/')}/v1", "model": resolve_policy_model_name(cfg), "base_model": base}
        self._own, self._options = cfg.openhands, {**cfg.openhands.options, **where}
        self._run_id = f"skyrl-{uuid.uuid4().hex}"  # a former run's episodes: other weights
        self._batches = itertools.count()

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """The rows of the episodes, in the order of the batch."""
        identities = input_batch["trajectory_ids"]
        if identities is None:
            raise ConfigError("a batch without trajectory_ids does not say which episodes are compared")
        tasks = [each.get(TASK) for each in input_batch["env_extras"] or []]
        if len(tasks) != len(input_batch["prompts"]) or not all(isinstance(each, str) and each for each in tasks):
            raise ConfigError(f"every row of SkyRL's data set needs a column {TASK!r}, with an id or a row as JSON")
        metadata = input_batch["batch_metadata"]
        evaluation = metadata is not None and metadata.training_phase == "eval"
        sampling = _sampling(input_batch["sampling_params"] or {})
        batch, free = next(self._batches), asyncio.Semaphore(self._own.concurrency)

        async def one(task: str, identity: Any) -> Any:
            group = f"{self._run_id}/{batch}/{identity.instance_id}"
            named = {"run_id": self._run_id, "group_id": group, "sample": identity.repetition_id}
            async with free:
                return await roll_out(task, {**self._options, **named, **sampling}, store=self._own.store)

        found = await together(one(*each) for each in zip(tasks, identities, strict=True))
        valid = [None if isinstance(each, str) else each for each in found]
        if not evaluation and (off := next((each.off_policy for each in valid if each and each.off_policy), "")):
            raise TrainingError(f"completions that are no samples of the policy cannot be reinforced: {off}")
        if not any(valid):
            why = next(each for each in found if isinstance(each, str))
            raise TrainingError(f"no episode of {len(found)} in the batch is valid, and nothing is trained: {why}")
        names = [each.instance_id for each in identities]
        return batch_columns(valid, identities, names, temperature=sampling["temperature"], evaluation=evaluation)


def _sampling(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Convert SkyRL's ``sampling_params``. Raises ``ConfigError`` for a parameter that episodes do not support."""
    for name, neutral in _NEUTRAL.items():
        if (value := asked.get(name)) not in (None, neutral):
            raise ConfigError(f"generator.sampling_params: {name} = {value} cannot be honoured; leave it out")
    found: dict[str, Any] = {"temperature": float(asked.get("temperature", 1.0))}
    return found | ({"max_response_length": asked["max_tokens"]} if asked.get("max_tokens") else {})


@dataclass
class OpenHandsConfig(BaseConfig):
    """``openhands.*``."""

    options: dict[str, Any] = field(default_factory=dict)
    """How an episode is rolled out: the options of `cli.rollout`, with underscores."""
    concurrency: int = 32
    """Episodes at the same time."""
    store: str = ""
    """The folder that the episodes are kept in; else they are not."""


@dataclass
class OpenHandsTrainConfig(SkyRLTrainConfig):
    """SkyRL's configuration, and ours."""

    openhands: OpenHandsConfig = field(default_factory=OpenHandsConfig)


class OpenHandsExp(BasePPOExp):
    """SkyRL's synchronous training with episodes of OpenHands."""

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> OpenHandsGenerator:
        """A generator that samples from the endpoint at which SkyRL serves the policy."""
        return OpenHandsGenerator(cfg, inference_engine_client.get_endpoint_url())


def check_config(cfg: Any) -> None:
    """Raise ``ConfigError`` for what would be trained wrongly."""
    if not cfg.generator.step_wise_trajectories:
        raise ConfigError(
            "set generator.step_wise_trajectories=true: without it an episode has to be one sequence, and a failed one "
            "would count as a reward of 0"
        )
    temperature = cfg.generator.sampling_params.temperature
    mode = (cfg.generator.inference_engine.engine_init_kwargs or {}).get("logprobs_mode")
    if temperature != 1 and mode != "processed_logprobs":
        raise ConfigError(
            f"generator.sampling_params.temperature={temperature:g}: vLLM gives logprobs at temperature 1; set "
            "generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs, or temperature=1"
        )


@ray.remote(num_cpus=1)
def _train(cfg: OpenHandsTrainConfig) -> None:
    OpenHandsExp(cfg).run()


def main() -> None:
    """Train by the command line. What cannot be trained is one line, before a GPU is asked for."""
    cfg = OpenHandsTrainConfig.from_cli_overrides(sys.argv[1:])
    try:
        check_config(cfg)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(_train.remote(cfg))  # pyrefly: ignore[missing-attribute]
