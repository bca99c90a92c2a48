"""Parameter values between the tags of OpenHands' text form. The form itself is described in ``function_text``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import StrEnum

from pydantic import JsonValue

from openhands_rl_plugin.core.templates.parsing import (
    UNKNOWN,
    Block,
    Blocks,
    NotJson,
    Parameter,
    ParsedAnswer,
    Problem,
    ProblemKind,
    RenderError,
    Span,
    Tag,
    check,
    decode,
    decode_object,
    dumps,
    fits,
    is_unicode,
    scan,
    signature,
    signatures,
    skip_space,
)
from openhands_rl_plugin.core.types import JsonObject, ToolCall

JSON_OPEN = "<json>"
JSON_CLOSE = "</json>"

_STRUCTURE = re.compile(r"</?(?:function|parameter)", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?\d{1,4000}", re.ASCII)


class Newlines(StrEnum):
    """The meaning of line breaks next to the tags."""

    WRAPPED = "wrapped"  # SWE-Gym's rows, the V1 SDK and our writer: one break at each end is not part of the value
    VERBATIM = "verbatim"  # OpenHands 1.6: values stand between their tags as they are


def write_value(value: JsonValue, parameter: Parameter) -> str:
    """The text that ``read_value`` gives back as ``value``, as plain as it can be."""
    if isinstance(value, str):
        plain = f"\n{value}\n" if "\n" in value else value
    else:
        plain = json.dumps(value, ensure_ascii=False)
    if _STRUCTURE.search(plain) or not _same(read_value(plain, parameter, Newlines.WRAPPED), value):
        return JSON_OPEN + as_json(value) + JSON_CLOSE
    return plain


def read_value(text: str, parameter: Parameter, newlines: Newlines) -> JsonValue:
    """The value of ``text``. Text that cannot be of the parameter's types stays text."""
    if newlines is Newlines.WRAPPED and len(text) > 1 and text[0] == text[-1] == "\n":
        text = text[1:-1]
    stripped = text.strip()
    if stripped.startswith(JSON_OPEN) and stripped.endswith(JSON_CLOSE):
        try:
            return json.loads(stripped[len(JSON_OPEN) : -len(JSON_CLOSE)])
        except (ValueError, RecursionError):
            return text
    if "string" not in parameter.types:
        return _typed(stripped, text, parameter.types)
    if parameter.allowed and text not in parameter.allowed and stripped in parameter.allowed:
        return stripped
    return text


def as_json(value: JsonValue) -> str:
    """JSON without any ``<``, so that no tag can be seen in it."""
    return dumps(value).replace("<", "\\u003c")


def _typed(stripped: str, text: str, types: frozenset[str]) -> JsonValue:
    if _INTEGER.fullmatch(stripped) and fits(0, types):
        return int(stripped)
    try:
        value = decode(stripped)
    except NotJson:
        return text
    return text if isinstance(value, str) else value


def _same(one: JsonValue, other: JsonValue) -> bool:
    """Equal, and of the same types all the way down; text must be writable as UTF-8 too."""
    if isinstance(one, str) and isinstance(other, str):
        return one == other and is_unicode(one)
    return json.dumps(one) == json.dumps(other)


_TAG = re.compile(
    r"<(?:(?P<open>function|parameter)=(?P<name>[^<>\n]*+)>"
    r"|(?P<close>/(?:function|parameter))\s*+>"
    r"|(?P<think>/?think)>)",
    re.IGNORECASE,
)
_CUT_OPENING = re.compile(r"<function=[^<>\n]*+\Z", re.IGNORECASE)
_GLUED = re.compile(r"\s*+<parameter=(?P<name>\w++)=(?P<value>[^<]*+)\Z", re.IGNORECASE)

_FORM = "Write <function=NAME>, then <parameter=NAME>value</parameter> for each parameter, then </function>"


def bare_name(name: str) -> str:
    """A name in a tag without white space and quotes around it."""
    return name.strip().strip("\"'").strip()


def tags_of(text: str) -> list[Tag]:
    """All tags of the form, and those of thoughts."""
    return [
        Tag(
            (match["open"] or match["close"] or match["think"]).lower(), match["name"] or "", match.start(), match.end()
        )
        for match in _TAG.finditer(text)
    ]


