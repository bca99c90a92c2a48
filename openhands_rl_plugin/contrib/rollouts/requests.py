"""What a trainer submits: Polar's ``TaskRequest``, of which everything is used or refused, and nothing is ignored."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from openhands_rl_plugin.config.rollout import PlayOptions
from openhands_rl_plugin.contrib.rollouts.settings import ServiceOptions
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.redaction import redact_json
from openhands_rl_plugin.core.types import Frozen, JsonObject, JsonValue

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.rollout.tasks import GivenTask

TASK, ROW_ID, PLAY_SECONDS, SEED = "task", "instance_id", "agent_timeout", "eval_sampling_seed_base"
"""Keys of ``metadata``: the task, or the id of one; a bound for the play alone; the seed of the first episode."""
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    "top_p": (None, 1, 1.0),
    "stop": (None, [], ""),
}
_NEUTRAL_BODY: dict[str, tuple[JsonValue, ...]] = {
    "top_k": (None, -1, 0),
    "stop_token_ids": (None, []),
    "min_tokens": (None, 0),
    "repetition_penalty": (None, 1, 1.0),
    "skip_special_tokens": (None, True, False),
    "no_stop_trim": (None, True, False),
}
"""What Slime's bridge sends with evaluations by default. The last two say how answers are written as text."""
_HARNESSES = {"openhands_sdk": "v1", "openhands": "auto", "openhands_v0": "v0", "openhands_v1": "v1"}
_MODEL_KWARGS = {"temperature": "temperature", "max_tokens": "max_response_length"}
_SETTINGS = {"step_limit": "max_turns"} | {
    name: name
    for name in (
        *("strategy", "suite", "temperature", "native_tool_calling", "max_turns", "max_prompt_length"),
        *("max_response_length", "max_obs_length"),
    )
}


def _callback(value: str | None) -> str | None:
    parts = urlsplit(value or "http://x")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// URL")
    if "@" in parts.netloc:
        raise ValueError("must hold no password: it would be stored")
    return value


def _printable(value: str) -> str:
    if re.search(r"[\x00-\x1f\x7f/\\]", value):
        raise ValueError("may hold no slashes and no control characters")
    return value


def _absent(value: object) -> None:
    if value is not None:
        raise ValueError("is not offered: a task has its own workspace and its own tests; leave it out")


_Absent = Annotated[None, BeforeValidator(_absent)]


class Agent(Frozen):
    """``harness``: which OpenHands; ``settings``: ``step_limit``, ``model_kwargs``, and fields of ``PlayOptions``."""

    model_config = ConfigDict(extra="forbid")

    harness: str = "openhands"
    model_name: str | None = Field(default=None, max_length=500)
    settings: JsonObject = Field(default_factory=dict)


class Builder(Frozen):
    """Turns whose prompts extend each other are one trace; where none do, that is what ``per_request`` makes."""

    model_config = ConfigDict(extra="forbid")

    strategy: Literal["prefix_merging", "per_request"] = "prefix_merging"
    config: JsonObject = Field(default_factory=dict, max_length=0)


