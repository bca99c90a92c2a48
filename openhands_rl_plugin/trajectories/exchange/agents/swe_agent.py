"""Trajectories of SWE-agent (``.traj``), and the data sets of Nebius made of its and OpenHands' episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import Field, JsonValue

from openhands_rl_plugin.core.types import JsonObject, Message, Task
from openhands_rl_plugin.trajectories.exchange.agents.exits import ending_of
from openhands_rl_plugin.trajectories.exchange.episodes import (
    SWE,
    Ending,
    Imported,
    Origin,
    conversation,
    end_of,
    finished,
    reward_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ExchangeError,
    Foreign,
    WireMessage,
    messages_of,
    parse,
    tools_of,
    without_nulls,
)

NAME, NEBIUS = "swe-agent", "nebius"
_ROLES = {"ai": "assistant", "human": "user"}


class SweAgentInfo(Foreign):
    """How it ended."""

    exit_status: str | None = None
    submission: str | None = None
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
    history: tuple[JsonObject, ...] = ()
    info: SweAgentInfo = Field(default_factory=SweAgentInfo)
    instance_id: str = ""
    environment: JsonValue = None
    replay_config: JsonValue = None


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


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """Steps with actions and observations."""
    return _first(row, "trajectory", {"action", "observation"})


def recognises_nebius(row: Mapping[str, JsonValue]) -> bool:
    """A trajectory of messages."""
    return "instance_id" in row and _first(row, "trajectory", {"role"})


def read(row: JsonObject, file: Path | None = None) -> Imported:
    """An episode of a ``.traj``. Raises ``ExchangeError``."""
    record = parse(SweAgentRecord, row)
    messages = messages_of([parse(WireMessage, each) for each in record.history]) or list(_of_steps(record.trajectory))
    if not messages:
        raise ExchangeError("it has neither history nor steps")
    name = record.instance_id or (file.name.partition(".")[0] if file is not None else "")
    info = record.info
    evidence: JsonObject = {} if info.submission is None else {"patch": info.submission}
    evidence |= {} if info.exit_status is None else {"exit_status": info.exit_status}
    evidence |= {} if info.model_stats is None else {"metrics": info.model_stats}
    asked = next((message.content for message in messages if message.role == "user"), None)
    origin = Origin(NAME, Task(id=name, environment=SWE, instruction=asked or ""))
    stop, failure = ending_of(info.exit_status, end_of(messages), NAME)
    return finished(conversation(messages, origin.policy), origin, Ending(stop, evidence, failure=failure))


def read_nebius(row: JsonObject) -> Imported:
    """An episode of a row. Raises ``ExchangeError``."""
    record = parse(NebiusRecord, row)
    messages = messages_of([parse(WireMessage, _as_chat(each)) for each in record.trajectory])
    if not messages:
        raise ExchangeError("trajectory: is empty")
    solved = record.resolved if record.resolved is not None else record.target
    patch = record.model_patch if record.model_patch is not None else record.generated_patch
    evidence: JsonObject = {} if solved is None else {"resolved": solved}
    evidence |= {} if patch is None else {"patch": patch}
    evidence |= {} if record.trajectory_id is None else {"traj_id": record.trajectory_id}
    evidence |= {} if record.exit_status is None else {"exit_status": record.exit_status}
    evidence |= {} if record.eval_logs is None else {"test_result": {"test_output": without_nulls(record.eval_logs)}}
    asked = next((message.content for message in messages if message.role == "user"), None)
    origin = Origin(NEBIUS, Task(id=record.instance_id, environment=SWE, instruction=asked or ""), record.model_name)
    stop, failure = ending_of(record.exit_status, end_of(messages), NEBIUS)
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