class _Broken(Exception):
    """The call at hand cannot be read; reading continues at the tag ``index``."""

    def __init__(self, kind: ProblemKind, reason: str, index: int) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason
        self.index = index


class Reader:
    """Reads the block that begins at a tag. Its public methods never raise on a model's text."""

    def __init__(self, text: str, tags: Sequence[Tag], tools: Sequence[JsonObject], newlines: Newlines) -> None:
        self._text = text
        self._tags = tags
        self._signatures = signatures(tools)
        self._newlines = newlines
        self._resumed = False

    def read(self, index: int, blocks: Blocks) -> int:
        """Add the block at the tag ``index`` to ``blocks`` and give the index of the tag behind it."""
        tag = self._tags[index]
        if tag.kind == "function":
            return _Call(self, index).read(blocks)
        if tag.kind == "parameter" and self.kind(index + 1) in ("/parameter", "/function"):
            return self._orphan(index, blocks)
        if tag.kind == "/parameter" and blocks.thinking is None and blocks.spoken and blocks.spoken[-1].calls:
            self._undo(tag, blocks)
        return index + 1

    def read_end(self, blocks: Blocks) -> None:
        """Add the problem of a call's opening tag that the end of the answer cut in two."""
        behind = self._tags[-1].end if self._tags else 0
        start = self._text.rfind("<", behind)
        if start >= 0 and _CUT_OPENING.match(self._text, start):
            span = Span(start, len(self._text))
            blocks.add(_broken_call(ProblemKind.UNCLOSED, "The answer ends inside the opening tag of a call", span))

    def kind(self, index: int) -> str:
        """The kind of a tag; empty behind the last."""
        return self._tags[index].kind if index < len(self._tags) else ""

    def start(self, index: int) -> int:
        """Where a tag begins; the end of the text behind the last."""
        return self._tags[index].start if index < len(self._tags) else len(self._text)

    def index_at(self, index: int, position: int) -> int:
        """The first tag from ``index`` on that does not begin before ``position``."""
        while index < len(self._tags) and self._tags[index].start < position:
            index += 1
        return index

    def resume(self, index: int) -> int:
        """Where to continue when nothing closed up to the end: a thought's end, once, else the end."""
        if self._resumed:
            return len(self._tags)
        self._resumed = True
        ends = (at for at in range(index, len(self._tags)) if self._tags[at].kind == "/think")
        return next(ends, len(self._tags))

    def value(self, function: str, name: str, text: str) -> JsonValue:
        """The value of a parameter from the text between its tags."""
        return read_value(text, self._signatures.get(function, UNKNOWN).parameter(name), self._newlines)

    @property
    def text(self) -> str:
        return self._text

    @property
    def tags(self) -> Sequence[Tag]:
        return self._tags

    def _orphan(self, index: int, blocks: Blocks) -> int:
        """A parameter outside of a call: up to where the call would end."""
        at = index
        while self.kind(at) in ("parameter", "/parameter"):
            at += 1
        at += self.kind(at) == "/function"
        span = Span(self._tags[index].start, self._tags[at - 1].end)
        blocks.add(_broken_call(ProblemKind.STRAY_TEXT, "A parameter stands outside of a call", span))
        return at

    def _undo(self, tag: Tag, blocks: Blocks) -> None:
        """A closing tag behind a call: tags in one of its values closed it too early, so it is not whole."""
        last = blocks.spoken.pop()
        name = last.calls[0].name
        reason = f"A value in the call of {name!r} holds the form's own tags, so its end is not clear"
        blocks.add(_broken_call(ProblemKind.STRAY_TEXT, reason, Span(last.span.start, tag.end)))


