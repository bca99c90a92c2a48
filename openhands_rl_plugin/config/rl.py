"""The settings of the ``[rl]`` section as frozen models.

Every model refuses unknown keys and values of another type. A wrong setting raises ``ConfigError`` with one line a
field, each naming the section, the key and the remedy; secrets are referred to by environment-variable name only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic import ModelWrapValidatorHandler as Handler

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.fields import HttpUrl, SafeName, Settings, VariableName
from openhands_rl_plugin.config.fields import WorkspaceSettings as WorkspaceSettings
from openhands_rl_plugin.config.training import AlgorithmName as AlgorithmName
from openhands_rl_plugin.config.training import TrainingSettings as TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, Location, available, problems
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS
from openhands_rl_plugin.core.servers import named_key
from openhands_rl_plugin.core.types import Bounded, JsonObject, Limits, SamplingParams


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

    def params(self, *, max_tokens: int | None, seed: int | None) -> SamplingParams:
        """The sampling parameters of one episode."""
        own = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        return SamplingParams(**{**NEUTRAL_PARAMETERS, **own}, max_tokens=max_tokens, seed=seed)


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
        return self.iterations + (5 if self.demonstrations else 2)


AUTO = "auto"
"""``[rl] engine``: an OpenAI-compatible client for a URL, the embedded generator for a model's directory."""

IN_PROCESS = "transformers"
"""The engine of the embedded generator."""

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

    def overridden(self, name: str | None, options: JsonObject | None = None) -> Self:
        """A copy with another reward and the given options, or with other options for the same reward."""
        if options is None:
            options = self.options if name in (None, self.name) else {}
        return self.model_copy(update={"name": name or self.name, "options": options})


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
        return Limits(
            max_turns=self.max_turns,
            max_prompt_length=self.max_prompt_length,
            max_response_length=self.max_response_length,
            max_obs_length=self.max_obs_length,
        )

    def sampling_params(self, seed: int | None = None) -> SamplingParams:
        """The sampling parameters of one episode, with its own ``seed``."""
        return self.sampling.params(max_tokens=self.max_response_length, seed=seed)


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
