"""Polar's ``TaskRequest`` and ``SessionResult``: what a trainer submits, and what it gets. Nothing given is ignored."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from openhands_rl_plugin.apps.rollout.rollout import TIMED_OUT, PlayedRollout
from openhands_rl_plugin.config.rl import VariableName
from openhands_rl_plugin.config.rollout import PlayOptions
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.redaction import redact_json, redact_text
from openhands_rl_plugin.core.servers import API_KEY
from openhands_rl_plugin.core.templates import calls_in_text, without_calls
from openhands_rl_plugin.core.types import Frozen, JsonObject, JsonValue, Message

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.rollout.play import GivenTask

COMPLETED, TIMEOUT, ERROR = "COMPLETED", "TIMEOUT", "ERROR"
_TASK, _ROW_ID, _SECONDS, _SEED = "task", "instance_id", "agent_timeout", "eval_sampling_seed_base"
"""Keys of ``metadata``: the task, or the id of one; a bound for the play alone; the seed of the first episode."""
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {
    **{"top_p": (1,), "top_k": (-1, 0), "min_tokens": (0,), "repetition_penalty": (1,), "stop": ([], "")},
    **{"stop_token_ids": ([],), "skip_special_tokens": (True, False), "no_stop_trim": (True, False)},
}
"""Neutral values that Slime's bridge sends by default with evaluations. The last two concern only detokenisation."""
_HOSTS = {"openhands": None, "openhands_sdk": "v1", "openhands_v0": "v0", "openhands_v1": "v1"}
_NAMES = ("strategy", "suite")
_FACTS = {"trajectory_id", "reward_version", "resolved", "stop", "turns", "usage", "failure"}
_PLACE = re.compile(r"[/\\\0:]|\.(jsonl|json|parquet)$")
_SETTINGS = {"step_limit": "max_turns"} | dict.fromkeys((*_NAMES, "temperature", "native_tool_calling"))
_SETTINGS |= dict.fromkeys(("max_turns", "max_prompt_length", "max_response_length", "max_obs_length"))


