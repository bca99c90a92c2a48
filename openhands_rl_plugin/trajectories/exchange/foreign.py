"""Records of other programs: null means absent, unknown fields are left alone, and every error names its field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json

from openhands_rl_plugin.core.errors import RLError, problems
from openhands_rl_plugin.core.messages import SpokenMessage, reasoning_in, text_of, to_message, whole_json, whole_text
from openhands_rl_plugin.core.types import Bounded, JsonObject, Message


class ExchangeError(RLError):
    """A record cannot be read, or a file cannot be read or written."""


class LeftOutError(ExchangeError):
    """A trajectory that a format cannot represent; the others are written."""


class Foreign(BaseModel):
    """Base of records of others. Unions of datasets fill absent fields with null, so null is the same as absent."""

    model_config = ConfigDict(frozen=True, extra="ignore", coerce_numbers_to_str=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: object) -> object:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


def parse[Record: Foreign](model: type[Record], value: object) -> Record:
    """The checked record. Raises ``ExchangeError`` that names every wrong field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ExchangeError(what_is_wrong(error, model)) from error


def what_is_wrong(error: ValidationError, model: type[BaseModel]) -> str:
    """The first wrong fields of a record, in one line."""
    lines = [": ".join(filter(None, (".".join(at), what))) for at, what in problems(error, model)]
    return "; ".join(lines[:5])


class Said(SpokenMessage):
    """A message of a record. ``context_only``: the record says that nothing is to be learned from it."""

    context_only: bool = False


_CONTEXT_ONLY: Mapping[str, bool] = {
    **dict.fromkeys(("is_demo", "mask", "masked", "is_copied_context"), True),
    **dict.fromkeys(("weight", "loss_weight", "loss", "loss_mask", "step_loss_mask"), False),
    **dict.fromkeys(("train", "training", "trainable"), False),
}
"""The fields by which records mark a message that is context only -> whether they are true or false on it."""
_MARKS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_LINKS = ("tool_call_id", "tool_call_ids", "call_id", "tool_use_id", "source_call_id")


def is_context_only(entry: Mapping[str, object]) -> bool:
    """Whether a mark of any format says that a message was not sampled, or is not to be trained."""
    return any(_MARKS.get(str(entry.get(name)).lower()) is held for name, held in _CONTEXT_ONLY.items())


def linked_call(entry: Mapping[str, object]) -> str | None:
    """The id of the call that a result belongs to. Raises ``ValueError`` for several."""
    given = next((entry[name] for name in _LINKS if entry.get(name) not in (None, "", [])), None)
    ids = given if isinstance(given, list) else [given]
    if len(ids) != 1 or not isinstance(ids[0], str | int | None):
        raise ValueError(f"a result belongs to one call, and this one names {given!r:.80}")
    return None if ids[0] is None else str(ids[0])


def read_message(wire: object) -> Said:
    """An OpenAI chat message as records have it. Raises ``ValueError`` for what is none."""
    if not isinstance(wire, dict):
        raise ValueError(f"must be a chat message, not {type(wire).__name__}")
    # A columnar data set gives every call the fields of all calls.
    filled = {name: without_nulls(wire[name]) for name in ("tool_calls", "function_call") if wire.get(name)}
    try:
        said = to_message({**wire, **filled, "tool_call_id": linked_call(wire)})
    except ValidationError as error:
        raise ValueError(what_is_wrong(error, Said)) from error
    except KeyError as error:
        raise ValueError(f"{error.args[0]}: is required") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"has not the form of a chat message ({error})") from error
    return Said(**dict(said), reasoning=reasoning_in(wire), context_only=is_context_only(wire))


def read_messages(value: object) -> tuple[Said, ...]:
    """Chat messages, as a list or as JSON. Raises ``ValueError``."""
    listed = from_text(value) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        raise ValueError(f"must be a list of chat messages, not {type(listed).__name__}")
    return tuple(read_message(each) for wire in listed for each in _taken_apart(wire))


