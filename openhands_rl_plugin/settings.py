"""The settings of the ``[rl]`` section as frozen models.

Every model refuses unknown keys and values of another type. A wrong setting raises ``ConfigError`` with one line a
field, each naming the section, the key and the remedy; secrets are referred to by environment-variable name only.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic import ModelWrapValidatorHandler as Handler

from openhands_rl_plugin import registry
from openhands_rl_plugin.errors import ConfigError
from openhands_rl_plugin.settings_fields import DatabaseName, HttpUrl, SafeName, Settings, VariableName
from openhands_rl_plugin.types import JsonObject, Limits, SamplingParams
from openhands_rl_plugin.validation import Location, problems

Locate = Callable[[Location], str]
"""Names the section (and file) that a setting was read from."""

# PEFT's options for weights beside the low-rank ones.
_UNSERVABLE = ("modules_to_save", "bias", "lora_bias", "use_dora", "trainable_token_indices")
_SECRET_KEY = re.compile(r"(^|_)(api_?key|password|passwd|secret|token|credentials?)\Z", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"\w://[^/@\s]*:[^/@\s]*@")


def _provable_targets(value: tuple[str, ...]) -> tuple[str, ...]:
    if found := sorted({name.rpartition(".")[2] for name in value} & {"lm_head", "embed_tokens"}):
        raise ValueError(
            f"adapters of {', '.join(found)} are not trained: servers leave them out of the logprobs that prove them"
        )
    return value


def _registered(kind: registry.Kind) -> AfterValidator:
    def check(value: str) -> str:
        try:
            registry.check(kind, value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    return AfterValidator(check)


class StorageSettings(Settings):
    """``[rl.storage]``: where trajectories go. ``durable``: a record is acknowledged only when it is on the disk.

    ``path`` is for the file storage, ``uri_env`` and ``database`` are for MongoDB.
    """

    path: str = Field(default="~/.openhands/rl_trajectories", min_length=1)
    durable: bool = True
    uri_env: VariableName = ""
    database: DatabaseName = "openhands_rl"

    @property
    def directory(self) -> Path:
        """``path`` with ``~`` expanded."""
        return Path(self.path).expanduser()

    def connection_string(self, environ: Mapping[str, str] | None = None) -> str:
        """What ``uri_env`` names, or a server on this machine; raises ``ConfigError`` if the variable is not set."""
        if not self.uri_env:
            return "mongodb://localhost:27017/"
        if found := (os.environ if environ is None else environ).get(self.uri_env):
            return found
        raise ConfigError(
            f"[rl.storage] uri_env: the environment variable {self.uri_env} is not set; "
            f"export {self.uri_env}=mongodb://..., or remove the line"
        )


class SamplingSettings(Settings):
    """``[rl.sampling]``: how rollouts sample. ``seed`` is the run's; every episode derives its own from it."""

    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)


AlgorithmName = Literal[
    "sft",
    "rejection-sampling",
    "reinforce++",
    "reinforce++-baseline",
    "rloo",
    "grpo",
    "dr-grpo",
    "dapo",
    "gspo",
    "cispo",
    "dpo",
]


