"""Records of other programs: their files, the rows of these one at a time, and the fields and chat messages of a row;
and the conversations of our own rows.

Null means absent, unknown fields are left alone, and every error names its row or its field.

Rows have OpenAI's chat messages with reasoning, arguments as objects or as text: chat templates differ in what they
want. Those of Qwen2.5 and Llama 3.1 print a text once more as JSON, so that a model would learn to quote its arguments;
DeepSeek V3's takes text only. In the text form of OpenHands calls and results are text, one call a turn, and the system
prompt describes the tools.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError
from pydantic_core import from_json

from openhands_rl_plugin.core.errors import RLError, from_extra, problems
from openhands_rl_plugin.core.messages import (
    SpokenMessage,
    reasoning_in,
    reasoning_of,
    reasoning_with,
    text_of,
    to_message,
    to_wire,
    whole_json,
    whole_text,
)
from openhands_rl_plugin.core.templates.function_text import RenderError, render_call
from openhands_rl_plugin.core.types import Bounded, JsonObject, Message, PolicyRef, Tokens, Trajectory


class ExchangeError(RLError):
    """A record cannot be read, or a file cannot be read or written."""


class LeftOutError(ExchangeError):
    """A trajectory that a format cannot represent; the others are written."""


def what_is_wrong(error: ValidationError, model: type[BaseModel] = BaseModel) -> str:
    """The first wrong fields of a record, in one line."""
    lines = [": ".join(filter(None, (".".join(at), what))) for at, what in problems(error, model)]
    return "; ".join(lines[:5])


@contextmanager
def within(place: str) -> Iterator[None]:
    """Name ``place`` in an ``ExchangeError`` of the block."""
    try:
        yield
    except ExchangeError as error:
        raise ExchangeError(f"{place}: {error}") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    if kind is str:
        return TypeAdapter(str, config=ConfigDict(coerce_numbers_to_str=True))
    return TypeAdapter(Bounded if kind is float else kind)


class Record:
    """The fields of a JSON object. Unions of data sets fill absent fields with null, so null is the same as absent.

    Its methods raise ``ExchangeError`` that names the field; ``at`` is the place of the object in its row.
    """

    def __init__(self, value: object, at: str = "") -> None:
        if not isinstance(value, dict):
            raise ExchangeError(f"{f'{at}: ' * bool(at)}must be a JSON object, not {type(value).__name__}")
        self.fields: JsonObject = {name: each for name, each in value.items() if each is not None}
        self._at = f"{at}." if at else ""

    def get(self, *names: str) -> JsonValue:
        """The first of the fields that is there, unchecked."""
        return next((self.fields[name] for name in names if name in self.fields), None)

    def read[Kind](self, kind: type[Kind], *names: str) -> Kind | None:
        """The first of the fields that is there: a text (or a number, as text), a number, a flag, an object, a list."""
        if (value := self.get(*names)) is None:
            return None
        try:
            return _adapter(kind).validate_python(value)
        except ValidationError as error:
            raise ExchangeError(f"{self._at}{names[0]}: {what_is_wrong(error)}") from error

    def text(self, *names: str) -> str:
        """A text, which is empty where there is none."""
        return self.read(str, *names) or ""

    def record(self, name: str) -> Record:
        """An object, which is empty where there is none."""
        return Record(self.read(dict, name) or {}, f"{self._at}{name}")

    def records(self, name: str) -> list[Record]:
        """The objects of a list."""
        return [Record(each, f"{self._at}{name}[{at}]") for at, each in enumerate(self.read(list, name) or ())]

    def messages(self, name: str) -> tuple[RecordMessage, ...]:
        """Chat messages, as a list or as JSON."""
        with within(f"{self._at}{name}"):
            return chat_messages(self.get(name) or [])

    def whole(self, answers: Sequence[Message], prompt: Sequence[Message] = ()) -> tuple[Message, ...]:
        """A conversation behind the system prompt that stands beside it. Raises ``ExchangeError`` without answers."""
        if not any(message.role == "assistant" for message in answers):
            raise ExchangeError("there is no answer in it")
        messages, beside = (*prompt, *answers), whole_text(text_of(self.get("system", "system_prompt")) or "")
        known = not beside or (messages[0].role, messages[0].content) == ("system", beside)
        return messages if known else (Message(role="system", content=beside), *messages)


def at_path(value: object, *names: str) -> Any:
    """What stands below these names in nested objects, or ``None``."""
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def object_at(value: object, *names: str) -> JsonObject:
    """The object below these names, empty where there is none."""
    found = at_path(value, *names)
    return found if isinstance(found, dict) else {}


def present(**values: Any) -> JsonObject:
    """The values that are not ``None``."""
    return {name: value for name, value in values.items() if value is not None}


class RecordMessage(SpokenMessage):
    """A message of a record. ``context_only``: the record says that nothing is to be learned from it. The rest is what
    the record says of a sampled one; ``policy`` where it is another one than the record's, ``tokens`` with the whole
    prompt.
    """

    context_only: bool = False
    policy: PolicyRef | None = None
    tokens: Tokens | None = None
    finish_reason: str | None = None
    reward: float | None = None


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
    """The id of the call that a result belongs to. Raises ``ExchangeError`` for several."""
    given = next((entry[name] for name in _LINKS if entry.get(name) not in (None, "", [])), None)
    ids = given if isinstance(given, list) else [given]
    if len(ids) != 1 or not isinstance(ids[0], str | int | None):
        raise ExchangeError(f"a result belongs to one call, and this one names {given!r:.80}")
    return None if ids[0] is None else str(ids[0])


def chat_message(wire: object) -> RecordMessage:
    """An OpenAI chat message as records have it. Raises ``ExchangeError``."""
    if not isinstance(wire, dict):
        raise ExchangeError(f"must be a chat message, not {type(wire).__name__}")
    parts = wire.get("content")
    if isinstance(parts, list) and any(at_path(part, "type") in ("tool_use", "tool_result") for part in parts):
        raise ExchangeError("has calls or results among the parts of its content: write them as OpenAI does")
    # A columnar data set gives every call the fields of all calls.
    filled = {name: without_nulls(wire[name]) for name in ("tool_calls", "function_call") if wire.get(name)}
    try:
        message = to_message({**wire, **filled, "tool_call_id": linked_call(wire)})
    except ValidationError as error:
        raise ExchangeError(what_is_wrong(error, RecordMessage)) from error
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ExchangeError(f"has not the form of a chat message ({error!r})") from error
    return RecordMessage(**dict(message), reasoning=reasoning_in(wire), context_only=is_context_only(wire))


def chat_messages(value: object) -> tuple[RecordMessage, ...]:
    """Chat messages, as a list or as JSON. Raises ``ExchangeError``."""
    listed = from_text(value) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple):
        raise ExchangeError(f"must be a list of chat messages, not {type(listed).__name__}")
    return tuple(map(chat_message, listed))


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
    listed = without_nulls((from_text(value) if isinstance(value, str) and value.strip() else value) or [])
    return tuple(map(_tool, listed if isinstance(listed, list) else [None]))


def _tool(tool: JsonValue) -> JsonObject:
    function = object_at(tool, "function") or object_at(tool)
    if not isinstance(function.get("name"), str):
        raise ExchangeError('tools: must be a list of {"type": "function", "function": {"name": ...}}')
    # Anthropic and MCP have other names for the parameters.
    names = {"input_schema": "parameters", "inputSchema": "parameters"}
    renamed = {names.get(name, name): each for name, each in function.items()}
    return tool if isinstance(tool, dict) and "function" in tool else {"type": "function", "function": renamed}


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def from_text(text: str | bytes) -> JsonValue:
    """JSON, with U+FFFD for what no file can hold. Raises ``ExchangeError`` that says where it is broken."""
    try:
        return from_json(text.removeprefix(_BYTE_ORDER_MARK) if isinstance(text, bytes) else text)
    except ValueError as error:
        try:
            decoded = text.decode("utf-8-sig", "replace") if isinstance(text, bytes) else text
            return from_json(json.dumps(whole_json(json.loads(decoded))))
        except (ValueError, RecursionError):
            raise ExchangeError(f"not valid JSON: {error}") from error


_PEEK = 2**20

ROW_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", ".traj", ".traj.gz")
CONVERSATION_FILE = "messages"
"""``trajectory_format`` of a row that is a whole file: a list of messages."""
_MEMBERS = {"model_patch", "instance_id", "messages", "trajectory"}


class Unit(NamedTuple):
    """One row to come, as an object or as what an importer makes of it.

    ``at`` is its place ("file:line"). ``read`` raises ``ExchangeError``, which then concerns this row only.
    """

    at: str
    read: Callable[[], Any]


Units = Iterator[Unit]


def units_of(path: Path, convert: Callable[[JsonObject, Path], Any]) -> Units:
    """The rows of a file (JSON Lines, JSON, Parquet; gzip), or of all such files below a folder, in order of name."""
    return (unit for file in files_below(path, ROW_SUFFIXES) for unit in _converted(file, convert))


def _converted(file: Path, convert: Callable[[JsonObject, Path], Any]) -> Units:
    try:
        for row in rows_of(file):
            # The place of one row of several is no name of a file.
            yield Unit(row.at, lambda row=row: convert(row.read(), Path(row.at)))
    except ExchangeError as error:
        yield Unit(str(file), partial(refuse, error))


def refuse(error: ExchangeError) -> Any:
    """Raise ``error``, which is all that is known of a record."""
    raise error


def files_below(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """``path`` itself, or the files in it that end so. Raises ``ExchangeError`` when there is none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ExchangeError(f"{path}: no such file or folder")
    found = sorted(each for each in path.rglob("*") if each.name.endswith(suffixes) and each.is_file())
    if not found:
        raise ExchangeError(f"{path}: no file in it ends with {' or '.join(suffixes)}")
    return found


