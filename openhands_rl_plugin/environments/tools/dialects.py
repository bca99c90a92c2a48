"""The two ways in which a model calls tools: as the server's tool calls, or in the text of its response."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from openhands_rl_plugin.core.templates.chat import template_for
from openhands_rl_plugin.core.templates.parsing import ParsedAnswer
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


class Dialect(Protocol):
    """How tools are offered, calls are parsed and results are formatted."""

    def offered(self, tools: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
        """The tools in the request to the model server."""
        ...

    def system(self, text: str, tools: Sequence[JsonObject]) -> str:
        """The system message that begins with ``text``."""
        ...

    def read(self, message: Message) -> ReadAnswer:
        """Parse a response. Never raises."""
        ...

    def said(self, unfinished: str) -> str:
        """The part of an unfinished response that is certain to be speech."""
        ...

    def results(self, told: Sequence[tuple[ToolCall, str]]) -> tuple[Message, ...]:
        """The results of the calls, as messages."""
        ...


class NativeDialect:
    """Calls as the server's tool calls. A call that is left in the text is a problem: the server could not parse it."""

    def offered(self, tools: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
        return tuple(tools)

    def system(self, text: str, tools: Sequence[JsonObject]) -> str:
        return text

    def read(self, message: Message) -> ReadAnswer:
        parsed = template_for("hermes").parse(message.content or "")
        in_text = [f"The call of {call.name!r} was not executed: it stands in the text." for call in parsed.calls]
        return ReadAnswer(message.tool_calls, (*parsed.problems, *in_text), _speech(parsed))

    def said(self, unfinished: str) -> str:
        return _certain(unfinished, _TAGGED)

    def results(self, told: Sequence[tuple[ToolCall, str]]) -> tuple[Message, ...]:
        return tuple(
            Message(role="tool", content=text, tool_call_id=call.id or None, name=call.name) for call, text in told
        )


class TextDialect:
    """Calls in the text, in the format of a model family; the server gets no tools.

    Results form one user message of ``<tool_response>`` blocks, as in the families' own templates. Raises
    ``ConfigError`` for an unknown family.
    """

    def __init__(self, template: str) -> None:
        self._template = template_for(template)

    def offered(self, tools: Sequence[JsonObject]) -> tuple[JsonObject, ...]:
        return ()

    def system(self, text: str, tools: Sequence[JsonObject]) -> str:
        return self._template.system(text, tools)

    def read(self, message: Message) -> ReadAnswer:
        parsed = self._template.parse(message.content or "")
        return ReadAnswer((*message.tool_calls, *parsed.calls), parsed.problems, _speech(parsed))

    def said(self, unfinished: str) -> str:
        return _certain(unfinished, self._template.openings)

    def results(self, told: Sequence[tuple[ToolCall, str]]) -> tuple[Message, ...]:
        blocks = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for _, text in told)
        return (Message(role="user", content=blocks),) if told else ()


class OpenedThought:
    """A dialect of a model whose prompt ends with ``<think>``, so that every response begins with reasoning."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.offered = dialect.offered
        self.system = dialect.system
        self.results = dialect.results

    def read(self, message: Message) -> ReadAnswer:
        if not message.content:
            return self._dialect.read(message)
        return self._dialect.read(message.model_copy(update={"content": _THOUGHT_BEGIN + message.content}))

    def said(self, unfinished: str) -> str:
        return self._dialect.said(_THOUGHT_BEGIN + unfinished)


def without_thought(text: str) -> str:
    """``text`` without ``<think>`` blocks, also where only the closing or only the opening tag is present."""
    rest = _THOUGHT.sub("", text)
    return _UP_TO_THOUGHT_END.sub("", rest)


def _speech(parsed: ParsedAnswer) -> str:
    return without_thought(parsed.before + parsed.after).strip()


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