class TrainingSettings(Settings):
    """``[rl.training]``: the algorithm, its options, the adapter and its optimiser.

    ``batch_size`` is in trajectories (of DPO: pairs) an optimiser step. A bound or an aggregation that is left to the
    algorithm (0, "auto") is that of its paper; see ``training/algorithms.py``.
    """

    algorithm: AlgorithmName = "reinforce++-baseline"
    method: Literal["lora", "qlora", "full"] = "lora"
    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    num_epochs: int = Field(default=3, ge=1)
    batch_size: int = Field(default=8, ge=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    lora_rank: int = Field(default=16, ge=1, le=1024)
    lora_alpha: int = Field(default=32, ge=1)
    lora_variant: Literal["lora", "rslora", "dora"] = "lora"
    target_modules: Annotated[tuple[str, ...], AfterValidator(_provable_targets)] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        strict=False,
    )
    clip_low: float = Field(default=0.0, ge=0, lt=1)
    clip_high: float = Field(default=0.0, ge=0)
    negative_scale: float = Field(default=1.0, ge=0, le=1)
    dual_clip: float = Field(default=0.0, ge=0)
    cispo_low: float = Field(default=0.2, gt=0, le=1)
    variance: Literal["biased", "unbiased"] = "biased"
    std_epsilon: float = Field(default=1e-6, ge=0)
    aggregation: Literal["auto", "token", "sequence", "fixed", "rollout"] = "auto"
    fixed_length: int = Field(default=0, ge=0)
    overlong: Literal["keep", "leave-out"] = "keep"
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    kl_coefficient: float = Field(default=0.001, ge=0)
    kl_in: Literal["loss", "reward"] = "loss"
    correction: Literal["none", "truncate", "mask"] = "none"
    correction_level: Literal["token", "sequence"] = "token"
    correction_low: float = Field(default=0.5, ge=0, le=1)
    correction_high: float = Field(default=2.0, ge=1)
    step_rewards: Literal["episode", "environment", "search"] = "episode"
    discount: float = Field(default=1.0, gt=0, le=1)
    state_weight: float = Field(default=0.0, ge=0)
    tree: Literal["path", "branches"] = "path"
    tree_weight: float = Field(default=1.0, ge=0)
    tree_visits: int = Field(default=1, ge=1)
    imitate_above: float = 0.0
    keep_best: int = Field(default=1, ge=1)
    dpo_beta: float = Field(default=0.1, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_tokens_per_pass: int = Field(default=4096, ge=1)
    gradient_checkpointing: bool = False
    checkpoint_steps: int = Field(default=20, ge=0)
    sharding: Literal["auto", "none", "layers"] = "auto"
    seed: int = Field(default=0, ge=0)
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _servable(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and (found := [key for key in _UNSERVABLE if key in data]):
            raise ValueError(f"{', '.join(found)}: only LoRA's own weights are trained, as servers load nothing else")
        return data

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError("dual_clip must be 0 (off) or greater than 1: it bounds the ratio where it is above 1")
        if self.discount < 1 and self.step_rewards == "episode" and not self.state_weight:
            raise ValueError(
                'discount needs rewards of steps: set step_rewards = "environment" or "search", or a state_weight, or '
                "leave 1"
            )
        if self.method == "full" and (self.algorithm not in ("sft", "rejection-sampling") or self.kl != "none"):
            raise ValueError(
                'method = "full" fine-tunes: set algorithm = "sft" or "rejection-sampling" and kl = "none", or train '
                'an adapter with method = "lora"'
            )
        if self.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
            raise ValueError(
                'method = "qlora" needs bitsandbytes, which is not installed here: pip install bitsandbytes, or set '
                'method = "lora"'
            )
        return self

    def check_servable(self) -> None:
        """Raise ``ConfigError`` for what no server can load as an adapter while it runs."""
        if self.method == "full":
            raise ConfigError(
                '[rl.training] method = "full" makes a whole model, which is not loaded into a running server as an '
                'adapter: start a server with its directory, or set method = "lora"'
            )
        if self.lora_variant == "dora":
            raise ConfigError(
                '[rl.training] lora_variant = "dora": neither `openhands-rl serve` nor vLLM can serve it; train it '
                'without publishing, or use "lora" or "rslora"'
            )


class ServingSettings(Settings):
    """``[rl.serving]``: the OpenAI-compatible server of the policy, and where its adapters lie.

    ``model`` is the name by which the server knows the base model; ``request_timeout`` is in seconds. ``base_urls`` are
    the replicas behind ``base_url``, where adapters are published one by one. ``max_lora_rank`` is what the server was
    started with; 0: not known.
    """

    base_url: HttpUrl = ""
    base_urls: tuple[HttpUrl, ...] = Field(default=(), strict=False)
    server: Literal["auto", "embedded", "vllm", "sglang"] = "auto"
    model: str = ""
    adapter: SafeName = "policy"
    adapters_path: str = Field(default="~/.openhands/rl_adapters", min_length=1)
    api_key_env: VariableName = ""
    max_adapters: int = Field(default=2, ge=1, le=64)
    max_lora_rank: int = Field(default=0, ge=0)
    request_timeout: float = Field(default=120.0, gt=0)

    @property
    def publish_urls(self) -> tuple[str, ...]:
        """Every server that an adapter must be on; none when no server is named."""
        return self.base_urls or ((self.base_url,) if self.base_url else ())

    @property
    def adapters_directory(self) -> Path:
        """``adapters_path`` with ``~`` expanded."""
        return Path(self.adapters_path).expanduser()

    def api_key(self, environ: Mapping[str, str] | None = None) -> str | None:
        """The key that ``api_key_env`` names, ``None`` when no key is used; raises ``ConfigError`` if it is not set."""
        if not self.api_key_env:
            return None
        if key := (os.environ if environ is None else environ).get(self.api_key_env):
            return key
        raise ConfigError(
            f"[rl.serving] api_key_env: the environment variable {self.api_key_env} is not set; "
            f"export {self.api_key_env}=... or remove the line"
        )


class VerifierSettings(Settings):
    """``[rl.verifier]``: what `openhands-rl train --verifier` learns to tell apart, and how that is judged.

    ``label``: "resolved" (the evidence), or a reward whose stored scores say success from ``label_at`` on.
    ``max_length``: tokens of an episode with the question about it; longer episodes lose their middle. ``negatives``:
    failures for every success, in training; 0 keeps all. ``held_out``: share of the tasks.
    """

    label: str = Field(default="resolved", min_length=1)
    label_at: float = 1.0
    max_length: int = Field(default=10_240, ge=1)
    negatives: float = Field(default=1.0, ge=0)
    held_out: float = Field(default=0.2, gt=0, lt=1)
    calibration: Literal["none", "temperature", "platt"] = "none"


class LoopSettings(Settings):
    """``[rl.loop]``: whether rollouts go on while the policy is trained, and how far they may be behind it.

    ``max_staleness`` is in versions of the policy. ``patience`` is in seconds: how long a model server may be away.
    """

    kind: Literal["sync", "async"] = "sync"
    max_staleness: int = Field(default=1, ge=0, le=64)
    partial_rollouts: Literal["finish", "continue"] = "finish"
    patience: float = Field(default=600.0, ge=0)

    @property
    def kept_versions(self) -> int:
        """Versions that a server must keep loaded for episodes to end on."""
        return 2 if self.kind == "sync" else self.max_staleness + 1


class RLSettings(Settings):
    """The ``[rl]`` section. The lengths are in tokens; ``max_workers`` is the number of episodes played at a time.

    ``strategy`` is ``[rl.strategy]``: the options of the strategy that ``rollout_strategy`` names. ``environment`` is
    ``[rl.environment]``: those of the environment that ``env_name`` names.
    """

    max_turns: int = Field(default=10, ge=1)
    max_prompt_length: int = Field(default=2048, ge=1)
    max_response_length: int = Field(default=512, ge=1)
    max_obs_length: int = Field(default=1024, ge=1)
    react_format: bool = True
    env_name: str = Field(default="webshop", min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")
    env_port: int = Field(default=8000, ge=1, le=65535)
    env_server_base: HttpUrl = Field(default="http://127.0.0.1", min_length=1)
    rollout_strategy: Annotated[str, _registered("strategies")] = "StandardReAct"
    storage_backend: Annotated[str, _registered("storages")] = "file"
    max_workers: int = Field(default=10, ge=1, le=4096)
    executor: Literal["processes", "ray"] = "processes"
    strategy: JsonObject = Field(default_factory=dict)
    environment: JsonObject = Field(default_factory=dict)
    storage: StorageSettings = StorageSettings()
    sampling: SamplingSettings = SamplingSettings()
    training: TrainingSettings = TrainingSettings()
    verifier: VerifierSettings = VerifierSettings()
    loop: LoopSettings = LoopSettings()
    serving: ServingSettings = ServingSettings()

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, handler: Handler[Self], info: ValidationInfo) -> Self:
        locate: Locate = (info.context or {}).get("locate", section_of)
        if lines := [*_secrets(data, locate)]:
            raise ConfigError("\n".join(lines))
        try:
            settings = handler(data)
        except ValidationError as error:
            lines = [f"{locate(at)} {at[-1] if at else ''}: {what}" for at, what in problems(error, cls)]
            raise ConfigError("\n".join(lines)) from error
        if lines := [*_wrong_options(settings, locate), *_unservable(settings, locate)]:
            raise ConfigError("\n".join(lines))
        return settings

    @property
    def environment_url(self) -> str:
        """``env_server_base`` with ``env_port``, unless the base names a port itself."""
        parts = urlsplit(self.env_server_base)
        address = parts.netloc if parts.port is not None else f"{parts.netloc}:{self.env_port}"
        return urlunsplit(parts._replace(netloc=address))

    def limits(self) -> Limits:
        """The bounds of one episode."""
        return Limits(
            max_turns=self.max_turns,
            max_prompt_length=self.max_prompt_length,
            max_response_length=self.max_response_length,
            max_obs_length=self.max_obs_length,
        )

    def sampling_params(self, seed: int | None = None) -> SamplingParams:
        """How a rollout samples; ``seed`` is the episode's own."""
        return SamplingParams(
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            max_tokens=self.max_response_length,
            seed=seed,
        )


def section_of(location: Location) -> str:
    """``("training", "seed")`` -> ``"[rl.training]"``."""
    return f"[{'.'.join(('rl', *location[:-1]))}]"


def _wrong_options(settings: RLSettings, locate: Locate) -> Iterator[str]:
    """What is wrong with ``[rl.strategy]`` and ``[rl.environment]``. The keys are the plugin's own; it is loaded only
    where there are some."""
    yield from _wrong_section("strategy", "strategies", settings.rollout_strategy, settings.strategy, locate)
    yield from _wrong_section("environment", "environments", settings.env_name, settings.environment, locate)


def _wrong_section(section: str, kind: registry.Kind, name: str, options: JsonObject, locate: Locate) -> Iterator[str]:
    try:
        if options:
            registry.build(kind, name, options)
    except ConfigError as error:
        for line in str(error).splitlines():
            where, _, what = line.removeprefix(f"{section} {name!r}: ").partition(": ")
            keys = tuple(where.split("."))
            if where != line and keys[0].isidentifier():
                yield f"{locate((section, *keys))} {keys[-1]}: {what}"
            else:
                yield f"{locate((section, ''))}: {line}"


def _unservable(settings: RLSettings, locate: Locate) -> Iterator[str]:
    rank, highest = settings.training.lora_rank, settings.serving.max_lora_rank
    if highest and rank > highest:
        yield (
            f"{locate(('training', ''))} lora_rank: {rank} is above max_lora_rank = {highest} of [rl.serving]: "
            f"train a smaller one, or start the server with --max-lora-rank {rank}"
        )


def _secrets(data: object, locate: Locate, prefix: Location = ()) -> Iterator[str]:
    for key, value in data.items() if isinstance(data, Mapping) else ():
        location = (*prefix, str(key))
        if isinstance(value, Mapping):
            yield from _secrets(value, locate, location)
        elif _SECRET_KEY.search(str(key)):
            yield (
                f"{locate(location)} {key}: secrets are not read from configuration; put it into an environment "
                'variable and name that one: api_key_env = "NAME" in [rl.serving]'
            )
        elif isinstance(value, str) and _URL_WITH_PASSWORD.search(value):
            yield f"{locate(location)} {key}: the URL holds a password; remove it and use an environment variable"
