"""From JSON objects in an answer to calls: the shapes that models give them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.parsing import (
    Block,
    Blocks,
    DecodedObject,
    Member,
    NotJson,
    ParsedAnswer,
    Problem,
    ProblemKind,
    Span,
    Tag,
    check,
    decode,
    decode_object,
    dumps,
    is_unicode,
    scan,
    signatures,
    skip_space,
)
from openhands_rl_plugin.core.types import JsonObject, ToolCall

_BESIDE = {"name", "arguments", "id", "type", "index"}
_DEEPEST_STRING = 3
_NEED = 'a call needs a "name" and an object of "arguments"'


class BadCall(Exception):
    """The object is no call; ``kind`` and ``reason`` say why."""

    def __init__(self, kind: ProblemKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


Notes = list[tuple[ProblemKind, str]]


def call_of(text: str, decoded: DecodedObject, notes: Notes) -> ToolCall:
    """The call in an object of ``text``; corrections are added to ``notes``. Raises ``BadCall``."""
    members = decoded.members
    if "name" not in members and isinstance(members.get("function", _ABSENT).value, dict):
        inner = members["function"]
        notes.append((ProblemKind.REENCODED, 'the name and the arguments were taken out of "function"'))
        return call_of(text, decode_object(text, inner.start, inner.end), notes)
    name = members.get("name", _ABSENT).value
    if not isinstance(name, str) or not name or not is_unicode(name):
        raise BadCall(ProblemKind.BAD_SHAPE, f"it has no name; {_NEED}")
    key = "parameters" if "parameters" in members and "arguments" not in members else "arguments"
    extra = sorted(set(members) - _BESIDE - {key})
    if extra and key not in members:
        raise BadCall(ProblemKind.BAD_SHAPE, f"{extra[0]!r} stands beside the name, not in the arguments; {_NEED}")
    if extra:
        notes.append((ProblemKind.BAD_SHAPE, f"what stands beside the arguments was left out: {', '.join(extra)}"))
    return ToolCall(name=name, arguments=_arguments(text, members.get(key), notes))


def _arguments(text: str, member: Member | None, notes: Notes) -> str:
    """The arguments' own text."""
    value = None if member is None else member.value
    if isinstance(value, dict) and member is not None:
        return text[member.start : member.end]
    if isinstance(value, str):
        return _unwrapped(value, notes)
    if value is None:
        notes.append((ProblemKind.REENCODED, "missing arguments were read as none"))
        return "{}"
    raise BadCall(ProblemKind.BAD_SHAPE, f"its arguments are {json.dumps(value)[:60]}, not an object; {_NEED}")


def _unwrapped(value: str, notes: Notes) -> str:
    """The object that a string of JSON, or a string of that, holds."""
    notes.append((ProblemKind.REENCODED, "the arguments were a string of JSON; give an object"))
    inner: JsonValue = value
    for _ in range(_DEEPEST_STRING):
        if not isinstance(inner, str):
            break
        if not inner.strip():
            return "{}"
        try:
            found = decode(inner)
        except NotJson as error:
            raise BadCall(error.kind, f"its arguments are a string that is not JSON: {error.reason}; {_NEED}") from None
        if isinstance(found, dict):
            return inner.strip() if is_unicode(inner) else dumps(found)
        inner = found
    raise BadCall(ProblemKind.BAD_SHAPE, f"its arguments are a string, not an object; {_NEED}")


_ABSENT = Member(None, 0, 0)


OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_TAG = re.compile(r"<(/?+(?:tool_call|think))>", re.IGNORECASE)
_CUT_OPENING = re.compile(r"<tool(?:_(?:c(?:a(?:l(?:l)?)?)?)?)?\Z", re.IGNORECASE)
_FENCE = re.compile(r"\s*+```(?:json)?\s*+", re.IGNORECASE)
_FORM = 'Write <tool_call>{"name": "...", "arguments": {...}}</tool_call> with strict JSON in it'