def rows_of(file: Path) -> Units:
    """The rows of one file. Raises ``ExchangeError`` when the file as a whole cannot be read."""
    if file.name.endswith(".parquet"):
        yield from _parquet_rows(file)
        return
    with _opened(file) as stream:
        start = stream.peek(_PEEK).removeprefix(_BYTE_ORDER_MARK).lstrip()
        line, _, more = start.partition(b"\n")
        # One object a line, whatever the file is called; a pretty-printed document has not.
        objects = line.startswith(b"{") and line.rstrip().endswith(b"}") and bool(more.strip())
        if objects or (".jsonl" in file.name and not start.startswith(b"[")):
            for number, line in enumerate(stream, 1):
                if not line.isspace():
                    yield Unit(f"{file}:{number}", lambda line=line: _object(from_text(line)))
        else:
            with within(str(file)):
                document = from_text(stream.read())
            yield from _members(file, document)


def read_document(file: Path) -> JsonObject:
    """A file that is one JSON object. Raises ``ExchangeError``."""
    with _opened(file) as stream, within(str(file)):
        return _object(from_text(stream.read()))


@contextmanager
def _opened(file: Path) -> Iterator[io.BufferedReader[Any]]:
    try:
        with open(file, "rb", buffering=0) as raw:
            source: Any = gzip.GzipFile(fileobj=raw) if file.name.endswith(".gz") else raw
            yield io.BufferedReader(source, _PEEK)
    except (OSError, EOFError, zlib.error) as error:
        raise ExchangeError(f"{file}: cannot be read: {error}") from error


