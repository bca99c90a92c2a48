"""Records of other programs: null means absent, unknown fields are left alone, and every error names its field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError, field_validator, model_validator
from pydantic_core import from_json, to_json

from openhands_rl_plugin.core.errors import RLError, problems
from openhands_rl_plugin.core.messages import SpokenMessage, reasoning_in, text_of
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall


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
        lines = [": ".join(filter(None, (".".join(at), what))) for at, what in problems(error, model)]
        raise ExchangeError("; ".join(lines[:5])) from error


class WireFunction(Foreign):
    """``arguments`` is the text that the model wrote; an object is written out."""

    name: str
    arguments: str = "{}"

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        return to_json(value).decode() if isinstance(value, dict | list) else value


class WireCall(Foreign):
    """One entry of ``tool_calls``."""

    id: str = ""
    function: WireFunction


class WireMessage(Foreign):
    """A chat message with any of the forms of content: null, text, or a list of parts."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | None = None
    tool_calls: tuple[WireCall, ...] = ()
    function_call: WireFunction | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: object) -> object:
        if not isinstance(value, list):
            return value
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in value]
        if not all(isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in parts):
            raise ValueError("a part of the content is neither text nor an object with a type")
        return text_of([{"type": "text", **part} if "text" in part else part for part in parts])

    @model_validator(mode="before")
    @classmethod
    def _gather_reasoning(cls, data: object) -> object:
        """From whichever place it stands in."""
        reasoning = reasoning_in(data) if isinstance(data, dict) else None
        return {**data, "reasoning_content": reasoning} if isinstance(data, dict) and reasoning else data

    def spoken(self) -> SpokenMessage:
        """As a message of ours with its reasoning."""
        return SpokenMessage(**dict(self.message()), reasoning=self.reasoning_content)

    def message(self) -> Message:
        """As a message of ours."""
        calls = tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments) for call in self.tool_calls
        )
        if not calls and self.function_call is not None:
            calls = (ToolCall(name=self.function_call.name, arguments=self.function_call.arguments),)
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        return Message.model_validate(
            {
                "role": role,
                "content": self.content,
                "tool_calls": calls,
                "tool_call_id": self.tool_call_id,
                "name": self.name,
            }
        )


def without_nulls(value: JsonValue) -> Any:
    """``value`` without null fields, at any depth: the inverse of what a columnar dataset does to nested objects."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def tools_of(value: JsonValue) -> tuple[JsonObject, ...]:
    """Tools as a list or as a JSON string, with null-filled fields. Raises ``ExchangeError``."""
    listed = from_text(value) if isinstance(value, str) else value
    tools = without_nulls(listed if listed is not None else [])
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise ExchangeError('tools: must be a list of {"type": "function", "function": {"name": ...}}')
    return tuple(tools)


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def names_of_tests(value: JsonValue) -> list[str]:
    """``FAIL_TO_PASS`` and its like: a list of names, or a list written as JSON. Raises ``ExchangeError``."""
    listed = from_text(value) if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ExchangeError(f"test names must be a list of strings, or one as JSON, not {str(value)!r:.80}")
    return [name for name in listed if isinstance(name, str)]


def from_text(text: str | bytes) -> JsonValue:
    """JSON. Raises ``ExchangeError`` that says where it is broken."""
    try:
        return from_json(text)
    except ValueError as error:
        raise ExchangeError(f"not valid JSON: {error}") from error


def messages_of(wire: Sequence[WireMessage]) -> list[Message]:
    """All of them as messages of ours, with their reasoning."""
    return [message.spoken() for message in wire]
