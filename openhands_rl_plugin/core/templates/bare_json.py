"""Calls as bare JSON, as Llama 3.1 writes them: ``{"name": "search", "parameters": {"query": "red lamp"}}``.

Nothing marks such a call but its keys, so an object with a name and without parameters is text. After
``<|python_tag|>`` an object is a call whatever it has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from openhands_rl_plugin.core.templates.answers import Block, Blocks, Tag, scan
from openhands_rl_plugin.core.templates.json_calls import BadCall, Notes, call_of
from openhands_rl_plugin.core.templates.parsed import ParsedAnswer, Problem, Span
from openhands_rl_plugin.core.templates.signatures import check
from openhands_rl_plugin.core.templates.strict_json import NotJson, decode_object
from openhands_rl_plugin.core.types import JsonObject

PYTHON_TAG = "<|python_tag|>"

_BEGINNING = re.compile(
    r"""(?P<think></?+think>)|<\|python_tag\|>\s*+|\{\s*+(?:["']type["']\s*+:\s*+["']function["']\s*+,\s*+)?+"""
    r"""["'](?:name|function)["']\s*+:""",
    re.IGNORECASE,
)
_PARAMETERS = re.compile(r"""["'](?:parameters|arguments)["']\s*+:""")
_FORM = 'Write {"name": "...", "parameters": {...}} in strict JSON and nothing else'


def parse_bare_json(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Take an answer apart; a call that does not keep to ``tools`` (none: not checked) is a problem."""
    if "{" not in text and PYTHON_TAG not in text:
        return ParsedAnswer(before=text)
    tags = [
        Tag(match["think"].lower().strip("<>") if match["think"] else match[0][:1], "", *match.span())
        for match in _BEGINNING.finditer(text)
    ]
    return check(scan(text, tags, _Reader(text, tags).read, lambda blocks: None), tools)


class _Reader:
    """Reads the object that begins at a tag. It never raises on a model's text."""

    def __init__(self, text: str, tags: Sequence[Tag]) -> None:
        self._text = text
        self._tags = tags
        self._last_parameters = max((match.start() for match in _PARAMETERS.finditer(text)), default=-1)

    def read(self, index: int, blocks: Blocks) -> int:
        """Add the block at the tag ``index`` to ``blocks`` and give the index of the tag behind it."""
        tag = self._tags[index]
        marked = tag.kind == "<"
        begin = tag.end if marked else tag.start
        if not marked and not self._was_meant(begin):
            return index + 1
        notes: Notes = []
        try:
            if not self._text.startswith("{", begin):
                raise NotJson("no JSON object stands behind <|python_tag|>")
            decoded = decode_object(self._text, begin, self._start(index + 1 + marked))
            if not marked and not decoded.members.keys() & {"parameters", "arguments", "function"}:
                return self._behind(index, decoded.end)
            call = call_of(self._text, decoded, notes)
        except (NotJson, BadCall) as error:
            # What stands inside a broken object is no call of its own.
            index = self._next_marked(index + 1)
            span = Span(tag.start, self._start(index))
            message = f"A call was not executed: {error.reason}. {_FORM}."
            blocks.add(Block(span, problem=Problem(error.kind, message, span)))
            return index
        span = Span(tag.start, decoded.end)
        noted = tuple(Problem(kind, f"In the call of {call.name!r} {reason}.", span) for kind, reason in notes)
        blocks.add(Block(span, calls=(call,), notes=noted))
        return self._behind(index, decoded.end)

    def _was_meant(self, begin: int) -> bool:
        """Whether an object can be a call: parameters follow, or it opens the answer and may have been cut."""
        return self._last_parameters > begin or not self._text[:begin].strip()

    def _behind(self, index: int, position: int) -> int:
        while self._start(index) < position:
            index += 1
        return index

    def _next_marked(self, index: int) -> int:
        while index < len(self._tags) and self._tags[index].kind == "{":
            index += 1
        return index

    def _start(self, index: int) -> int:
        """Where a tag begins; the end of the text behind the last."""
        return self._tags[index].start if index < len(self._tags) else len(self._text)