def _members(file: Path, document: JsonValue) -> Units:
    """The rows of an array, or of an object from instance ids to rows. Any other object is one row, as a list of chat
    messages is, and one of events of OpenHands V0, as its ``save_trajectory_path`` and its server have them."""
    listed = document.get("trajectory") if isinstance(document, dict) else document
    if isinstance(document, list) and _all_have(document, {"role"}, {"content", "tool_calls"}):
        document = {"messages": document, "trajectory_format": CONVERSATION_FILE}
    elif isinstance(listed, list) and _all_have(listed, {"source"}, {"action", "observation"}):
        document = {"history": listed}
    elif isinstance(document, dict) and _all_have(document.values(), set(), _MEMBERS):
        document = [{"instance_id": key, **value} for key, value in document.items() if isinstance(value, dict)]
    rows = document if isinstance(document, list) else [document]
    for number, row in enumerate(rows):
        yield Unit(f"{file}[{number}]" if isinstance(document, list) else str(file), lambda row=row: _object(row))


def _all_have(values: Collection[JsonValue], names: set[str], some: set[str]) -> bool:
    """Whether all are objects with all of ``names`` and one of ``some``."""
    objects = [value for value in values if isinstance(value, dict) and names <= value.keys() and some & value.keys()]
    return 0 < len(objects) == len(values)