def render_tool_call(call: ToolCall) -> str:
    """The call as text; its arguments stay as they are."""
    return f'{OPEN}\n{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}\n{CLOSE}'


def parse_tool_call_json(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Take an answer apart; a call that does not keep to ``tools`` (none: not checked) is a problem."""
    tags = [Tag(match[1].lower(), "", *match.span()) for match in _TAG.finditer(text)]
    if not tags and (call := fenced_call(text, tools)) is not None:
        return check(ParsedAnswer(before="", calls=(call,), spans=(Span(0, len(text)),)), tools)
    reader = _Reader(text, tags)
    return check(scan(text, tags, reader.read, reader.read_end), tools)


def fenced_call(text: str, tools: Sequence[JsonObject]) -> ToolCall | None:
    """The call of an answer that is one fenced JSON object naming one of ``tools``; ``None`` for another answer."""
    opened = _FENCE.match(text)
    if not tools or opened is None or not text.startswith("{", opened.end()):
        return None
    try:
        decoded = decode_object(text, opened.end(), len(text))
        call = call_of(text, decoded, [])
    except (NotJson, BadCall):
        return None
    return call if text[decoded.end :].strip() == "```" and call.name in signatures(tools) else None


class _Reader:
    """Reads the block that begins at a tag. It never raises on a model's text."""

    def __init__(self, text: str, tags: Sequence[Tag]) -> None:
        self._text = text
        self._tags = tags

    def read(self, index: int, blocks: Blocks) -> int:
        """Add the block at the tag ``index`` to ``blocks`` and give the index of the tag behind it."""
        opening = self._tags[index]
        if opening.kind != "tool_call":
            return index + 1
        depth = 1
        while self._kind(index + 1) == "tool_call" and self._is_blank(self._tags[index].end, index + 1):
            depth += 1
            index += 1
        notes: Notes = [(ProblemKind.NESTED, "surplus tags were left out")] if depth > 1 else []
        try:
            calls, end, index = self._calls(index, depth, notes)
        except (NotJson, BadCall) as error:
            index += 1
            end = self._start(index)
            if self._kind(index) == "/tool_call":
                end = self._tags[index].end
                index += 1
            blocks.add(_broken(error.kind, f"A call was not executed: {error.reason}", Span(opening.start, end)))
            return index
        span = Span(opening.start, end)
        blocks.add(Block(span, tuple(calls), notes=tuple(_note(kind, reason, calls, span) for kind, reason in notes)))
        return index

    def read_end(self, blocks: Blocks) -> None:
        """Add the problem of an opening tag that the end of the answer cut in two."""
        behind = self._tags[-1].end if self._tags else 0
        start = self._text.rfind("<", behind)
        if start >= 0 and _CUT_OPENING.match(self._text, start):
            span = Span(start, len(self._text))
            blocks.add(_broken(ProblemKind.UNCLOSED, "The answer ends inside the opening tag of a call", span))

    def _calls(self, index: int, depth: int, notes: Notes) -> tuple[list[ToolCall], int, int]:
        """The calls between ``depth`` pairs of tags, where they end, and the index of the tag behind them."""
        position, fenced = self._fence(self._tags[index].end)
        calls, position = self._objects(skip_space(self._text, position), index + 1, notes)
        if not calls:
            raise BadCall(ProblemKind.BAD_SHAPE, "nothing stands between the tags")
        if fenced:
            position, _ = self._fence(position)
        end, index = self._end(position, index + 1, depth, notes)
        return calls, end, index

    def _fence(self, position: int) -> tuple[int, bool]:
        """Behind a code fence, and whether there was one."""
        match = _FENCE.match(self._text, position)
        return (match.end(), True) if match else (position, False)

    def _objects(self, position: int, index: int, notes: Notes) -> tuple[list[ToolCall], int]:
        """The objects from ``position`` on, bare or in a list, and where they end."""
        calls: list[ToolCall] = []
        in_list = self._text.startswith("[", position)
        if in_list:
            position = skip_space(self._text, position + 1)
        while self._text.startswith("{", position):
            index = self._index_at(index, position)
            decoded = decode_object(self._text, position, self._start(index))
            calls.append(call_of(self._text, decoded, notes))
            position = skip_space(self._text, decoded.end)
            if in_list and self._text.startswith(",", position):
                position = skip_space(self._text, position + 1)
        if in_list:
            if position == len(self._text):
                raise NotJson("the list of calls is not closed", ProblemKind.UNCLOSED)
            if not self._text.startswith("]", position):
                raise NotJson(f"{self._text[position : position + 20]!r} in the list is no JSON object")
            position += 1
        elif not calls and position < self._start(index):
            raise NotJson(f"{self._text[position : position + 20]!r} is no JSON object")
        elif not calls and not self._kind(index):
            raise NotJson("the answer ends before the JSON", ProblemKind.UNCLOSED)
        return calls, position

    def _end(self, position: int, index: int, depth: int, notes: Notes) -> tuple[int, int]:
        """Where the block ends, and the index of the tag behind it. Only white space may stand before that."""
        index = self._index_at(index, position)
        gap = self._text[position : self._start(index)].strip()
        kind = self._kind(index)
        if kind == "/tool_call" and not gap:
            index += 1
            while depth > 1 and self._kind(index) == kind and self._is_blank(self._tags[index - 1].end, index):
                index += 1
                depth -= 1
            return self._tags[index - 1].end, index
        if (kind == "tool_call" and not gap) or (not kind and CLOSE.startswith(gap.lower())):
            notes.append((ProblemKind.UNCLOSED, f"the missing {CLOSE} was added"))
            return self._start(index), index
        if gap:
            raise NotJson(f"{gap[:20]!r} stands behind the JSON", ProblemKind.STRAY_TEXT)
        raise NotJson("it is not closed", ProblemKind.UNCLOSED)

    def _is_blank(self, position: int, index: int) -> bool:
        return not self._text[position : self._start(index)].strip()

    def _index_at(self, index: int, position: int) -> int:
        while self._start(index) < position:
            index += 1
        return index

    def _kind(self, index: int) -> str:
        """The kind of a tag; empty behind the last."""
        return self._tags[index].kind if index < len(self._tags) else ""

    def _start(self, index: int) -> int:
        """Where a tag begins; the end of the text behind the last."""
        return self._tags[index].start if index < len(self._tags) else len(self._text)


def _note(kind: ProblemKind, reason: str, calls: Sequence[ToolCall], span: Span) -> Problem:
    return Problem(kind, f"In the call of {', '.join(repr(call.name) for call in calls)} {reason}.", span)


def _broken(kind: ProblemKind, reason: str, span: Span) -> Block:
    return Block(span, problem=Problem(kind, f"{reason}. {_FORM}.", span))


PYTHON_TAG = "<|python_tag|>"

_BEGINNING = re.compile(
    r"""(?P<think></?+think>)|<\|python_tag\|>\s*+|\{\s*+(?:["']type["']\s*+:\s*+["']function["']\s*+,\s*+)?+"""
    r"""["'](?:name|function)["']\s*+:""",
    re.IGNORECASE,
)
_PARAMETERS = re.compile(r"""["'](?:parameters|arguments)["']\s*+:""")
_BARE_FORM = 'Write {"name": "...", "parameters": {...}} in strict JSON and nothing else'


def parse_bare_json(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Take an answer apart; a call that does not keep to ``tools`` (none: not checked) is a problem."""
    if "{" not in text and PYTHON_TAG not in text:
        return ParsedAnswer(before=text)
    tags = [
        Tag(match["think"].lower().strip("<>") if match["think"] else match[0][:1], "", *match.span())
        for match in _BEGINNING.finditer(text)
    ]
    return check(scan(text, tags, _BareReader(text, tags).read, lambda blocks: None), tools)


class _BareReader:
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
            message = f"A call was not executed: {error.reason}. {_BARE_FORM}."
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
