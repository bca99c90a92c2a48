"""The settings of the ``[rl]`` section as frozen models.

Every model refuses unknown keys and values of another type. A wrong setting raises ``ConfigError`` with one line a
field, each naming the section, the key and the remedy; secrets are referred to by environment-variable name only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, ValidationInfo, model_validator
from pydantic import ModelWrapValidatorHandler as Handler

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.fields import DatabaseName, HttpUrl, SafeName, Settings, VariableName
from openhands_rl_plugin.config.loop import LoopSettings as LoopSettings
from openhands_rl_plugin.config.sampling import SamplingSettings as SamplingSettings
from openhands_rl_plugin.config.training import AlgorithmName as AlgorithmName
from openhands_rl_plugin.config.training import TrainingSettings as TrainingSettings
from openhands_rl_plugin.config.verifier import VerifierSettings as VerifierSettings
from openhands_rl_plugin.config.workspace import WorkspaceSettings as WorkspaceSettings
from openhands_rl_plugin.core.errors import ConfigError, Location, instead, problems
from openhands_rl_plugin.core.types import JsonObject, Limits, SamplingParams

Locate = Callable[[Location], str]
"""Gives the section that a setting was read from."""

AUTO = "auto"
"""``[rl] engine``: an OpenAI-compatible client for a URL, the embedded generator for a model's directory."""

IN_PROCESS = "transformers"
"""The engine of the embedded generator."""

# What ``config.build`` knows itself. Only the names matter where options are checked.
_KNOWN_TO_ENGINES = {"model": "m", "base_model": "m", "base_url": "http://m/v1", "timeout": 1.0, "api_key": "k"}
_KNOWN_TO_STORAGES = {"path": "p", "durable": True}
_BUILT_IN_STORAGES = frozenset({"file", "mongodb"})

_SECRET_KEY = re.compile(r"(^|_)(api_?key|password|passwd|secret|token|credentials?)\Z", re.IGNORECASE)
_URL_WITH_PASSWORD = re.compile(r"\w://[^/@\s]*:[^/@\s]*@")


class StorageSettings(Settings):
    """``[rl.storage]``: where trajectories are stored."""

    path: str = Field(default="~/.openhands/rl_trajectories", min_length=1, description="directory of the file storage")
    durable: bool = Field(default=True, description="acknowledge a write only after it reached the disk")
    uri_env: VariableName = Field(
        default="", description="NAME of the environment variable with MongoDB's connection string"
    )
    database: DatabaseName = Field(default="openhands_rl", description="name of the MongoDB database")
    options: JsonObject = Field(default_factory=dict, description="options of another package's storage")

    @property
    def directory(self) -> Path:
        """``path`` with ``~`` expanded."""
        return Path(self.path).expanduser()

    def connection_string(self, environ: Mapping[str, str] | None = None) -> str:
        """The value of the variable ``uri_env``; without one, a local server. Raises ``ConfigError`` if it is unset."""
        if not self.uri_env:
            return "mongodb://localhost:27017/"
        if found := (os.environ if environ is None else environ).get(self.uri_env):
            return found
        raise ConfigError(
            f"[rl.storage] uri_env: the environment variable {self.uri_env} is not set; "
            f"export {self.uri_env}=mongodb://..., or remove the line"
        )


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
    max_lora_rank: int = Field(default=0, ge=0, description="the server's maximum rank of an adapter; 0: unknown")
    request_timeout: float = Field(default=120.0, gt=0, description="seconds per request")

    @property
    def publish_urls(self) -> tuple[str, ...]:
        """Every server that an adapter is published to; empty without a server."""
        return self.base_urls or ((self.base_url,) if self.base_url else ())

    @property
    def adapters_directory(self) -> Path:
        """``adapters_path`` with ``~`` expanded."""
        return Path(self.adapters_path).expanduser()

    def api_key(self, environ: Mapping[str, str] | None = None) -> str | None:
        """The value of the variable ``api_key_env``, ``None`` without one. Raises ``ConfigError`` if it is unset."""
        if not self.api_key_env:
            return None
        if key := (os.environ if environ is None else environ).get(self.api_key_env):
            return key
        raise ConfigError(
            f"[rl.serving] api_key_env: the environment variable {self.api_key_env} is not set; "
            f"export {self.api_key_env}=... or remove the line"
        )