def _parquet_rows(file: Path) -> Units:
    datasets, pyarrow, parquet = optional("datasets"), optional("pyarrow"), optional("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            # Columns may hold JSON, which ``datasets`` marks.
            decode = datasets.Features.from_arrow_schema(table.schema_arrow).decode_example
            rows = (row for batch in table.iter_batches(batch_size=64) for row in batch.to_pylist())
            for number, row in enumerate(rows):
                # Times and decimals are no JSON; what has them is written as text.
                read = partial(lambda row: _object(from_text(json.dumps(decode(row), default=str))), row)
                yield Unit(f"{file}[{number}]", read)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ExchangeError(f"{file}: cannot be read as Parquet: {error}") from error


def optional(module: str) -> Any:
    """A module that comes with ``datasets``. Raises ``MissingExtraError`` without that library."""
    with from_extra("exchange", "datasets"):
        return import_module(module)


def _object(value: JsonValue) -> JsonObject:
    if not isinstance(value, dict):
        raise ExchangeError(f"must be a JSON object, not {type(value).__name__}")
    return value


ArgumentsForm = Literal["object", "string"]
ARGUMENTS_FORMS: tuple[ArgumentsForm, ...] = ("object", "string")


def spoken_messages(trajectory: Trajectory, nodes: Sequence[int]) -> list[SpokenMessage]:
    """The messages of some nodes, answers with their reasoning."""
    wanted = (trajectory.nodes[at] for at in nodes)
    thoughts = ((node, reasoning_of(node) if node.message.role == "assistant" else None) for node in wanted)
    return [SpokenMessage(**dict(node.message), reasoning=text, sampled=node.sampled) for node, text in thoughts]


def wire_of(message: Message) -> JsonObject:
    """An OpenAI chat message, its reasoning in ``reasoning_content``."""
    return {**to_wire(message), **present(reasoning_content=reasoning_with(message))}


def conversation_of(trajectory: Trajectory, path: Sequence[int]) -> list[JsonValue]:
    """The messages of some nodes, for a row."""
    return [wire_of(message) for message in spoken_messages(trajectory, path)]


def arguments_object(arguments: str) -> JsonObject | None:
    """The arguments of a call as an object; ``None`` when the text is none."""
    try:
        value = from_text(arguments or "{}")
    except ExchangeError:
        return None
    return value if isinstance(value, dict) else None


def with_objects(row: JsonObject) -> JsonObject:
    """The row with the arguments of all calls as objects, changed in place; a malformed text stays as it is."""
    listed: list[Any] = [each for column in row.values() if isinstance(column, list) for each in column]
    for message in listed:
        for call in (isinstance(message, dict) and message.get("tool_calls")) or ():
            known = arguments_object(call["function"]["arguments"])
            call["function"] |= {} if known is None else {"arguments": known}
    return row


def single_call_turns(messages: Sequence[Message]) -> list[Message]:
    """Split every message with several calls into one message a call, each followed by its own result.

    The text and the reasoning stand with the first of the calls. Raises ``LeftOutError`` where one of several calls got
    no result: between two others it cannot stand.
    """
    out: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.tool_calls) < 2:
            out.append(message)
            continue
        following = [*takewhile(lambda each: each.role == "tool", messages[at:])]
        results, at = {each.tool_call_id: each for each in following}, at + len(following)
        for number, call in enumerate(message.tool_calls):
            if call.id not in results:
                raise LeftOutError("several calls were made at once and some of them got no result")
            beside = {"content": None, **({"reasoning": None} if isinstance(message, SpokenMessage) else {})}
            split = message.model_copy(update={"tool_calls": (call,), **(beside if number else {})})
            out += [split, results[call.id]]
    return out


