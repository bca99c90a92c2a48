"""Trajectories of SWE-agent (``.traj``) and mini-swe-agent, and the data sets of Nebius made of episodes of SWE-agent
and OpenHands.

mini-swe-agent's version 1 (a list of messages, or an object with ``info``) has commands in the text of answers.
Version 2 has tool calls, or output of OpenAI's Responses API. The tools that were offered are not in the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject, Message, StopReason, Times
from openhands_rl_plugin.trajectories.exchange.episodes import (
    SWE,
    UNKNOWN_TIMES,
    Ending,
    Imported,
    Origin,
    conversation,
    end_of,
    finished,
    name_of,
    reward_of,
    task_of,
    times_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    Conversation,
    ExchangeError,
    Foreign,
    chat_messages,
    parse,
    tools_of,
    without_nulls,
)
from openhands_rl_plugin.trajectories.exchange.formats import Format
from openhands_rl_plugin.trajectories.exchange.reading import CONVERSATION_FILE

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


def ending_of(status: str | None, otherwise: StopReason, boundary: str) -> tuple[StopReason, Failure | None]:
    """The end that ``status`` names ("submitted (exit_cost)": what cut it short), or ``otherwise``."""
    words = (status or "").lower().replace("submitted (", "").rstrip(")").strip()
    if (stop := _STOPS.get(words)) is not None:
        return stop, None
    if any(word in words for word in _FAILURES):
        return StopReason.ERROR, Failure(
            kind=FailureKind.INFRASTRUCTURE, message=(status or "")[:500], boundary=boundary
        )
    return otherwise, None


_SWE_AGENT, _NEBIUS = "swe-agent", "nebius"
_ROLES = {"ai": "assistant", "human": "user"}


class MiniModel(Foreign):
    """The part that names the model."""

    model_name: str | None = None


class MiniConfig(Foreign):
    """What the agent was run with, as far as it is needed."""

    model: MiniModel = MiniModel()


class RunInfo(Foreign):
    """How it ended."""

    exit_status: str | None = None
    submission: str | None = None
    config: MiniConfig = MiniConfig()
    model_stats: JsonValue = None


class SweAgentStep(Foreign):
    """One step; early versions had no ``history``."""

    action: str = ""
    observation: str = ""
    response: str = ""
    thought: str = ""


class SweAgentRecord(Foreign):
    """A ``.traj``. ``history`` is what the model was shown and said."""

    trajectory: tuple[SweAgentStep, ...]
    history: Conversation = ()
    info: RunInfo = RunInfo()
    instance_id: str | None = None


class NebiusRecord(Foreign):
    """A row of SWE-agent-trajectories (``text`` messages) or of SWE-rebench-openhands-trajectories (chat messages)."""

    instance_id: str
    trajectory: tuple[JsonObject, ...]
    trajectory_id: str | None = None
    model_name: str | None = None
    target: bool | None = None
    resolved: bool | None = None
    exit_status: str | None = None
    generated_patch: str | None = None
    model_patch: str | None = None
    eval_logs: JsonValue = None
    tools: JsonValue = None


def recognises_swe_agent(row: Mapping[str, JsonValue]) -> bool:
    """Steps with actions and observations."""
    return _first(row, "trajectory", {"action", "observation"})


def recognises_nebius(row: Mapping[str, JsonValue]) -> bool:
    """A trajectory of messages."""
    return "instance_id" in row and _first(row, "trajectory", {"role"})


def read_swe_agent(row: JsonObject, file: Path | None = None) -> Imported:
    """An episode of a ``.traj``. Raises ``ExchangeError``."""
    record = parse(SweAgentRecord, row)
    messages = record.history or tuple(_of_steps(record.trajectory))
    if not messages:
        raise ExchangeError("it has neither history nor steps")
    return _episode(_SWE_AGENT, messages, record.info, record.instance_id or name_of(file))


def _episode(
    format: str, messages: Sequence[Message], info: RunInfo, name: str | None, times: Times = UNKNOWN_TIMES
) -> Imported:
    known: JsonObject = {"patch": info.submission, "exit_status": info.exit_status, "metrics": info.model_stats}
    evidence: JsonObject = {key: value for key, value in known.items() if value is not None}
    origin = Origin(format, task_of(messages, SWE, name), info.config.model.model_name)
    stop, failure = ending_of(info.exit_status, end_of(messages), format)
    return finished(conversation(messages, origin.policy), origin, Ending(stop, evidence, failure=failure, times=times))


def read_nebius(row: JsonObject) -> Imported:
    """An episode of a row. Raises ``ExchangeError``."""
    record = parse(NebiusRecord, row)
    messages = chat_messages([_as_chat(each) for each in record.trajectory])
    if not messages:
        raise ExchangeError("trajectory: is empty")
    solved = record.resolved if record.resolved is not None else record.target
    patch = record.model_patch if record.model_patch is not None else record.generated_patch
    evidence: JsonObject = {} if solved is None else {"resolved": solved}
    evidence |= {} if patch is None else {"patch": patch}
    evidence |= {} if record.trajectory_id is None else {"traj_id": record.trajectory_id}
    evidence |= {} if record.exit_status is None else {"exit_status": record.exit_status}
    evidence |= {} if record.eval_logs is None else {"test_result": {"test_output": without_nulls(record.eval_logs)}}
    origin = Origin(_NEBIUS, task_of(messages, SWE, record.instance_id), record.model_name)
    stop, failure = ending_of(record.exit_status, end_of(messages), _NEBIUS)
    detail: JsonObject = {} if solved is None else {"resolved": solved}
    tree = conversation(messages, origin.policy, tools_of(record.tools))
    return finished(tree, origin, Ending(stop, evidence, reward_of(solved), detail, failure))


def _as_chat(message: JsonObject) -> JsonObject:
    """Rows without ``content`` have ``text``, and a system prompt in a field of its own."""
    role = message.get("role")
    text = message.get("content")
    if text is None and not message.get("tool_calls"):
        text = message.get("text") or message.get("system_prompt")
    return {**message, "role": _ROLES.get(str(role), role), "content": text}


def _of_steps(steps: Sequence[SweAgentStep]) -> Iterator[Message]:
    for step in steps:
        said = step.response or "\n\n".join(filter(None, (step.thought, step.action)))
        yield Message(role="assistant", content=said)
        yield Message(role="user", content=step.observation)


def _first(row: Mapping[str, JsonValue], name: str, fields: set[str]) -> bool:
    listed = row.get(name)
    return isinstance(listed, list) and bool(listed) and isinstance(listed[0], dict) and fields <= set(listed[0])


_MINI = "mini-swe-agent"
_EXIT = "exit"


class MiniRecord(Foreign):
    """A ``.traj.json``."""

    info: RunInfo = RunInfo()
    messages: tuple[JsonObject, ...]
    instance_id: str | None = None


def recognises_mini(row: Mapping[str, JsonValue]) -> bool:
    """By its name, or by ``info`` beside ``messages``."""
    called = str(row.get("trajectory_format", ""))
    named = called.startswith(_MINI) or called == CONVERSATION_FILE
    info = row.get("info")
    known = isinstance(info, dict) and not {"exit_status", "submission", "mini_version"}.isdisjoint(info)
    return isinstance(row.get("messages"), list) and (named or known)


def read_mini(row: JsonObject, file: Path | None = None) -> Imported:
    """An episode of a record. Raises ``ExchangeError``."""
    record = parse(MiniRecord, row)
    messages = chat_messages([*_flat(record.messages)])
    if not messages:
        raise ExchangeError("messages: is empty")
    extras = [message.get("extra") for message in record.messages]
    times = times_of(extra.get("timestamp") for extra in extras if isinstance(extra, dict))
    return _episode(_MINI, messages, record.info, record.instance_id or name_of(file), times)


def _flat(messages: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Chat messages; the one that marks the exit is none."""
    for message in messages:
        if message.get("object") == "response":
            yield _of_response(message)
        elif message.get("type") == "function_call_output":
            yield {**message, "role": "tool", "content": message.get("output")}
        elif message.get("role") != _EXIT:
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


SWE_AGENT = Format(_SWE_AGENT, "SWE-agent's .traj", read_swe_agent, recognises=recognises_swe_agent)
NEBIUS = Format(
    _NEBIUS,
    "Nebius' data sets of SWE-agent and OpenHands episodes",
    lambda row, file: read_nebius(row),
    recognises=recognises_nebius,
)
MINI_SWE_AGENT = Format(
    _MINI, "trajectories of mini-swe-agent, versions 1 and 2", read_mini, recognises=recognises_mini, messages=True
)
