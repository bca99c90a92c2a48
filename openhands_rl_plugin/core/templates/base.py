"""The interface of a model family's template, and the pieces that the families share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.parsed import ParsedAnswer, RenderError
from openhands_rl_plugin.core.templates.tool_call_json import render_tool_call
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall


class ChatTemplate(Protocol):
    """How one family of models reads a conversation and writes its answer.

    ``stop``: strings that end an answer. The text is that of the family's own Hugging Face chat template, with null
    content as empty where that template would refuse it.
    """

    @property
    def stop(self) -> tuple[str, ...]: ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        """The prompt's text. Raises ``RenderError`` for messages that the family cannot express."""
        ...

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        """Take an answer apart; with ``tools``, calls that do not keep to them are problems. Never raises."""
        ...


def to_json(value: object, indent: int | None = None) -> str:
    """JSON as the ``tojson`` filter of Hugging Face's templates prints it: nothing escaped, nothing sorted."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def arguments_object(call: ToolCall) -> str:
    """The arguments for templates that take an object: formatted again; text that is no object as a string."""
    text = call.arguments or "{}"
    try:
        value: JsonValue = json.loads(text)
    except (ValueError, RecursionError):
        return to_json(text)
    return to_json(value if isinstance(value, dict) else text)


def arguments_text(call: ToolCall) -> str:
    """The arguments as templates print them that take text: exactly as the model wrote them."""
    return call.arguments or "{}"


def with_calls(message: Message) -> str:
    """Content and calls as one text, for templates that know no calls and would drop them."""
    written = [render_tool_call(call) for call in message.tool_calls]
    return "\n".join([message.content, *written] if message.content else written)


def without_stop(text: str, stop: Sequence[str]) -> str:
    """The answer without a stop string at its end."""
    return next((text.removesuffix(one) for one in stop if text.endswith(one)), text)


def refuse_empty(messages: Sequence[Message]) -> None:
    """A conversation needs a message."""
    if not messages:
        raise RenderError("a conversation without messages cannot be rendered; give at least one")