def until_last_answer(messages: Sequence[Message]) -> list[Message]:
    """Without what came after the assistant's last message: nothing is learned from it."""
    last = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return list(messages[: last + 1])


_HEAD = "\nYou have access to the following functions:\n\n"
# The block that says IMPORTANT is never closed in the prompt of the published rows, and is kept so.
_TAIL = """

If you choose to call a function ONLY reply in the following format with NO suffix:

<function=example_function_name>
<parameter=example_parameter_1>value_1</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format, start with <function= and end with </function>
- Required parameters MUST be specified
- Only call one function at a time
- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after.
- If there is no function call available, answer the question like normal with your current knowledge and do not tell \
the user about function calls
"""
_NO_DESCRIPTION = "No description provided"


def system_prompt(content: str, tools: Sequence[JsonObject]) -> str:
    """``content`` with the description of the tools and the rules of the text form; itself without tools."""
    described = (_describe(number, object_at(tool, "function")) for number, tool in enumerate(tools, 1))
    return f"{content}{_HEAD}{'\n'.join(described)}{_TAIL}" if tools else content


def _describe(number: int, function: JsonObject) -> str:
    schema, listed = function.get("parameters"), "No parameters are required for this function.\n"
    if isinstance(schema, dict):
        required = at_path(schema, "required") or []
        parameters = enumerate(object_at(schema, "properties").items(), 1)
        lines = (f"  ({at}) {name} {_declared(info, name in required)}\n" for at, (name, info) in parameters)
        listed = f"Parameters:\n{''.join(lines)}"
    name, about = function.get("name", ""), function.get("description", "")
    begin = f"---- BEGIN FUNCTION #{number}: {name} ----\nDescription: {about}\n"
    return f"{begin}{listed}---- END FUNCTION #{number} ----\n"


def _declared(info: JsonValue, required: bool) -> str:
    known = info if isinstance(info, dict) else {}
    allowed, status = known.get("enum"), "required" if required else "optional"
    values = ", ".join(f"`{value}`" for value in allowed) if isinstance(allowed, list) else None
    suffix = "" if values is None else f"\nAllowed values: [{values}]"
    return f"({known.get('type', 'string')}, {status}): {known.get('description', _NO_DESCRIPTION)}{suffix}"


def text_messages(messages: Sequence[Message], tools: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Messages with at most one call each in the text form. Raises ``LeftOutError``."""
    if tools and (not messages or messages[0].role != "system"):
        yield {"role": "system", "content": system_prompt("", tools)}
    by_name = {str(at_path(tool, "function", "name")): tool for tool in tools}
    names: dict[str | None, str] = {}
    for at, message in enumerate(messages):
        content, role = message.content or "", message.role
        if role == "system" and at == 0:
            content = system_prompt(content, tools)
        elif role == "tool":
            name = message.name or names.get(message.tool_call_id, "function")
            content, role = f"EXECUTION RESULT of [{name}]:\n{content}", "user"
        for call in message.tool_calls:
            names[call.id] = call.name
            try:
                content = "\n\n".join(filter(None, (content, render_call(call, by_name.get(call.name)))))
            except RenderError as error:
                raise LeftOutError(str(error)) from error
        yield {"role": role, "content": content, **present(reasoning_content=reasoning_with(message))}