class ServiceOptions(PlayOptions):
    """The service. A task may name another model, sampling and limits; the rest is the service's."""

    listen: str = Field(default="127.0.0.1", description="address to listen on; any but loopback needs a key")
    port: int = Field(default=8500, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    service_key_env: VariableName = Field(
        default=API_KEY, description="NAME of the environment variable with the key that clients must send"
    )
    workers: int = Field(default=1, ge=1, le=1024, description="Ray actors, each with a CPU of its machine")
    concurrency: int = Field(default=4, ge=1, le=256, description="episodes that each worker rolls out at a time")

    def options(self, **own: object) -> PlayOptions:
        """The options of one episode, with ``own`` over those of the service. Raises ``ValidationError``."""
        common: dict[str, object] = {name: getattr(self, name) for name in PlayOptions.model_fields}
        return PlayOptions.model_validate(common | {name: value for name, value in own.items() if value is not None})


class Agent(Frozen):
    """``harness``: which OpenHands; ``settings``: ``step_limit``, ``model_kwargs``, and fields of ``PlayOptions``."""

    harness: Literal["openhands", "openhands_sdk", "openhands_v0", "openhands_v1"] = "openhands"
    model_name: str | None = Field(default=None, max_length=500)
    settings: JsonObject = Field(default_factory=dict)


class Builder(Frozen):
    """Turns whose prompts extend each other are one trace; where none do, that is what ``per_request`` makes."""

    strategy: Literal["prefix_merging", "per_request"] = "prefix_merging"
    config: JsonObject = Field(default_factory=dict, max_length=0)


class TaskRequest(Frozen):
    """``num_samples`` episodes of one task, which are a group.

    ``dispatch_priority``: higher ones begin before lower ones that wait. ``timeout_seconds``: of each episode. A task
    has its own workspace and tests (``runtime``, ``evaluator``). ``metadata`` comes back with each result.
    """

    task_id: str = Field(min_length=1, max_length=150, pattern=r"^[^\x00-\x1f\x7f/\\]+$")
    instruction: str = ""
    num_samples: int = Field(default=1, ge=1, le=1024)
    dispatch_priority: int = Field(default=0, ge=0, le=100)
    early_stop_min_usable_sessions: None = None
    timeout_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    runtime: None = None
    agent: Agent = Agent()
    builder: Builder = Builder()
    evaluator: None = None
    callback_url: None = None
    metadata: JsonObject = Field(default_factory=dict)

    @property
    def task(self) -> GivenTask:
        """The task's id or row. Raises ``ConfigError`` if the metadata has neither."""
        found = self.metadata.get(_TASK) or self.metadata.get(_ROW_ID)
        if not isinstance(found, str | dict) or not found:
            raise ConfigError(
                f"metadata.{_TASK}: which task? give an id (webshop-3, one of swe-local) or a row of a data set; the "
                "instruction alone has no environment and no tests"
            )
        row = found if isinstance(found, dict) else {}
        source = row.get("source") or {}
        if (
            (isinstance(found, str) and (len(found) > 500 or _PLACE.search(found) or Path(found).is_file()))
            or not isinstance(source, dict)
            or "path" in source
            or not str(source.get("git", "https://")).startswith(("https://", "http://"))
            or ":" in str(row.get("environment", ""))
        ):
            raise ConfigError(f"metadata.{_TASK}: give an id or a row: files of this machine are not read for clients")
        return found

    def options(self, service: ServiceOptions, sample: int, run_id: str) -> PlayOptions:
        """How an episode of the task is rolled out. Raises ``ConfigError`` for what is not offered."""
        own: dict[str, object] = {"model": self.agent.model_name, "host": _HOSTS[self.agent.harness]}
        for name, value in self.agent.settings.items():
            if name == "model_kwargs" and isinstance(value, dict):
                own |= _sampling(value)
            elif name in _NAMES and _PLACE.search(str(value)):
                raise ConfigError(f"agent.settings.{name}: give a name: files of this machine are not read for clients")
            elif name in _SETTINGS:
                own[_SETTINGS[name] or name] = value
            else:
                raise ConfigError(f"agent.settings.{name}: not offered; known are model_kwargs, {', '.join(_SETTINGS)}")
        seconds = self.metadata.get(_SECONDS) or self.timeout_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e9:
            raise ConfigError(f"metadata.{_SECONDS}: must be a positive number of seconds")
        own["timeout"] = min(float(seconds), service.timeout)
        first = self.metadata.get(_SEED)
        if isinstance(first, int) and not isinstance(first, bool):
            own["seed"] = first + sample
        try:
            return service.options(**own, run_id=run_id, group_id=self.task_id, sample=sample)
        except ValidationError as error:
            at = error.errors()[0]
            raise ConfigError(f"agent.settings.{'.'.join(map(str, at['loc']))}: {at['msg']}") from error


def _sampling(given: JsonObject) -> dict[str, object]:
    """Raises ``ConfigError`` for what would make completions that are no samples of the policy."""
    named = {"temperature": "temperature", "max_tokens": "max_response_length"}
    body = given.get("extra_body") or {}
    others = {name: value for name, value in given.items() if name not in {*named, "extra_body"}}
    for name, value in {**others, **(body if isinstance(body, dict) else {"extra_body": body})}.items():
        if value is not None and value not in _NEUTRAL.get(name, ()):
            raise ConfigError(
                f"agent.settings.model_kwargs: {name} is not offered: completions sampled with it are no samples of "
                "the policy; leave it out"
            )
    return {field: given[name] for name, field in named.items() if name in given}


class Result(NamedTuple):
    """A ``SessionResult``, ``body`` as JSON."""

    state: str
    body: str


def session_result(
    request: TaskRequest,
    session_id: str,
    outcome: PlayedRollout | tuple[str, str],
    *,
    timing: dict[str, float],
    node: str | None = None,
) -> Result:
    """The result of an episode, or, where there is none, of the kind and the reason of its failure.

    A failed one has no reward and no traces. ``timing``: milliseconds.
    """
    # Without the row of the task, which the trainer has, and without secrets.
    row = isinstance(request.metadata.get(_TASK), dict)
    metadata = redact_json({name: value for name, value in request.metadata.items() if name != _TASK or not row})
    if isinstance(outcome, PlayedRollout):
        failure, count = outcome.failure, outcome.turns
        status = COMPLETED if failure is None else TIMEOUT if failure.boundary == TIMED_OUT else ERROR
        error = None if failure is None else failure.message
        valid = failure is None and outcome.reward is not None
        traces = [_trace(outcome, at) for at in range(len(outcome.segments))] if valid else []
        facts = outcome.model_dump(mode="json", include=_FACTS)
    else:
        status, count, error, traces = ERROR, 0, redact_text(outcome[1]), []
        facts = {"failure": {"kind": outcome[0], "message": error}}
    head = {"builder": "prefix_merging", "record_count": count, "task_metadata": metadata}
    body = {
        "session_id": session_id,
        "task_id": request.task_id,
        "status": status,
        "trajectory": {"status": status, "metadata": head, "traces": traces, "error": error},
        "timing": timing,
        "node_id": node,
        "error": error,
        "metadata": {**metadata, "openhands_rl": facts},
    }
    return Result(status, json.dumps(body, allow_nan=False, separators=(",", ":")))


def _trace(rollout: PlayedRollout, at: int) -> dict[str, Any]:
    """The sequence number ``at``, with the messages on the last one.

    Completions that are no samples of the policy (``off_policy``) are masked, because every bridge reinforces what is
    not.
    """
    sample, last = rollout.segments[at], at == len(rollout.segments) - 1
    known = all(map(math.isfinite, sample.logprobs))
    why = rollout.off_policy or ("" if known else "a logprob is not finite")
    metadata: JsonObject = {"policy": "" if sample.policy is None else sample.policy.served_name}
    if why:
        metadata["training_filter"] = {"masked": True, "reason": "off_policy", "detail": why}
    start = sample.mask.index(True)
    shown = rollout.messages if last else ()
    first = next((at for at, each in enumerate(shown) if each.role == "assistant"), len(shown))
    # Polar takes a call in the text for one that its server could not parse, and the reward away from its trace.
    answers = [_with_calls(message, rollout.tools) for message in shown[first:]]
    return {
        "prompt_ids": [*sample.input_ids[:start]],
        "response_ids": [*sample.input_ids[start:]],
        "loss_mask": [int(own and not why) for own in sample.mask[start:]],
        "response_logprobs": [*sample.logprobs[start:]] if known else None,
        "prompt_messages": [to_wire(message) for message in shown[:first]],
        "response_messages": [to_wire(message) for message in answers],
        "tools": [*rollout.tools] or None,
        "finish_reason": "length" if last and rollout.cut_short else "stop",
        "reward": rollout.reward,
        "metadata": metadata,
    }


def _with_calls(message: Message, tools: Sequence[JsonObject]) -> Message:
    """An answer with the calls that stand in its text as calls; any other message as it is."""
    found = () if message.role != "assistant" or message.tool_calls else calls_in_text(message.content or "", tools)
    calls = tuple(call.model_copy(update={"id": f"toolu_{at:02d}"}) for at, call in enumerate(found, 1))
    parsed = {"tool_calls": calls, "content": without_calls(message.content or "") or None}
    return message.model_copy(update=parsed) if calls else message
