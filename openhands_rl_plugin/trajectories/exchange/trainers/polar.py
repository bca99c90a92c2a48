"""Polar's ``Trajectory``, which its bridges to Slime and Miles read: a trace a training sequence, the reward on each.

What is not carried: the temperature (the trainer has one for all), the places of answers, reasoning beside an answer.
A failed episode has a status and an error and no traces, so that nothing of it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.types import JsonObject, JsonValue, Message, Sample
from openhands_rl_plugin.trajectories.exchange.sft import read_answer
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout
from openhands_rl_plugin.trajectories.exchange.trainers.sequences import prompt_length

COMPLETED, TIMEOUT, ERROR = "COMPLETED", "TIMEOUT", "ERROR"
BUILDER = "prefix_merging"
"""What Polar calls one trace for turns whose prompts extend each other."""
TIMED_OUT = "rollout.timeout"
"""The boundary of the failure of an episode that was not over in time."""


def trajectory_of(played: PlayedRollout, task_metadata: JsonObject) -> JsonObject:
    """The trajectory; ``status`` is that of the session, too.

    Answers that are no samples of the policy (``off_policy``) are masked, because every bridge reinforces what is not.
    """
    failure = played.failure
    status = COMPLETED if failure is None else TIMEOUT if failure.boundary == TIMED_OUT else ERROR
    usable = failure is None and played.reward is not None
    return {
        "status": status,
        "metadata": {"builder": BUILDER, "record_count": played.turns, "task_metadata": task_metadata},
        "traces": [_trace(played, at) for at in range(len(played.segments))] if usable else [],
        "error": None if failure is None else failure.message,
    }


def _trace(played: PlayedRollout, at: int) -> JsonValue:
    """The sequence number ``at``. What was said stands on the last one."""
    sample, last = played.segments[at], at == len(played.segments) - 1
    start, said = prompt_length(sample), _split(played.messages) if last else ((), ())
    known = all(map(math.isfinite, sample.logprobs))
    trained = not played.off_policy and known
    metadata: JsonObject = {"policy": "" if sample.policy is None else sample.policy.served_name}
    if not trained:
        why = played.off_policy or "a logprob is not finite"
        metadata["training_filter"] = {"masked": True, "reason": "off_policy", "detail": why}
    return {
        "prompt_ids": [*sample.input_ids[:start]],
        "response_ids": [*sample.input_ids[start:]],
        "loss_mask": [int(own and trained) for own in sample.mask[start:]],
        "response_logprobs": _logprobs(sample, start) if known else None,
        "prompt_messages": [to_wire(message) for message in said[0]],
        "response_messages": [to_wire(_structured(message, played.tools)) for message in said[1]],
        "tools": [*played.tools] or None,
        "finish_reason": "length" if last and played.cut_short else "stop",
        "reward": played.reward,
        "metadata": metadata,
    }


def _logprobs(sample: Sample, start: int) -> list[JsonValue]:
    return [*sample.logprobs[start:]]


def _structured(message: Message, tools: Sequence[JsonObject]) -> Message:
    """Polar takes a call in the text for one that its server could not parse, and the reward away from its trace."""
    return read_answer(message, tools) if message.role == "assistant" and not message.tool_calls else message


def _split(messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """What was said before the first answer, and the rest."""
    first = next((at for at, each in enumerate(messages) if each.role == "assistant"), len(messages))
    return messages[:first], messages[first:]
