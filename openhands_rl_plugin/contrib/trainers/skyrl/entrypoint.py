"""``python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=<this module> openhands...``"""

# No postponed annotations: SkyRL reads the types of the fields.
import sys
from dataclasses import dataclass, field
from typing import Any

from openhands_rl_plugin.apps.rollout.episode_program import EpisodeProgram
from openhands_rl_plugin.contrib.trainers.skyrl.generator import OpenHandsGenerator
from openhands_rl_plugin.core.errors import ConfigError

# isort: split
import ray  # pyright: ignore[reportMissingImports]
from skyrl.backends.skyrl_train.inference_servers.utils import (  # pyright: ignore[reportMissingImports]
    resolve_policy_model_name,
)
from skyrl.train.config import SkyRLTrainConfig  # pyright: ignore[reportMissingImports]
from skyrl.train.config.config import BaseConfig  # pyright: ignore[reportMissingImports]
from skyrl.train.entrypoints.main_base import BasePPOExp  # pyright: ignore[reportMissingImports]
from skyrl.train.utils import initialize_ray, validate_cfg  # pyright: ignore[reportMissingImports]

# Of SkyRL's own generators: here they would be overlooked.
_THEIRS = ("zero_reward_on_non_stop", "apply_overlong_filtering", "vision_language_generator", "batched")


@dataclass
class OpenHandsConfig(BaseConfig):
    """``openhands.*``."""

    options: dict[str, Any] = field(default_factory=dict)
    """How an episode is played: the options of `openhands-rl rollout`, with underscores."""
    concurrency: int = 32
    """Episodes at the same time."""
    tries: int = 2
    """How often an episode that fails of the infrastructure is played."""
    store: str = ""
    """The folder that the episodes are kept in; else they are not."""


@dataclass
class OpenHandsTrainConfig(SkyRLTrainConfig):
    """SkyRL's configuration, and ours."""

    openhands: OpenHandsConfig = field(default_factory=OpenHandsConfig)


class OpenHandsExp(BasePPOExp):
    """SkyRL's synchronous training with episodes of OpenHands."""

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> OpenHandsGenerator:
        """Of the endpoint that SkyRL serves the policy at."""
        return make_generator(cfg, inference_engine_client.get_endpoint_url())


def make_generator(cfg: Any, endpoint: str) -> OpenHandsGenerator:
    """The generator of a whole configuration. Raises ``ConfigError``."""
    program = check_config(cfg)
    base = cfg.generator.inference_engine.served_model_name or cfg.trainer.policy.model.path
    url, model = f"{endpoint.rstrip('/')}/v1", resolve_policy_model_name(cfg)
    return OpenHandsGenerator(program, url, model, base, concurrency=cfg.openhands.concurrency)


def check_config(cfg: Any) -> EpisodeProgram:
    """What episodes are played by. Raises ``ConfigError`` for what would be trained wrongly."""
    own = cfg.openhands
    program = EpisodeProgram(
        own.options,
        where="openhands.options",
        trainer="SkyRL",
        said=frozenset({"temperature", "max_response_length"}),
        tries=own.tries,
        store=own.store,
    )
    if not cfg.generator.step_wise_trajectories:
        raise ConfigError(
            "set generator.step_wise_trajectories=true: without it an episode has to be one sequence, and a failed one "
            "would count as a reward of 0"
        )
    for name in _THEIRS:
        if getattr(cfg.generator, name):
            raise ConfigError(f"generator.{name} is of SkyRL's own generators: leave it out")
    temperature = cfg.generator.sampling_params.temperature
    mode = (cfg.generator.inference_engine.engine_init_kwargs or {}).get("logprobs_mode")
    if temperature != 1 and mode != "processed_logprobs":
        raise ConfigError(
            f"generator.sampling_params.temperature={temperature:g}: vLLM gives logprobs at temperature 1; set "
            "generator.inference_engine.engine_init_kwargs.logprobs_mode=processed_logprobs, or temperature=1"
        )
    return program


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
    ray.get(_train.remote(cfg))  # pyright: ignore[reportFunctionMemberAccess]
