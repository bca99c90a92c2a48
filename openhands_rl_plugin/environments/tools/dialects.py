"""The two ways in which a model calls tools: as the server's tool calls, or in the text of its response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from openhands_rl_plugin.core.templates.chat import template_for
from openhands_rl_plugin.core.types import JsonObject, Message, ToolCall

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.IGNORECASE | re.DOTALL)
_UP_TO_THOUGHT_END = re.compile(r"\A.*</think>", re.IGNORECASE | re.DOTALL)
_THOUGHT_BEGIN, _THOUGHT_END = "<think>", "</think>"
_TAGGED = ("<tool_call", "</tool_call")


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """A parsed response: ``calls`` to execute, ``problems`` of invalid calls, and ``speech``, the text around them.

    The speech is without reasoning and without white space at its ends.
    """

    calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    speech: str = ""


class Dialect:
    """How tools are offered, calls are parsed and results are formatted.

    ``template``: the model family in whose format calls stand in the text, and the server gets no tools; results then
    form one user message of ``<tool_response>`` blocks, as in the families' own templates. Empty: calls are the
    server's tool calls, and one that is left in the text is a problem: the server could not parse it.
    ``opens_thought``: the model's prompt ends with ``<think>``, so that every response begins with reasoning.
    Raises ``ConfigError`` for an unknown family.
    """

    def __init__(self, template: str = "", *, opens_thought: bool = False) -> None:
        self._native = not template
        self._template = template_for(template or "hermes")
        self._opening = _THOUGHT_BEGIN if opens_thought else ""

    def offered(self, tools: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
        """The tools in the request to the model server."""
        return tuple(tools) if self._native else ()

    def system(self, text: str, tools: Sequence[JsonObject]) -> str:
        """The system message that begins with ``text``."""
        return text if self._native else self._template.system(text, tools)

    def read(self, message: Message) -> ReadAnswer:
        """Parse a response. Never raises."""
        parsed = self._template.parse(self._opening + message.content if message.content else "")
        problems = [*parsed.problems]
        if self._native:
            problems += [f"The call of {call.name!r} was not executed: it stands in the text." for call in parsed.calls]
        calls = message.tool_calls if self._native else (*message.tool_calls, *parsed.calls)
        return ReadAnswer(calls, tuple(problems), without_thought(parsed.before + parsed.after).strip())

    def said(self, unfinished: str) -> str:
        """The part of an unfinished response that is certain to be speech."""
        return _certain(self._opening + unfinished, _TAGGED if self._native else self._template.openings)

    def results(self, results: Sequence[tuple[ToolCall, str]]) -> tuple[Message, ...]:
        """The results of the calls, as messages."""
        if self._native:
            return tuple(
                Message(role="tool", content=text, tool_call_id=call.id or None, name=call.name)
                for call, text in results
            )
        blocks = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for _, text in results)
        return (Message(role="user", content=blocks),) if results else ()


def without_thought(text: str) -> str:
    """``text`` without ``<think>`` blocks, also where only the closing or only the opening tag is present."""
    rest = _THOUGHT.sub("", text)
    return _UP_TO_THOUGHT_END.sub("", rest)


def _certain(unfinished: str, openings: Sequence[str]) -> str:
    """The speech before anything that is, or may become, a call or a ``<think>`` block."""
    text = without_thought(unfinished)
    begun = re.search("|".join(map(re.escape, openings)), text, re.IGNORECASE)
    end = begun.start() if begun else len(text)
    for opening in (*openings, _THOUGHT_BEGIN, _THOUGHT_END):
        for length in range(min(len(opening) - 1, end), 0, -1):
            if text[end - length : end].lower() == opening[:length]:
                end -= length
                break
    return text[:end].strip()