def _taken_apart(wire: object) -> Iterator[object]:
    """Anthropic has calls among the parts of an answer, and results among those of what the user says."""
    content = wire.get("content") if isinstance(wire, dict) else None
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    calls = [{**part, "arguments": part.get("input")} for part in parts if part.get("type") == "tool_use"]
    results = [part for part in parts if part.get("type") == "tool_result"]
    if not isinstance(wire, dict) or not (calls or results):
        yield wire
        return
    yield from ({**wire, **part, "role": "tool"} for part in results)
    taken = [part for part in parts if part.get("type") in ("tool_use", "tool_result")]
    left = [part for part in content or () if part not in taken]
    if left or calls:
        yield {**wire, "content": left, "tool_calls": calls}


ChatMessage = Annotated[Said, BeforeValidator(read_message)]
Conversation = Annotated[tuple[Said, ...], BeforeValidator(read_messages)]


def chat_messages(wires: JsonValue) -> tuple[Said, ...]:
    """``read_messages`` of a record. Raises ``ExchangeError``."""
    try:
        return read_messages(wires)
    except ValueError as error:
        raise ExchangeError(str(error)) from error


def chat_message(wire: JsonObject) -> Said:
    """One message of a record. Raises ``ExchangeError``."""
    return chat_messages([wire])[0]


Finite = Bounded
"""A number of a record."""


class ChatRow(Foreign):
    """What rows of chats have beside their messages, by whichever of its names."""

    id: str | None = None
    instance_id: str | None = None
    task_id: str | None = None
    run_id: str | None = None
    model: str | None = None
    tools: JsonValue = Field(None, validation_alias=AliasChoices("tools", "functions"))
    system: JsonValue = Field(None, validation_alias=AliasChoices("system", "system_prompt"))
    score: Finite | None = Field(None, validation_alias=AliasChoices("score", "reward"))

    def whole(self, answers: Sequence[Message], prompt: Sequence[Message] = ()) -> tuple[Message, ...]:
        """The conversation behind the system prompt that stands beside it. Raises ``ExchangeError`` without answers."""
        if not any(message.role == "assistant" for message in answers):
            raise ExchangeError("there is no answer in it")
        said, beside = (*prompt, *answers), whole_text(text_of(self.system) or "")
        known = not beside or (said[0].role, said[0].content) == ("system", beside)
        return said if known else (Message(role="system", content=beside), *said)


def without_nulls(value: JsonValue) -> Any:
    """``value`` without null fields, at any depth: the inverse of what a columnar dataset does to nested objects."""
    if isinstance(value, dict):
        inner = {key: without_nulls(item) for key, item in value.items() if item is not None}
        return {key: item for key, item in inner.items() if item or not value[key] or not isinstance(item, dict)}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def tools_of(value: JsonValue) -> tuple[JsonObject, ...]:
    """Tools, or their functions alone, as a list or as JSON, with null-filled fields. Raises ``ExchangeError``."""
    listed = from_text(value) if isinstance(value, str) and value.strip() else value
    tools = without_nulls(listed or [])
    if isinstance(tools, list):
        tools = [_wrapped(tool) if _is_tool({"function": tool}) else tool for tool in tools]
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise ExchangeError('tools: must be a list of {"type": "function", "function": {"name": ...}}')
    return tuple(tools)


def _wrapped(function: JsonObject) -> JsonObject:
    """Anthropic and MCP have other names for the parameters."""
    renamed = {"parameters" if name in ("input_schema", "inputSchema") else name: of for name, of in function.items()}
    return {"type": "function", "function": renamed}


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def from_text(text: str | bytes) -> JsonValue:
    """JSON, with U+FFFD for what no file can hold. Raises ``ExchangeError`` that says where it is broken."""
    try:
        return from_json(text.removeprefix(BYTE_ORDER_MARK) if isinstance(text, bytes) else text)
    except ValueError as error:
        try:
            decoded = text.decode("utf-8-sig", "replace") if isinstance(text, bytes) else text
            return from_json(json.dumps(whole_json(json.loads(decoded))))
        except (ValueError, RecursionError):
            raise ExchangeError(f"not valid JSON: {error}") from error
