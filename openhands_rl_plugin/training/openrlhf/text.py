"""Append-only rendering of conversations: the text of the first prompt, then only the text after each answer.

A chat template may rewrite earlier turns (Qwen3 removes the thinking of earlier turns), and text that is tokenised
again may get other ids. So sampled text is never rendered, only the text after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from openhands_rl_plugin.core.errors import ModelError
from openhands_rl_plugin.core.messages import to_wire
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall
from openhands_rl_plugin.models.server.tool_calls import ParsedText, parse_tool_calls

_STAND_IN = "STAND-IN-FOR-WHAT-WAS-SAMPLED"


class Renderer(Protocol):
    """Renders a conversation as the text of a prompt; every ``ChatTemplate`` is one."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        """The text."""
        ...


class TokenizerTemplate:
    """The chat template of a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        """The text of the prompt. Errors of the template are not caught."""
        return self._tokenizer.apply_chat_template(
            [to_wire(message) for message in messages],
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )


def text_behind(renderer: Renderer, messages: Sequence[Message], answer: int, tools: Sequence[JsonObject]) -> str:
    """The text after the answer at index ``answer`` in a prompt of ``messages``: the end of its turn and later turns.

    Raises ``ModelError`` for a template that omits answers.
    """
    shown = [*messages[:answer], Message(role="assistant", content=_STAND_IN), *messages[answer + 1 :]]
    before, found, behind = renderer.render(shown, tools).rpartition(_STAND_IN)
    if not found or _STAND_IN in before:
        raise ModelError("the chat template omits the assistant's answers; use a model with another template")
    return behind


def message_of(text: str, *, turn: int, called: bool) -> Message:
    """An answer as a message; its tool calls are parsed as by the model server, if tools were offered."""
    parsed = parse_tool_calls(text) if called else ParsedText(text, ())
    calls = tuple(
        ToolCall(id=f"call_{turn}_{at}", name=call.name, arguments=call.arguments)
        for at, call in enumerate(parsed.calls)
    )
    return Message(role="assistant", content=parsed.content, tool_calls=calls)
