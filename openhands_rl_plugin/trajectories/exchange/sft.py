"""Rows for supervised training: calls as text (as SWE-Gym publishes them), or native tool calls with their tools."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field, JsonValue
from pydantic_core import to_json

from openhands_rl_plugin.core.messages import FINISH, SpokenMessage, reasoning_with
from openhands_rl_plugin.core.templates.function_text import Newlines, RenderError, read_function_text, render_call
from openhands_rl_plugin.core.types import JsonObject, Message, Score, ToolCall, Trajectory
from openhands_rl_plugin.trajectories.exchange.conversations import (
    CONVERSATION,
    TOOLS,
    read_system_prompt,
    single_call_turns,
    spoken_messages,
    system_prompt,
    until_last_answer,
    wire_of,
)
from openhands_rl_plugin.trajectories.exchange.episodes import (
    SWE,
    Ending,
    Imported,
    Origin,
    conversation,
    end_of,
    finished,
    identity_columns,
    patch_of,
    reward_of,
    task_of,
)
from openhands_rl_plugin.trajectories.exchange.foreign import (
    ChatRow,
    Conversation,
    LeftOutError,
    parse,
    tools_of,
    without_nulls,
)
from openhands_rl_plugin.trajectories.exchange.writing import JSON, Columns

IDENTITY: Columns = {
    "trajectory_id": "string",
    "instance_id": "string",
    "run_id": "string",
    "model": "string",
    "score": "float64",
    "resolved": "bool",
}
RECORD: Columns = {"test_result": JSON, "patch": "string", "traj_id": "string"}
"""What a record of others says beside the judgement."""
TEXT_COLUMNS: Columns = {
    "messages": [{"role": "string", "content": "string", "reasoning_content": "string"}],
    **IDENTITY,
    **RECORD,
}
NATIVE_COLUMNS: Columns = {"messages": CONVERSATION, "tools": TOOLS, **IDENTITY, **RECORD}

_RESULT = "EXECUTION RESULT of [{}]:\n"
_NAMELESS = "function"


class SftRow(ChatRow):
    """A row of ours, of SWE-Gym's SFT set, or of its Sampled set (which has ``test_result`` and null-filled tools)."""

    messages: Annotated[Conversation, Field(min_length=1)]
    resolved: bool | None = None
    test_result: JsonValue = None
    patch: str | None = None
    traj_id: str | None = None


def recognises(row: Mapping[str, JsonValue]) -> bool:
    """Chat messages, as a list or as JSON."""
    listed = row.get("messages")
    if isinstance(listed, str):
        return listed.lstrip().startswith("[")
    return isinstance(listed, list) and bool(listed) and isinstance(listed[0], dict) and "role" in listed[0]


def recognises_text(row: Mapping[str, JsonValue]) -> bool:
    """Chat messages with calls in their text."""
    return recognises(row) and not row.get("tools") and "<function=" in to_json(row.get("messages")).decode()


def text_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """A row for each path that was acted on, one unless the history was rewritten: calls as text, results as what the
    user says, up to the last answer.

    Raises ``LeftOutError`` for an episode without an answer, or whose calls no text can carry.
    """
    for messages in _answered(trajectory):
        turns = single_call_turns(messages)
        if turns.unanswered:
            raise LeftOutError("several calls were made at once and some of them got no result")
        rendered: list[JsonValue] = [*text_messages(until_last_answer(turns.messages), trajectory.tools)]
        yield {"messages": rendered, **identity_columns(trajectory, scores), **_record_columns(trajectory)}


def native_rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """A row for each path that was acted on, one unless the history was rewritten: up to its last answer, with its
    tool calls and the tools."""
    columns = {**identity_columns(trajectory, scores), **_record_columns(trajectory)}
    for said in _answered(trajectory):
        messages: list[JsonValue] = [wire_of(message) for message in until_last_answer(said)]
        yield {"messages": messages, "tools": [*trajectory.tools], **columns}