class RewardSettings(Settings):
    """``[rl.reward]``: the reward that training maximises, by ``name``, and its ``options``."""

    name: Annotated[str, registry.registered("rewards")] = Field(
        default="return", description="reward that training maximises"
    )
    options: JsonObject = Field(default_factory=dict, description="options of that reward")
    gateway_min: FiniteFloat = Field(default=-1.0, description="lowest reward that a client may tell the gateway")
    gateway_max: FiniteFloat = Field(default=1.0, description="highest reward that a client may tell the gateway")

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
        default="auto",
        description="OpenHands to run: v0 (openhands-ai 1.6), v1 (its SDK), auto: the installed one",
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
    def _explain(cls, data: Any, handler: Handler[Self], info: ValidationInfo) -> Self:
        locate: Locate = (info.context or {}).get("locate", section_of)
        if lines := [*_secrets(data, locate)]:
            raise ConfigError("\n".join(lines))
        try:
            data, lines = _with_sections(data, cls, locate)
            settings = handler(data)
        except ValidationError as error:
            lines += [f"{locate(at)} {at[-1] if at else ''}: {what}" for at, what in problems(error, cls)]
            raise ConfigError("\n".join(lines)) from error
        if lines := [*lines, *_wrong_options(settings, locate), *_unservable(settings, locate)]:
            raise ConfigError("\n".join(lines))
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


def _with_sections(data: Any, model: type[BaseModel], locate: Locate) -> tuple[Any, list[str]]:
    """The data with the sections of other packages validated, and a line for each wrong key in them."""
    found, lines = dict(data) if isinstance(data, Mapping) else data, list[str]()
    others = [each for each in found if each not in model.model_fields] if isinstance(data, Mapping) else []
    for name in [each for each in others if not isinstance(found[each], Settings)]:
        if name not in registry.names("sections"):
            known = [*model.model_fields, *registry.names("sections")]
            lines.append(f"{locate((name,))} {name}: unknown key;{instead(name, known)}")
            del found[name]
            continue
        kind: type[Settings] = registry.load("sections", name)
        try:
            found[name] = kind.model_validate(found[name])
        except ValidationError as error:
            lines += [f"{locate((name, *at))} {at[-1] if at else ''}: {what}" for at, what in problems(error, kind)]
            del found[name]
    return found, lines


def _wrong_options(settings: RLSettings, locate: Locate) -> Iterator[str]:
    """One line per wrong option of a plugin. A strategy or environment is imported only if it has options; a reward
    also if it was chosen, as it may require some."""
    strategy, environment, reward = settings.rollout_strategy, settings.env_name, settings.reward
    if settings.strategy:
        yield from _wrong_section(("strategy",), "strategies", strategy, settings.strategy, locate)
    if settings.environment:
        yield from _wrong_section(("environment",), "environments", environment, settings.environment, locate)
    if settings.engine in (AUTO, IN_PROCESS):
        for key in settings.engine_options:
            yield f"{locate(('engine_options', key))} {key}: the engine {settings.engine!r} has no options"
    else:
        given = _known(_KNOWN_TO_ENGINES, "engines", settings.engine) | settings.engine_options
        yield from _wrong_section(("engine_options",), "engines", settings.engine, given, locate)
    if settings.storage_backend in _BUILT_IN_STORAGES:
        for key in settings.storage.options:
            yield f"{locate(('storage', 'options', key))} {key}: its options are those of [rl.storage] itself"
    else:
        given = _known(_KNOWN_TO_STORAGES, "storages", settings.storage_backend) | settings.storage.options
        yield from _wrong_section(("storage", "options"), "storages", settings.storage_backend, given, locate)
    if reward != RewardSettings():
        yield from _wrong_section(("reward", "options"), "rewards", reward.name, reward.options, locate)


def _known(known: JsonObject, kind: registry.Kind, name: str) -> JsonObject:
    try:
        declared = registry.option_names(kind, name)
    except ConfigError:
        return {}  # ``_wrong_section`` says why it cannot be loaded
    return {key: value for key, value in known.items() if key in declared}


def _wrong_section(
    section: Location, kind: registry.Kind, name: str, options: JsonObject, locate: Locate
) -> Iterator[str]:
    try:
        registry.check_options(kind, name, options)
    except ConfigError as error:
        for line in str(error).splitlines():
            where, _, what = line.removeprefix(f"{registry.singular(kind)} {name!r}: ").partition(": ")
            keys = tuple(where.split("."))
            if where != line and keys[0].isidentifier():
                yield f"{locate((*section, *keys))} {keys[-1]}: {what}"
            else:
                yield f"{locate((*section, ''))}: {line}"


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
