"""The templates of Qwen2.5 and Qwen3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from openhands_rl_plugin.core.templates.base import (
    arguments_object,
    arguments_text,
    refuse_empty,
    to_json,
    without_stop,
)
from openhands_rl_plugin.core.templates.parsed import ParsedAnswer
from openhands_rl_plugin.core.templates.tool_call_json import parse_tool_call_json
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall

STOP = ("<|im_end|>", "<|endoftext|>")

_DEFAULT_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_FOOT = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
_OPENED = "<|im_start|>assistant\n"
_NO_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Qwen25:
    """Qwen2.5: arguments are formatted again as JSON, so a model's own spacing is not kept."""

    stop: tuple[str, ...] = STOP

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        refuse_empty(messages)
        first = messages[0]
        system = (first.content or "") if first.role == "system" else _DEFAULT_SYSTEM
        parts = [f"<|im_start|>system\n{system}", f"\n\n{_tools(tools)}" if tools else "", "<|im_end|>\n"]
        for at, message in enumerate(messages):
            if message.role == "tool":
                parts += _tool_response(messages, at, str(message.content))
            elif message.role == "assistant" and message.tool_calls:
                content = f"\n{message.content}" if message.content else ""
                calls = "".join(f"\n{_call(call, arguments_object)}" for call in message.tool_calls)
                parts.append(f"<|im_start|>assistant{content}{calls}<|im_end|>\n")
            elif message.role != "system" or at > 0:
                parts.append(f"<|im_start|>{message.role}\n{message.content or ''}<|im_end|>\n")
        return "".join(parts) + (_OPENED if add_generation_prompt else "")

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_tool_call_json(without_stop(text, self.stop), tools)


@dataclass(frozen=True)
class Qwen3Instruct:
    """Qwen3 of 2507 without thoughts: content and arguments are written as they are."""

    stop: tuple[str, ...] = STOP

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        opened = _OPENED if add_generation_prompt else ""
        return _qwen3(messages, tools, _as_it_is) + opened

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_tool_call_json(without_stop(text, self.stop), tools)


@dataclass(frozen=True)
class Qwen3:
    """Qwen3 with thoughts: those of turns before the last question are left out.

    With ``thinking`` off an answer begins behind an empty thought.
    """

    thinking: bool = True
    stop: tuple[str, ...] = STOP

    def render(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), *, add_generation_prompt: bool = True
    ) -> str:
        question = _last_question(messages)

        def spoken(messages: Sequence[Message], at: int) -> _Spoken:
            return _with_thought(messages[at].content or "", at > question, at == len(messages) - 1)

        text = _qwen3(messages, tools, spoken)
        if not add_generation_prompt:
            return text
        return text + _OPENED + ("" if self.thinking else _NO_THOUGHT)

    def parse(self, text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
        return parse_tool_call_json(without_stop(text, self.stop), tools)


class _Spoken(NamedTuple):
    """An assistant's content as it is written, and the part of it outside of thoughts."""

    written: str
    content: str


_Speaking = Callable[[Sequence[Message], int], _Spoken]


def _as_it_is(messages: Sequence[Message], at: int) -> _Spoken:
    content = messages[at].content or ""
    return _Spoken(content, content)


def _with_thought(content: str, is_current: bool, is_last: bool) -> _Spoken:
    """Keep the thought of a current turn, if it has one or is the last message, and leave out that of another."""
    thought = ""
    if "</think>" in content:
        before = content.split("</think>")[0]
        thought = before.rstrip("\n").split("<think>")[-1].lstrip("\n")
        content = content.split("</think>")[-1].lstrip("\n")
    if is_current and (is_last or thought):
        inside = thought.strip("\n")
        return _Spoken(f"<think>\n{inside}\n</think>\n\n" + content.lstrip("\n"), content)
    return _Spoken(content, content)


def _last_question(messages: Sequence[Message]) -> int:
    """The index of the last message of the user that is no tool's answer; the last index when there is none."""
    for at in range(len(messages) - 1, -1, -1):
        content = messages[at].content
        if messages[at].role != "user" or content is None:
            continue
        if not (content.startswith("<tool_response>") and content.endswith("</tool_response>")):
            return at
    return len(messages) - 1


def _qwen3(messages: Sequence[Message], tools: Sequence[JsonObject], spoken: _Speaking) -> str:
    refuse_empty(messages)
    system = (messages[0].content or "") if messages[0].role == "system" else None
    parts: list[str] = []
    if tools:
        head = "" if system is None else f"{system}\n\n"
        parts.append(f"<|im_start|>system\n{head}{_tools(tools)}<|im_end|>\n")
    elif system is not None:
        parts.append(f"<|im_start|>system\n{system}<|im_end|>\n")
    for at, message in enumerate(messages):
        if message.role == "tool":
            parts += _tool_response(messages, at, message.content or "")
        elif message.role == "assistant":
            written, content = spoken(messages, at)
            calls = "\n".join(_call(call, arguments_text) for call in message.tool_calls)
            between = "\n" if calls and content else ""
            parts.append(f"<|im_start|>assistant\n{written}{between}{calls}<|im_end|>\n")
        elif message.role == "user" or at > 0:
            parts.append(f"<|im_start|>{message.role}\n{message.content or ''}<|im_end|>\n")
    return "".join(parts)


def _tools(tools: Sequence[JsonObject]) -> str:
    return _TOOLS_HEAD + "".join(f"\n{to_json(tool)}" for tool in tools) + _TOOLS_FOOT


def _call(call: ToolCall, arguments: Callable[[ToolCall], str]) -> str:
    # The name is not escaped: so do the templates.
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments(call)}}}\n</tool_call>'


def _tool_response(messages: Sequence[Message], at: int, content: str) -> Iterator[str]:
    """One result; several in a row share one turn of the user."""
    if at == 0 or messages[at - 1].role != "tool":
        yield "<|im_start|>user"
    yield f"\n<tool_response>\n{content}\n</tool_response>"
    if at == len(messages) - 1 or messages[at + 1].role != "tool":
        yield "<|im_end|>\n"
