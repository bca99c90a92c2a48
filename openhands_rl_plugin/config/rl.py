"""The settings of the ``[rl]`` section as frozen models.

Every model refuses unknown keys and values of another type. A wrong setting raises ``ConfigError`` with one line a
field, each naming the section, the key and the remedy; secrets are referred to by environment-variable name only.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic import ModelWrapValidatorHandler as Handler

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import ConfigError, Location, available, problems
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS
from openhands_rl_plugin.core.servers import named_key
from openhands_rl_plugin.core.types import Bounded, JsonObject, Limits, SamplingParams


def _variable_name(value: str) -> str:
    if value and re.fullmatch(r"[A-Za-z_]\w*", value) is None:
        raise ValueError("must be the NAME of an environment variable, not the secret itself")
    return value


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if value and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise ValueError('must be an http:// or https:// URL, for example "http://127.0.0.1:8100/v1"')
    return value.rstrip("/")


def _safe_name(value: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is None or ".." in value:
        raise ValueError("may hold letters, digits, '.', '_' and '-' only, and no '..'")
    return value


VariableName = Annotated[str, AfterValidator(_variable_name)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
SafeName = Annotated[str, AfterValidator(_safe_name)]


class Settings(BaseModel):
    """Base of the sections: frozen, strict about types (TOML has its own), no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


# Where the kernel describes the host, and where its sockets are: a Docker socket in a sandbox is a way out of it.
_NEVER = ("/dev", "/proc", "/run", "/sys", "/var/run")


def checked_path(text: str) -> Path:
    """The absolute path that ``text`` names, ``~`` expanded and links followed.

    Raises ``ValueError`` for a relative path, ``/``, a home or a folder above one, a folder of
    the kernel or of sockets, and what does not exist.
    """
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError(f"{text!r} must be absolute, or begin with ~")
    path = Path(os.path.normpath(path))
    # Links of the kernel cannot be followed by everybody.
    real = path if _forbidden(path) else Path(os.path.realpath(path))
    if (inside := _forbidden(real)) is not None:
        raise ValueError(f"{text!r} lies in {inside}, which sandboxes never show: it leads to the host")
    if any(real in (home, *home.parents) for home in _homes()):
        raise ValueError(
            f"{text!r} is or holds a whole home, with keys in it; name the folders below it that are needed"
        )
    if not real.exists():
        raise ValueError(f"{text!r} does not exist")
    return real


def _homes() -> set[Path]:
    """The homes of this user: by ``HOME`` and by the system's list of users."""
    homes = {"/", os.path.expanduser("~")}  # a container may have no other home
    with suppress(KeyError):  # a container may run as a user that it does not list
        homes.add(pwd.getpwuid(os.getuid()).pw_dir)
    return {Path(os.path.realpath(home)) for home in homes if home}


def _forbidden(path: Path) -> str | None:
    return next((each for each in _NEVER if path == Path(each) or Path(each) in path.parents), None)


def _host_path(text: str) -> str:
    checked_path(text)
    return text


HostPath = Annotated[str, AfterValidator(_host_path)]
"""As written; ``checked_path`` gives the path."""
PromptName = Literal["standard", "compact"]


class WorkspaceSettings(Settings):
    """``[rl.workspace]``: the sandbox of an agent that works on files. Sizes are in MiB, and of a whole session."""

    isolation: Literal["bubblewrap", "none"] = Field(
        default="bubblewrap",
        description="none: commands run with all rights of this user, where there is no bubblewrap",
    )
    prompt: PromptName = Field(
        default="standard",
        description="compact: RLAgent's own short instructions and tools (under 700 tokens), for small models",
    )
    visible: tuple[HostPath, ...] = Field(
        default=(), strict=False, description="folders and files of the host that commands may read, by their own paths"
    )
    writable: tuple[HostPath, ...] = Field(
        default=(), strict=False, description="folders and files of the host that commands may change"
    )
    network: bool = Field(default=False, description="let commands use the host's network")
    memory: int = Field(default=8192, ge=64, description="MiB of memory of all processes of a session")

    @property
    def is_compact(self) -> bool:
        """Whether the agent gets the short instructions."""
        return self.prompt == "compact"


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
    "opd",
    "opsd",
    "dpo",
]

LOCAL = "local"
"""The training engine of this machine."""