def text_messages(messages: Sequence[Message], tools: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Messages with at most one call each in the text form. Raises ``LeftOutError``."""
    if tools and (not messages or messages[0].role != "system"):
        yield {"role": "system", "content": system_prompt("", tools)}
    # A reader has the tools from the prompt alone, which says less about a type than a schema does.
    by_name = {str(_named(tool)): tool for tool in read_system_prompt(system_prompt("", tools)).tools}
    for at, message in enumerate(messages):
        content = message.content or ""
        match message.role:
            case "system" if at == 0:
                content = system_prompt(content, tools)
            case "tool":
                content = _RESULT.format(message.name or _NAMELESS) + content
            case "assistant" if message.tool_calls:
                call = _rendered(message.tool_calls[0], by_name)
                content = f"{content}\n\n{call}" if content else call
        row: JsonObject = {"role": "user" if message.role == "tool" else message.role, "content": content}
        yield row if (reasoning := reasoning_with(message)) is None else {**row, "reasoning_content": reasoning}


def import_text(row: JsonObject) -> Imported:
    """An episode of a row with calls as text. Raises ``ExchangeError``."""
    record = parse(SftRow, row)
    messages, tools = read_text_messages(record.whole(record.messages), tools_of(record.tools))
    return _imported("sft-text", record, messages, tools)


def import_native(row: JsonObject) -> Imported:
    """An episode of a row with native calls. Raises ``ExchangeError``."""
    record = parse(SftRow, row)
    return _imported("sft-native", record, record.whole(record.messages), tools_of(record.tools))


def read_text_messages(
    messages: Sequence[Message], tools: Sequence[JsonObject] = ()
) -> tuple[list[Message], tuple[JsonObject, ...]]:
    """Messages with native calls, and the tools: those of the system prompt unless ``tools`` are given.

    A text that cannot be read as a call stays text, and so does everything where the results of calls have another
    form. Calls are numbered; their ids are not part of the text form.
    """
    out: list[Message] = []
    known, newlines = tuple(tools), Newlines.WRAPPED
    numbered = 0
    open_calls: set[str] = set()
    for at, message in enumerate(messages):
        content = message.content or ""
        if at == 0 and message.role == "system":
            prompt = read_system_prompt(content)
            known, newlines = known or prompt.tools, prompt.newlines
            out += [message.model_copy(update={"content": prompt.content})] if prompt.content else []
        elif message.role == "assistant" and not message.tool_calls:
            if open_calls:
                return list(messages), tuple(tools)
            read = read_answer(message, known, newlines, numbered)
            numbered += len(read.tool_calls)
            open_calls = {call.id for call in read.tool_calls if call.name != FINISH}
            out.append(read)
        elif message.role == "user" and (result := _read_result(content, out)) is not None:
            open_calls.discard(result.tool_call_id or "")
            out.append(result)
        else:
            # A tool's message says itself that it is a result.
            open_calls = set(list(open_calls)[1:]) if message.role == "tool" else open_calls
            out.append(message)
    return out, known


def read_answer(
    message: Message, tools: Sequence[JsonObject] = (), newlines: Newlines = Newlines.WRAPPED, numbered: int = 0
) -> Message:
    """The answer with the calls that stand in its text as calls, whose ids have numbers after ``numbered``; as it is
    where there are none, or one that cannot be read.
    """
    answer = read_function_text(message.content or "", tools, newlines)
    if answer.problems or not answer.calls:
        return message
    calls = tuple(
        call.model_copy(update={"id": f"toolu_{numbered + at:02d}"}) for at, call in enumerate(answer.calls, 1)
    )
    before = answer.before.removesuffix("\n\n")
    content = f"{before}\n\n{answer.after.strip()}" if answer.after.strip() else before
    return message.model_copy(update={"content": content or None, "tool_calls": calls})


def _read_result(content: str, before: Sequence[Message]) -> Message | None:
    """A result, when the last answer made a call of that name; other text of that look is the user's own."""
    asked = next((message for message in reversed(before) if message.role != "tool"), None)
    answered = {message.tool_call_id for message in before if message.role == "tool"}
    for call in asked.tool_calls if asked is not None else ():
        prefix = _RESULT.format(call.name)
        if content.startswith(prefix) and call.id not in answered:
            return Message(role="tool", content=content[len(prefix) :], tool_call_id=call.id, name=call.name)
    return None


def _imported(format: str, record: SftRow, messages: Sequence[Message], tools: tuple[JsonObject, ...]) -> Imported:
    task = task_of(messages, SWE, record.instance_id, record.task_id, row=record.id)
    origin = Origin(format, task, record.model, record.run_id)
    known = {"resolved": record.resolved, "test_result": without_nulls(record.test_result), "patch": record.patch}
    evidence = {name: value for name, value in {**known, "traj_id": record.traj_id}.items() if value is not None}
    reward = record.score if record.score is not None else reward_of(record.resolved)
    detail: JsonObject = {} if record.resolved is None else {"resolved": record.resolved}
    tree = conversation(messages, origin.policy, tools)
    return finished(tree, origin, Ending(end_of(messages), evidence, reward, detail))


def _answered(trajectory: Trajectory) -> list[list[SpokenMessage]]:
    """The conversations with an answer, as the model saw them."""
    paths = [spoken_messages(trajectory, end) for end in trajectory.ends()]
    answered = [messages for messages in paths if any(message.role == "assistant" for message in messages)]
    if not answered:
        raise LeftOutError("it has no answer")
    return answered


def _record_columns(trajectory: Trajectory) -> JsonObject:
    evidence = trajectory.evidence
    columns = {
        "test_result": evidence.get("test_result"),
        "patch": patch_of(trajectory),
        "traj_id": evidence.get("traj_id"),
    }
    return {name: value for name, value in columns.items() if value is not None}


def _rendered(call: ToolCall, tools: dict[str, JsonObject]) -> str:
    try:
        return render_call(call, tools.get(call.name))
    except RenderError as error:
        raise LeftOutError(str(error)) from error


def _named(tool: JsonObject) -> JsonValue:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None
