"""Trajectories of SWE-agent (``.traj``) and mini-swe-agent, and the data sets of Nebius made of episodes of SWE-agent
and OpenHands.

mini-swe-agent's version 1 (a list of messages, or an object with ``info``) has commands in the text of answers.
Version 2 has tool calls, or output of OpenAI's Responses API. The tools that were offered are not in the record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import JsonValue

from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject, Message, StopReason, Times
from openhands_rl_plugin.trajectories.exchange.foreign import (
    SWE,
    UNKNOWN_TIMES,
    ExchangeError,
    Imported,
    Record,
    at_path,
    chat_messages,
    conversation,
    finished,
    present,
    task_of,
    times_of,
    tools_of,
    without_nulls,
)
from openhands_rl_plugin.trajectories.exchange.formats import Format

_STOPS = {
    "submitted": StopReason.TERMINATED,
    "limitsexceeded": StopReason.MAX_TURNS,
    "timeexceeded": StopReason.TIMEOUT,
    "exit_cost": StopReason.TRUNCATED,
    "exit_context": StopReason.MAX_TOKENS,
    "exit_format": StopReason.NO_ACTION,
    "repeatedformaterror": StopReason.NO_ACTION,
    "exit_forfeit": StopReason.TERMINATED,
    "exit_command_timeout": StopReason.TIMEOUT,
    "exit_total_execution_time": StopReason.TIMEOUT,
    "finished": StopReason.TERMINATED,
    "max_iterations": StopReason.MAX_TURNS,
}
_FAILURES = ("error", "exit_api", "exception", "skipped")


def ending_of(status: str, boundary: str) -> tuple[StopReason | None, Failure | None]:
    """The end that ``status`` names ("submitted (exit_cost)": what cut it short), if it names one."""
    words = status.lower().replace("submitted (", "").rstrip(")").strip()
    if (stop := _STOPS.get(words)) is None and any(word in words for word in _FAILURES):
        failure = Failure(kind=FailureKind.INFRASTRUCTURE, message=status[:500], boundary=boundary)
        return StopReason.ERROR, failure
    return stop, None


_SWE_AGENT, _NEBIUS, _MINI = "swe-agent", "nebius", "mini-swe-agent"
_MINI_FIELDS = (*(f"messages info.{name}" for name in ("exit_status", "submission", "mini_version")),)
_MINI_FIELDS += ("messages trajectory_format",)
_ROLES = {"ai": "assistant", "human": "user"}


def read_swe_agent(record: Record, file: Path) -> Imported:
    """An episode of a ``.traj``: of its history, or of the steps. Raises ``ExchangeError``."""
    messages = record.messages("history") or [*_of_steps(record.records("trajectory"))]
    return _episode(_SWE_AGENT, record, messages, file)


def _of_steps(steps: Sequence[Record]) -> Iterator[Message]:
    for step in steps:
        answer = step.text("response") or "\n\n".join(filter(None, (step.text("thought"), step.text("action"))))
        yield Message(role="assistant", content=answer)
        yield Message(role="user", content=step.text("observation"))


def read_mini(record: Record, file: Path) -> Imported:
    """An episode of mini-swe-agent. Raises ``ExchangeError``."""
    listed = record.records("messages")
    times = times_of(at_path(each.get("extra"), "timestamp") for each in listed)
    return _episode(_MINI, record, chat_messages([*_flat(each.fields for each in listed)]), file, times)


def _episode(
    form: str, record: Record, messages: Sequence[Message], file: Path, times: Times = UNKNOWN_TIMES
) -> Imported:
    if not messages:
        raise ExchangeError("there is no message in it")
    info = record.record("info")
    status, model = info.text("exit_status"), info.record("config").record("model").read(str, "model_name")
    known = present(patch=info.read(str, "submission"), exit_status=status or None, metrics=info.get("model_stats"))
    # They name a file after its task; other names of files say nothing.
    named = re.fullmatch(r"(.+?)\.traj(\.json)?(\.gz)?", file.name)
    task = task_of(messages, SWE, record.text("instance_id"), named and named[1])
    stop, failure = ending_of(status, form)
    tree = conversation(messages, model)
    return finished(tree, form, task, stop, model=model, evidence=known, failure=failure, times=times)


def _flat(messages: Iterator[JsonObject]) -> Iterator[JsonObject]:
    """Chat messages; the one that marks the exit is none."""
    for message in messages:
        if message.get("object") == "response":
            yield _of_response(message)
        elif message.get("type") == "function_call_output":
            yield {**message, "role": "tool", "content": message.get("output")}
        elif message.get("role") != "exit":
            yield message


def _of_response(response: JsonObject) -> JsonObject:
    """The output of OpenAI's Responses API as one chat message."""
    output = response.get("output")
    items = [item for item in output if isinstance(item, dict)] if isinstance(output, list) else []
    texts = [text for item in items if item.get("type") == "message" if (text := text_of(item.get("content")))]
    calls: list[JsonValue] = [
        {**item, "id": item.get("call_id")} for item in items if item.get("type") == "function_call"
    ]
    return {"role": "assistant", "content": "\n".join(texts), "tool_calls": calls, "thinking_blocks": [*items]}


def read_nebius(record: Record) -> Imported:
    """A row of SWE-agent-trajectories (``text`` messages) or of SWE-rebench-openhands-trajectories (chat messages).

    Raises ``ExchangeError``.
    """
    messages = chat_messages([_as_chat(each.fields) for each in record.records("trajectory")])
    if not messages:
        raise ExchangeError("trajectory: is empty")
    solved, status, logs = record.read(bool, "resolved", "target"), record.text("exit_status"), record.get("eval_logs")
    evidence = present(
        resolved=solved,
        patch=record.read(str, "model_patch", "generated_patch"),
        traj_id=record.read(str, "trajectory_id"),
        exit_status=status or None,
        test_result=None if logs is None else {"test_output": without_nulls(logs)},
    )
    stop, failure = ending_of(status, _NEBIUS)
    task, model = task_of(messages, SWE, record.read(str, "instance_id")), record.read(str, "model_name")
    tree = conversation(messages, model, tools_of(record.get("tools")))
    return finished(tree, _NEBIUS, task, stop, model=model, evidence=evidence, resolved=solved, failure=failure)


def _as_chat(message: JsonObject) -> JsonObject:
    """Rows without ``content`` have ``text``, and a system prompt in a field of its own."""
    role = message.get("role")
    text = message.get("content")
    if text is None and not message.get("tool_calls"):
        text = message.get("text") or message.get("system_prompt")
    return {**message, "role": _ROLES.get(str(role), role), "content": text}


SWE_AGENT = Format(_SWE_AGENT, "SWE-agent's .traj", read_swe_agent, has=("trajectory.action trajectory.observation",))
NEBIUS = Format(
    _NEBIUS,
    "Nebius' data sets of SWE-agent and OpenHands episodes",
    lambda record, file: read_nebius(record),
    has=("instance_id trajectory.role",),
)
MINI_SWE_AGENT = Format(_MINI, "trajectories of mini-swe-agent, versions 1 and 2", read_mini, has=_MINI_FIELDS)