def _probed_targets(value: tuple[str, ...]) -> tuple[str, ...]:
    if found := sorted({name.rpartition(".")[2] for name in value} & {"lm_head", "embed_tokens"}):
        raise ValueError(
            f"adapters of {', '.join(found)} are not trained: servers leave them out of the logprobs that a published "
            "adapter is checked by"
        )
    return value


class TrainingSettings(Settings):
    """``[rl.training]``: the algorithm, its options, the adapter and its optimiser.

    0 or "auto" for a clip bound or the aggregation takes the value of the algorithm's paper; see
    ``training/algorithms.py``.
    """

    engine: Annotated[str, registry.registered("training_engines", besides=(LOCAL,))] = Field(
        default=LOCAL, description="what trains: local: this machine; tinker: the Tinker API, see [rl.tinker]"
    )
    algorithm: AlgorithmName = Field(
        default="reinforce++-baseline",
        description="how episodes become a loss: imitation, policy gradients on groups of a task, or preferences (dpo)",
    )
    method: Literal["lora", "qlora", "full"] = Field(
        default="lora", description="what is trained: an adapter, qlora: on a 4-bit base model, or full: all weights"
    )
    learning_rate: float = Field(
        default=1e-5,
        gt=0,
        le=1,
        description="largest learning rate of AdamW, after the warm-up; LoRA takes 1e-5 to 1e-3",
    )
    num_epochs: int = Field(default=3, ge=1, description="passes over the chosen episodes")
    batch_size: int = Field(default=8, ge=1, description="episodes per optimiser step; dpo: pairs")
    max_grad_norm: float = Field(default=1.0, gt=0, description="a gradient with a larger L2 norm is scaled down to it")
    lora_rank: int = Field(
        default=16, ge=1, le=1024, description="rank of the adapter: a higher one can learn more and needs more memory"
    )
    lora_alpha: int = Field(
        default=32, ge=1, description="LoRA alpha; the adapter's scale is alpha / rank, with rslora alpha / sqrt(rank)"
    )
    lora_variant: Literal["lora", "rslora"] = Field(default="lora", description="variant of LoRA")
    target_modules: Annotated[tuple[str, ...], AfterValidator(_probed_targets)] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        strict=False,
        description="linear layers that the adapter is added to, by name",
    )
    clip_low: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="the probability ratio is clipped at 1 - this; 0: the algorithm's own bound",
    )
    clip_high: float = Field(
        default=0.0, ge=0, description="the probability ratio is clipped at 1 + this; 0: the algorithm's own bound"
    )
    aggregation: Literal["auto", "token", "sequence", "fixed"] = Field(
        default="auto", description="what the loss is averaged over; auto: as in the algorithm's paper"
    )
    overlong: Literal["keep", "leave-out"] = Field(
        default="keep", description="whether to train on episodes that were cut off by a limit"
    )
    kl: Literal["none", "k3"] = Field(default="none", description="estimator of the KL divergence to the base model")
    kl_coefficient: float = Field(default=0.001, ge=0, description="weight of the KL divergence relative to the reward")
    entropy_coefficient: float = Field(
        default=0.0, ge=0, description="weight of the entropy bonus (verl's entropy_coeff); 0: off"
    )
    teacher: str = Field(
        default="",
        description="what scores the policy's own tokens: a base URL with prompt_logprobs, or the folder of a model "
        "or an adapter; opsd without one: the version that training starts from",
    )
    teacher_model: str = Field(default="", description="the teacher's name on its server")
    opd_weight: float = Field(
        default=1.0, gt=0, description="weight of the KL to the teacher relative to the reward's advantage"
    )
    hint: str = Field(
        default="solved",
        pattern=r"^(solved|(task|evidence)(\.[^.]+)+)$",
        description="opsd: what the teacher is shown besides: solved (another attempt), task.KEY or evidence.KEY",
    )
    old_logprobs: Literal["auto", "recorded", "recomputed"] = Field(
        default="auto",
        description="denominator of the ratio: logprobs recorded when sampling, or recomputed by the trainer",
    )
    correction: Literal["none", "truncate"] = Field(
        default="none", description="importance weights for off-policy rollouts: truncated at correction_high"
    )
    correction_high: float = Field(default=2.0, ge=1, description="largest importance weight of a token")
    step_rewards: Literal["episode", "environment", "search"] = Field(
        default="episode",
        description="rewards that advantages are computed from; environment, search: per turn, from its reward-to-go",
    )
    discount: float = Field(default=1.0, gt=0, le=1, description="discount factor of step rewards, per turn")
    state_weight: float = Field(
        default=0.0,
        ge=0,
        description="weight of the advantage among the group's turns in the same state (GiGPO); 0: off",
    )
    tree: Literal["path", "proposals"] = Field(
        default="path",
        description="what of a search tree is trained on: the acted path, or all proposals (dpo: best and worst)",
    )
    imitate_above: float = Field(
        default=0.0, description="sft, rejection-sampling: train on episodes with a reward above this"
    )
    keep_best: int = Field(
        default=1, ge=1, description="rejection-sampling: train on so many of a task's episodes, the best ones"
    )
    dpo_beta: float = Field(
        default=0.1, gt=0, description="dpo: how strongly the policy is held to the version that training starts from"
    )
    weight_decay: float = Field(
        default=0.0, ge=0, description="weight decay of AdamW, per step and unit of learning rate"
    )
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up of the learning rate, in optimiser steps")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="learning rate after the warm-up: constant, or decayed to 0"
    )
    max_tokens_per_micro_batch: int = Field(
        default=4096, ge=1, description="tokens of one forward and backward pass; fewer need less memory"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="recompute activations in the backward pass: less memory, slower"
    )
    checkpoint_steps: int = Field(
        default=20, ge=0, description="optimiser steps between checkpoints; 0: no checkpoints"
    )
    sharding: Literal["auto", "none", "layers"] = Field(
        default="auto", description="sharding of the base model over processes (FSDP2); auto: accelerate's"
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the order of samples and of new weights")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        default="auto", description="floating-point type of the base model; auto: bfloat16 where the processor has it"
    )
    tracker: Literal["none", "mlflow", "tensorboard", "trackio", "wandb"] = Field(
        default="none", description="experiment tracker besides metrics.jsonl"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.old_logprobs == "recorded" and self.correction != "none":
            raise ValueError(
                'old_logprobs = "recorded" leaves no importance weights to correct by: leave "auto", or set correction '
                '= "none"'
            )
        if self.algorithm == "opd" and not self.teacher:
            raise ValueError('algorithm = "opd" learns from a teacher: set teacher, or algorithm = "opsd" with a hint')
        return self

    def check_engine(self) -> None:
        """Raise ``ConfigError`` for what another engine than ours has no counterpart for."""
        if self.engine != LOCAL:
            registry.find("training_engines", self.engine).check_settings(self)

    @property
    def taught(self) -> bool:
        """Whether a teacher scores what is trained."""
        return bool(self.teacher) or self.algorithm == "opsd"

    def check_servable(self) -> None:
        """Raise ``ConfigError`` for settings whose result no running server can load as an adapter."""
        if self.method == "full":
            raise ConfigError(
                '[rl.training] method = "full" makes a whole model, which no running server loads: `train` it, start '
                'a server with its folder, or set method = "lora"'
            )


class SamplingSettings(Settings):
    """``[rl.sampling]``: sampling of rollouts. All but the temperature and the seed are neutral by default.

    Reinforcement learning divides the logits by the temperature, and has no gradient for the others: answers sampled
    with a ``top_p``, ``top_k`` or ``min_p`` are imitated or preferred, not reinforced.
    """

    temperature: float = Field(
        default=1.0, ge=0, le=10, description="sampling temperature of rollouts; 0: greedy, which RL cannot train on"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus sampling: share of probability; RL needs 1")
    top_k: int = Field(default=-1, ge=-1, description="sample among so many likeliest tokens; -1: all; RL needs -1")
    min_p: float = Field(
        default=0.0, ge=0, le=1, description="least probability of a token, as a share of the likeliest's; RL needs 0"
    )
    seed: int = Field(default=0, ge=0, description="seed of the run; every episode derives its own from it")


class VerifierSettings(Settings):
    """``[rl.verifier]``: labels, data and calibration of `openhands-rl train --verifier`."""

    label: str = Field(
        default="resolved",
        min_length=1,
        description="target: resolved (from the evidence), or a reward's name: its stored scores of at least 1",
    )
    max_length: int = Field(
        default=10_240,
        ge=1,
        description="tokens of an episode and the question about it; longer episodes are cut in the middle",
    )
    negatives: float = Field(default=1.0, ge=0, description="failures per success in training; 0: all")
    held_out: float = Field(
        default=0.2, gt=0, lt=1, description="fraction of the tasks for evaluation, never trained on"
    )
    calibration: Literal["none", "temperature", "platt"] = Field(
        default="none",
        description="how predictions are made probabilities, on the held-out tasks: temperature or Platt scaling; "
        "needs 50 episodes",
    )


class LoopSettings(Settings):
    """``[rl.loop]``: synchronous or asynchronous rollouts, the staleness they may have, and the sizes of a run."""

    kind: Literal["sync", "async"] = Field(
        default="sync",
        description="sync: rollouts and training in turn; async: rollouts continue while the policy is trained",
    )
    max_staleness: int = Field(
        default=1, ge=0, le=64, description="async: policy versions that an episode may be behind the policy it trains"
    )
    patience: float = Field(
        default=600.0, ge=0, description="seconds that the model server may be unreachable before the run ends"
    )
    iterations: int = Field(default=5, ge=0, description="how often tasks are rolled out, trained on and published")
    tasks_per_iteration: int = Field(default=8, ge=1, description="training tasks rolled out per iteration")
    min_success: float = Field(
        default=0.1, ge=0, le=1, description="tasks of a lower success rate in their newest attempts are passed over"
    )
    max_success: float = Field(
        default=0.9, ge=0, le=1, description="tasks of a higher one are passed over; from 0 to 1: none is"
    )
    samples_per_task: int = Field(
        default=8, ge=1, description="episodes per task: the group size; 1 where none are compared"
    )
    training_max_turns: int = Field(
        default=0, ge=0, description="completions per training episode; 0: max_turns, as of the held-out episodes"
    )
    held_out: int = Field(
        default=50, ge=1, description="tasks to evaluate on before and after training, never trained on"
    )
    demonstrations: int = Field(
        default=0,
        ge=0,
        description="webshop, repair: scripted episodes to fine-tune the policy on before the iterations; 0: none",
    )
    warm_start_epochs: int = Field(default=2, ge=1, description="passes over the demonstrations")
    warm_start_rate: float = Field(
        default=0.0, ge=0, le=1, description="its learning rate, which decays to 0; 0: learning_rate of [rl.training]"
    )
    warm_start_batch_size: int = Field(
        default=0, ge=0, description="episodes per optimiser step of it; 0: batch_size of [rl.training]"
    )
    base_held_out: int = Field(
        default=0, ge=0, description="held-out tasks before any training, when failures are slow; 0: all of held_out"
    )
    evaluation_strategy: Annotated[str, registry.registered("strategies", besides=("",))] = Field(
        default="", description="rollout_strategy of the held-out episodes, without options; empty: as in training"
    )

    @property
    def staleness(self) -> int:
        """Policy versions that an episode may be behind: none where rollouts and training take turns."""
        return 0 if self.kind == "sync" else self.max_staleness

    @property
    def kept_versions(self) -> int:
        """Versions that a server must keep loaded, so that running episodes can finish on theirs."""
        return 2 if self.kind == "sync" else self.max_staleness + 1

    @property
    def stages(self) -> int:
        """Number of stages of a run: iterations, evaluations, and those of a warm start on demonstrations."""
        return self.iterations + ((5 if self.iterations else 4) if self.demonstrations else 2)


AUTO = "auto"
"""``[rl] engine``: an OpenAI-compatible client for a URL, the embedded generator for a model's directory."""

_SECRET_KEY = re.compile(r"(^|_)(api_?key|password|passwd|secret|token|credentials?)\Z", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"\w://[^/@\s]*:[^/@\s]*@")


class StorageSettings(Settings):
    """``[rl.storage]``: where trajectories are stored."""

    path: str = Field(default="~/.openhands/rl_trajectories", min_length=1, description="directory of the file storage")
    durable: bool = Field(default=True, description="acknowledge a write only after it reached the disk")
    uri_env: VariableName = Field(
        default="", description="NAME of the environment variable with MongoDB's connection string and database"
    )
    options: JsonObject = Field(default_factory=dict, description="options of another package's storage")

    @property
    def directory(self) -> Path:
        """``path`` with ``~`` expanded."""
        return Path(self.path).expanduser()

    def connection_string(self) -> str:
        """The value of the variable ``uri_env``; without one, a local server. Raises ``ConfigError`` if it is unset."""
        return named_key(self.uri_env, "[rl.storage] uri_env") or "mongodb://localhost:27017/"


class ServingSettings(Settings):
    """``[rl.serving]``: the OpenAI-compatible server of the policy, and the folder of its adapters."""

    base_url: HttpUrl = Field(default="", description="OpenAI-compatible endpoint of the policy")
    base_urls: tuple[HttpUrl, ...] = Field(
        default=(), strict=False, description="replicas behind base_url; adapters are published to all or none"
    )
    server: Literal["auto", "embedded", "vllm", "sglang"] = Field(
        default="auto", description="kind of server; auto: detected"
    )
    model: str = Field(default="", description="served name of the base model")
    adapter: SafeName = Field(
        default="policy", description="name of the adapter; its versions are served as NAME-v000001, NAME-v000002, ..."
    )
    adapters_path: str = Field(
        default="~/.openhands/rl_adapters", min_length=1, description="directory of the adapter versions"
    )
    api_key_env: VariableName = Field(default="", description="NAME of the environment variable with the server's key")
    max_adapters: int = Field(default=2, ge=1, le=64, description="adapter versions kept loaded")
    request_timeout: float = Field(default=120.0, gt=0, description="seconds per request")

    @property
    def publish_urls(self) -> tuple[str, ...]:
        """Every server that an adapter is published to; empty without a server."""
        return self.base_urls or ((self.base_url,) if self.base_url else ())

    @property
    def adapters_directory(self) -> Path:
        """``adapters_path`` with ``~`` expanded."""
        return Path(self.adapters_path).expanduser()

    def api_key(self) -> str | None:
        """The value of the variable ``api_key_env``, ``None`` without one. Raises ``ConfigError`` if it is unset."""
        return named_key(self.api_key_env, "[rl.serving] api_key_env") or None


class RewardSettings(Settings):
    """``[rl.reward]``: the reward that training maximises, by ``name``, and its ``options``."""

    name: Annotated[str, registry.registered("rewards")] = Field(
        default="return", description="reward that training maximises"
    )
    options: JsonObject = Field(default_factory=dict, description="options of that reward")
    gateway_min: Bounded = Field(default=-1.0, description="lowest reward that a client may tell the gateway")
    gateway_max: Bounded = Field(default=1.0, description="highest reward that a client may tell the gateway")

    def overridden(self, name: str | None) -> Self:
        """Another reward, without options; these settings for ``None`` and for the same name."""
        return self if name in (None, self.name) else self.model_copy(update={"name": name, "options": {}})


class RLSettings(Settings):
    """The ``[rl]`` section. ``strategy`` and ``environment`` hold the options of the named plugins.

    Other packages add sections with the entry points ``openhands_rl_plugin.sections``, which name subclasses of
    ``Settings``; ``section`` gives them.
    """

    model_config = ConfigDict(extra="allow")

    max_turns: int = Field(default=10, ge=1, description="completions per episode")
    max_prompt_length: int = Field(
        default=2048, ge=1, description="tokens of the longest prompt; an episode ends when its next prompt is longer"
    )
    max_response_length: int = Field(default=512, ge=1, description="tokens per completion")
    max_obs_length: int = Field(default=1024, ge=1, description="tokens per observation; longer ones are truncated")
    react_format: bool = Field(
        default=True, description="true: Thought and Action; false: the whole answer is the action"
    )
    env_name: str = Field(
        default="webshop", max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$", description="name of the environment"
    )
    env_port: int = Field(default=8000, ge=1, le=65535, description="port of the environment's server")
    env_server_base: HttpUrl = Field(
        default="http://127.0.0.1", min_length=1, description="address of the environment's server, without the port"
    )
    rollout_strategy: Annotated[str, registry.registered("strategies")] = Field(
        default="StandardReAct", description="name of the rollout strategy"
    )
    storage_backend: Annotated[str, registry.registered("storages")] = Field(
        default="file", description="name of the trajectory storage"
    )
    engine: Annotated[str, registry.registered("engines", besides=(AUTO,))] = Field(
        default=AUTO, description="source of completions without OpenHands; auto: as the model needs it"
    )
    max_workers: int = Field(default=10, ge=1, le=4096, description="concurrent episodes")
    host: Literal["auto", "v0", "v1"] = Field(
        default="auto", description="OpenHands to run: v0 (openhands-ai 1.6), v1 (its SDK), auto: the installed one"
    )
    executor: Literal["processes", "ray"] = Field(
        default="processes", description="where OpenHands episodes run: local worker processes, or Ray actors"
    )
    strategy: JsonObject = Field(
        default_factory=dict, description="options of the strategy that rollout_strategy names"
    )
    environment: JsonObject = Field(default_factory=dict, description="options of the environment that env_name names")
    engine_options: JsonObject = Field(default_factory=dict, description="options of the engine that engine names")
    storage: StorageSettings = StorageSettings()
    sampling: SamplingSettings = SamplingSettings()
    reward: RewardSettings = RewardSettings()
    training: TrainingSettings = TrainingSettings()
    verifier: VerifierSettings = VerifierSettings()
    loop: LoopSettings = LoopSettings()
    serving: ServingSettings = ServingSettings()
    workspace: WorkspaceSettings = WorkspaceSettings()

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, data: Any, handler: Handler[Self]) -> Self:
        if lines := [*_secrets(data)]:
            raise ConfigError("\n".join(lines))
        with _explained(cls):
            settings = handler(_with_sections(data, cls))
        # A plugin is imported only if it has options here; a reward also if it was chosen, as it may require some.
        if settings.strategy:
            registry.check_options("strategies", settings.rollout_strategy, settings.strategy)
        if settings.environment:
            registry.check_options("environments", settings.env_name, settings.environment)
        if settings.reward != RewardSettings():
            registry.check_options("rewards", settings.reward.name, settings.reward.options)
        return settings

    def section[S: Settings](self, name: str, kind: type[S]) -> S:
        """The section ``[rl.NAME]`` of another package; its defaults where the file has none."""
        found = (self.model_extra or {}).get(name)
        return found if isinstance(found, kind) else kind()

    @property
    def environment_url(self) -> str:
        """``env_server_base`` with ``env_port``, unless the base names a port itself."""
        parts = urlsplit(self.env_server_base)
        address = parts.netloc if parts.port is not None else f"{parts.netloc}:{self.env_port}"
        return urlunsplit(parts._replace(netloc=address))

    def limits(self) -> Limits:
        """The limits of one episode."""
        return Limits(**{name: getattr(self, name) for name in Limits.model_fields if name in RLSettings.model_fields})

    def sampling_params(self, seed: int | None = None) -> SamplingParams:
        """The sampling parameters of one episode, with its own ``seed``."""
        own: dict[str, Any] = {**NEUTRAL_PARAMETERS, **self.sampling.model_dump(), "seed": seed}
        return SamplingParams(**own, max_tokens=self.max_response_length)


def section_of(location: Location) -> str:
    """``("training", "seed")`` -> ``"[rl.training]"``."""
    return f"[{'.'.join(('rl', *location[:-1]))}]"


@contextmanager
def _explained(model: type[BaseModel], *above: str) -> Iterator[None]:
    """Turns wrong values into a ``ConfigError`` with a line each; ``above``: the section of ``[rl]``."""
    try:
        yield
    except ValidationError as error:
        found = [((*above, *at), what) for at, what in problems(error, model)]
        lines = (f"{section_of(at)} {at[-1] if at else ''}: {what}" for at, what in found)
        raise ConfigError("\n".join(lines)) from error


def _with_sections(data: Any, model: type[BaseModel]) -> Any:
    """The data with the sections of other packages validated."""
    found = dict(data) if isinstance(data, Mapping) else {}
    for name in [each for each in found if each not in model.model_fields and not isinstance(found[each], Settings)]:
        if name not in (guests := registry.names("sections")):
            raise ConfigError(f"[rl] {name}: unknown key; {available([*model.model_fields, *guests])}")
        kind: type[Settings] = registry.load("sections", name)
        with _explained(kind, name):
            found[name] = kind.model_validate(found[name])
    return found if isinstance(data, Mapping) else data


def _secrets(data: object, prefix: Location = ()) -> Iterator[str]:
    for key, value in data.items() if isinstance(data, Mapping) else ():
        location = (*prefix, str(key))
        if isinstance(value, Mapping):
            yield from _secrets(value, location)
        elif _SECRET_KEY.search(str(key)):
            yield (
                f"{section_of(location)} {key}: secrets are not read from configuration; put it into an environment "
                'variable and name that one: api_key_env = "NAME" in [rl.serving]'
            )
        elif isinstance(value, str) and _URL_WITH_PASSWORD.search(value):
            yield f"{section_of(location)} {key}: the URL holds a password; remove it and use an environment variable"