class _Call:
    """Reads one call, from its opening tag on."""

    def __init__(self, reader: Reader, index: int) -> None:
        self._reader = reader
        self._opening = reader.tags[index]
        self._index = index
        self._name = bare_name(self._opening.name)
        self._notes: list[tuple[ProblemKind, str]] = []

    def read(self, blocks: Blocks) -> int:
        try:
            arguments, end, index = self._body()
        except _Broken as broken:
            index = broken.index
            span = Span(self._opening.start, self._reader.start(index))
            if self._reader.kind(index) == "/function":
                span = Span(span.start, self._reader.tags[index].end)
                index += 1
            blocks.add(_broken_call(broken.kind, f"The call of {self._name!r} was not executed: {broken.reason}", span))
            return index
        span = Span(self._opening.start, end)
        call = ToolCall(name=self._name, arguments=arguments)
        notes = tuple(Problem(kind, f"In the call of {self._name!r} {reason}.", span) for kind, reason in self._notes)
        blocks.add(Block(span, calls=(call,), notes=notes))
        return index

    def _body(self) -> tuple[str, int, int]:
        """The arguments, where the call ends, and the index of the tag behind it."""
        if not self._name:
            raise _Broken(ProblemKind.BAD_SHAPE, "the function has no name", self._next_end(self._index + 1))
        text = self._reader.text
        begin = skip_space(text, self._opening.end)
        if text[begin : begin + 1] == "{":
            arguments, position, at = self._json(begin)
        else:
            arguments, position, at = self._parameters()
        kind = self._reader.kind(at)
        self._blank(position, at)
        if kind == "/function":
            return arguments, self._reader.tags[at].end, at + 1
        self._notes.append((ProblemKind.UNCLOSED, "the missing </function> was added"))
        return arguments, self._reader.start(at), at

    def _json(self, begin: int) -> tuple[str, int, int]:
        """A body that is one JSON object."""
        text = self._reader.text
        try:
            decoded = decode_object(text, begin, self._reader.start(self._index + 1))
        except NotJson as error:
            raise _Broken(error.kind, f"its body is not JSON: {error.reason}", self._index + 1) from None
        return text[begin : decoded.end], decoded.end, self._reader.index_at(self._index + 1, decoded.end)

    def _parameters(self) -> tuple[str, int, int]:
        reader = self._reader
        values: dict[str, JsonValue] = {}
        position, at = self._opening.end, self._index + 1
        while reader.kind(at) in ("parameter", "/parameter"):
            if reader.kind(at) == "/parameter":
                name, raw, after = self._glued(position, at)
            else:
                self._blank(position, at)
                name, raw, after = self._delimited(at)
            if name in values:
                reason = f"the parameter {name!r} is given twice; give it once"
                raise _Broken(ProblemKind.DUPLICATE, reason, self._next_end(after))
            values[name] = reader.value(self._name, name, raw)
            position, at = reader.tags[after].end, after + 1
        return dumps(values), position, at

    def _delimited(self, at: int) -> tuple[str, str, int]:
        """A parameter's name, the text between its tags, and the index of the closing one."""
        tag = self._reader.tags[at]
        name = bare_name(tag.name)
        if not name:
            raise _Broken(ProblemKind.BAD_SHAPE, "a parameter has no name", self._next_end(at))
        closing = self._closing(at, name)
        return name, self._reader.text[tag.end : self._reader.tags[closing].start], closing

    def _glued(self, position: int, at: int) -> tuple[str, str, int]:
        """``<parameter=name=value</parameter>``, which OpenHands reads too."""
        match = _GLUED.match(self._reader.text[position : self._reader.start(at)])
        if match is None:
            raise _Broken(ProblemKind.STRAY_TEXT, "</parameter> stands where no parameter is open", self._next_end(at))
        self._notes.append((ProblemKind.NESTED, f"the opening tag of the parameter {match['name']!r} was mended"))
        return match["name"], match["value"], at

    def _closing(self, opening: int, name: str) -> int:
        """The index of the tag that closes the parameter; tags that open and close inside the value are its text."""
        reader = self._reader
        inside: list[str] = []
        functions = 0
        for at in range(opening + 1, len(reader.tags)):
            kind = reader.kind(at)
            if kind in ("function", "parameter"):
                inside.append(kind)
                functions += kind == "function"
            elif kind == "/parameter":
                while inside and inside[-1] == "function":
                    inside.pop()
                    functions -= 1
                if inside:
                    inside.pop()
                elif self._ends_value(at, name):
                    return at
            elif kind == "/function":
                if functions:
                    while inside.pop() != "function":
                        pass
                    functions -= 1
                elif reader.kind(at + 1) != "/parameter":
                    raise _Broken(ProblemKind.UNCLOSED, _unclosed(name), at)
        raise _Broken(ProblemKind.UNCLOSED, _unclosed(name), reader.resume(opening))

    def _ends_value(self, at: int, name: str) -> bool:
        """Whether a parameter or the call's end follows the closing tag; other text makes it part of the value."""
        reader = self._reader
        after, following = skip_space(reader.text, reader.tags[at].end), reader.start(at + 1)
        if after == following:
            if reader.kind(at + 1) == "/parameter":
                reason = f"the parameter {name!r} is closed twice, or its value ends in a tag"
                raise _Broken(ProblemKind.STRAY_TEXT, reason, self._next_end(at))
            return reader.kind(at + 1) not in ("think", "/think")
        if following == len(reader.text):
            return "</function>".startswith(reader.text[after:].strip().lower())
        return _GLUED.match(reader.text[after:following]) is not None

    def _blank(self, position: int, at: int) -> None:
        """Refuse text between the parts of a call; the end of the answer may cut the closing tag."""
        gap = self._reader.text[position : self._reader.start(at)].strip()
        kind = self._reader.kind(at)
        if kind in ("think", "/think") or (gap and (kind or not "</function>".startswith(gap.lower()))):
            what = f"{gap[:60]!r} stands outside of its parameters" if gap else "it is not closed"
            raise _Broken(ProblemKind.STRAY_TEXT if gap else ProblemKind.UNCLOSED, what, self._next_end(at))

    def _next_end(self, at: int) -> int:
        """The tag where reading can continue after a broken call: its closing tag, or what stands outside of it."""
        while self._reader.kind(at) in ("parameter", "/parameter"):
            at += 1
        return at