class TaskRequest(Frozen):
    """``num_samples`` episodes of one task, which are a group.

    ``dispatch_priority``: higher ones begin before lower ones that wait. ``early_stop_min_usable_sessions``: as soon
    as so many episodes can be trained on, the rest is cancelled. ``timeout_seconds``: of the play of each episode.
    ``metadata`` comes back with each result.
    """

    model_config = ConfigDict(extra="forbid")

    task_id: Annotated[str, AfterValidator(_printable)] = Field(min_length=1, max_length=150)
    instruction: str = ""
    num_samples: int = Field(default=1, ge=1, le=1024)
    dispatch_priority: int = Field(default=0, ge=0, le=100)
    early_stop_min_usable_sessions: int | None = Field(default=None, ge=1)
    timeout_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    runtime: _Absent = None
    agent: Agent = Agent()
    builder: Builder = Builder()
    evaluator: _Absent = None
    callback_url: Annotated[str | None, AfterValidator(_callback)] = Field(default=None, max_length=2000)
    metadata: JsonObject = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> TaskRequest:
        if (self.early_stop_min_usable_sessions or 1) > self.num_samples:
            raise ValueError("early_stop_min_usable_sessions cannot be more than num_samples")
        return self

    @property
    def task(self) -> GivenTask:
        """Its id or its row. Raises ``ConfigError`` where there is none."""
        found = self.metadata.get(TASK) or self.metadata.get(ROW_ID)
        if not isinstance(found, str | dict) or not found:
            raise ConfigError(
                f"metadata.{TASK}: which task? give an id (webshop-3, one of swe-local) or a row of a data set; the "
                "instruction alone has no environment and no tests"
            )
        if isinstance(found, str) and (len(found) > 500 or re.search(r"[/\\\0]|\.(jsonl|json|parquet)$", found)):
            raise ConfigError(f"metadata.{TASK}: give an id or a row: files of this machine are not read for clients")
        return found

    @property
    def told(self) -> JsonObject:
        """``metadata`` without the row of the task, which the trainer has, and without secrets."""
        row = self.metadata.get(TASK)
        rest = {name: value for name, value in self.metadata.items() if name != TASK or not isinstance(row, dict)}
        return redact_json(rest)

    @property
    def policy_version(self) -> int | None:
        """The weights that the trainer had when it submitted the task, where it says so."""
        found = self.metadata.get("policy_version")
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    @property
    def bound(self) -> str:
        """The field that bounds the seconds of the play."""
        return f"metadata.{PLAY_SECONDS}" if _seconds(self.metadata.get(PLAY_SECONDS)) else "timeout_seconds"

    @property
    def digest(self) -> str:
        """What tells one request from another of the same ``task_id``."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def options(self, service: ServiceOptions, sample: int, run_id: str, base_url: str | None = None) -> PlayOptions:
        """How an episode of the task is played; ``base_url``: its own endpoint. Raises ``ConfigError`` for what is not
        offered."""
        own: dict[str, object] = {
            "base_url": base_url,
            "model": self.agent.model_name,
            "host": self._host(),
            **self._settings(),
        }
        seconds = _seconds(self.metadata.get(PLAY_SECONDS)) or self.timeout_seconds
        own["timeout"] = min(seconds, service.timeout)
        first = self.metadata.get(SEED)
        if isinstance(first, int) and not isinstance(first, bool):
            own["seed"] = first + sample
        names = {"run_id": run_id, "group_id": self.task_id, "sample": sample}
        try:
            return service.options(**own, **names)
        except ValidationError as error:
            at = error.errors()[0]
            raise ConfigError(f"agent.settings.{'.'.join(map(str, at['loc']))}: {at['msg']}") from error

    def _host(self) -> str | None:
        harness = self.agent.harness
        if harness not in _HARNESSES:
            raise ConfigError(f"agent.harness: {harness!r} is not played here; give one of {', '.join(_HARNESSES)}")
        return None if _HARNESSES[harness] == "auto" else _HARNESSES[harness]

    def _settings(self) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in self.agent.settings.items():
            if name == "model_kwargs" and isinstance(value, dict):
                found |= _sampling(value)
            elif name in _SETTINGS:
                found[_SETTINGS[name]] = value
            else:
                raise ConfigError(f"agent.settings.{name}: not offered; known are model_kwargs, {', '.join(_SETTINGS)}")
        return found


def _sampling(given: JsonObject) -> dict[str, object]:
    """Raises ``ConfigError`` for what would make answers that are no samples of the policy."""
    body = given.get("extra_body") or {}
    if not isinstance(body, dict):
        raise ConfigError("agent.settings.model_kwargs.extra_body: must be an object")
    for at, values, neutral in (("", given, _NEUTRAL), ("extra_body.", body, _NEUTRAL_BODY)):
        for name, value in values.items():
            known = not at and (name in _MODEL_KWARGS or name == "extra_body")
            if not known and value not in neutral.get(name, ()):
                raise ConfigError(
                    f"agent.settings.model_kwargs.{at}{name}: not offered: answers sampled with it are no samples of "
                    "the policy; leave it out"
                )
    return {field: given[name] for name, field in _MODEL_KWARGS.items() if name in given}


def _seconds(value: JsonValue) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(f"metadata.{PLAY_SECONDS}: must be a positive number of seconds")
    return float(value)