def _unclosed(name: str) -> str:
    return (
        f"the parameter {name!r} is not closed by a </parameter> before the next part of the call; if its value holds "
        'such tags, write it as <json>"..."</json>, a JSON string with \\u003c for <'
    )


def _broken_call(kind: ProblemKind, reason: str, span: Span) -> Block:
    return Block(span, problem=Problem(kind, f"{reason}. {_FORM}.", span))


def render_call(call: ToolCall, tool: JsonObject | None = None) -> str:
    """The call as text. ``tool`` declares the types; without it only strings are written plainly.

    Raises RenderError when the arguments are not a JSON object or the function's name cannot stand in a tag.
    """
    if not _can_stand(call.name):
        raise RenderError(f"the function name {call.name!r} cannot stand in a tag; rename the function")
    try:
        arguments = json.loads(call.arguments or "{}")
        json.dumps(arguments, allow_nan=False)  # NaN and the infinities are no JSON, though Python reads them
    except (ValueError, RecursionError) as error:
        raise RenderError(f"the arguments of {call.name!r} are not JSON ({error}); mend or drop the call") from error
    if not isinstance(arguments, dict):
        raise RenderError(f"the arguments of {call.name!r} are no JSON object; mend or drop the call")
    if not all(_can_stand(name) for name in arguments):
        return f"<function={call.name}>\n{as_json(arguments)}\n</function>"
    declared = signature(tool)
    written = (
        f"<parameter={name}>{write_value(value, declared.parameter(name))}</parameter>\n"
        for name, value in arguments.items()
    )
    return f"<function={call.name}>\n{''.join(written)}</function>"


def read_function_text(
    text: str, tools: Sequence[JsonObject] = (), newlines: Newlines = Newlines.WRAPPED
) -> ParsedAnswer:
    """Take an answer apart. ``tools`` say the types of the parameters; whether a call keeps to them is not checked."""
    tags = tags_of(text)
    reader = Reader(text, tags, tools, newlines)
    return scan(text, tags, reader.read, reader.read_end)


def parse_function_text(
    text: str, tools: Sequence[JsonObject] = (), newlines: Newlines = Newlines.WRAPPED
) -> ParsedAnswer:
    """Take an answer apart; a call that does not keep to ``tools`` (none: not checked) is a problem."""
    return check(read_function_text(text, tools, newlines), tools)


def _can_stand(name: str) -> bool:
    """Whether a name is read back from a tag as it is."""
    return bool(name) and name == bare_name(name) and not any(mark in name for mark in "<>\n")
