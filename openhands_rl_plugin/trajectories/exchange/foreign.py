"""Records of other programs: their files, the rows of these one at a time, and the fields and chat messages of a row.

Null means absent, unknown fields are left alone, and every error names its row or its field.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter, ValidationError
from pydantic_core import from_json

from openhands_rl_plugin.core.errors import RLError, from_extra, problems
from openhands_rl_plugin.core.messages import SpokenMessage, reasoning_in, text_of, to_message, whole_json, whole_text
from openhands_rl_plugin.core.types import Bounded, JsonObject, Message, PolicyRef, Tokens


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


_KINDS: Mapping[Any, TypeAdapter[Any]] = {
    str: TypeAdapter(str, config=ConfigDict(coerce_numbers_to_str=True)),
    float: TypeAdapter(Bounded),
    bool: TypeAdapter(bool),
    int: TypeAdapter(int),
    dict: TypeAdapter(dict[str, Any]),
    list: TypeAdapter(list[Any]),
}


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

    def read[Kind](self, kind: type[Kind] | TypeAdapter[Kind], *names: str) -> Kind | None:
        """The first of the fields that is there: a text (or a number, as text), a number, a flag, an object, a list."""
        if (value := self.get(*names)) is None:
            return None
        try:
            return (kind if isinstance(kind, TypeAdapter) else _KINDS[kind]).validate_python(value)
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
    except KeyError as error:
        raise ExchangeError(f"{error.args[0]}: is required") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ExchangeError(f"has not the form of a chat message ({error})") from error
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
    listed = from_text(value) if isinstance(value, str) and value.strip() else value
    tools = without_nulls(listed or [])
    if isinstance(tools, list):
        tools = [_wrapped(tool) if _is_tool({"function": tool}) else tool for tool in tools]
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise ExchangeError('tools: must be a list of {"type": "function", "function": {"name": ...}}')
    return tuple(tools)


def _wrapped(function: JsonObject) -> JsonObject:
    """Anthropic and MCP have other names for the parameters."""
    renamed = {"parameters" if name in ("input_schema", "inputSchema") else name: of for name, of in function.items()}
    return {"type": "function", "function": renamed}


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


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
    messages is."""
    listed = document.get("trajectory") if isinstance(document, dict) else document
    if isinstance(document, list) and document and all(map(_is_message, document)):
        document = {"messages": document, "trajectory_format": CONVERSATION_FILE}
    elif isinstance(listed, list) and listed and all(map(_is_event, listed)):
        document = {"history": listed}
    if isinstance(document, dict) and document and all(_is_member(value) for value in document.values()):
        document = [{"instance_id": key, **value} for key, value in document.items() if isinstance(value, dict)]
    rows = document if isinstance(document, list) else [document]
    for number, row in enumerate(rows):
        yield Unit(f"{file}[{number}]" if isinstance(document, list) else str(file), lambda row=row: _object(row))


def _is_message(value: JsonValue) -> bool:
    return isinstance(value, dict) and "role" in value and not {"content", "tool_calls"}.isdisjoint(value)


def _is_event(value: JsonValue) -> bool:
    """Whether it is an event of OpenHands V0, as its ``save_trajectory_path`` and its server list them."""
    return isinstance(value, dict) and "source" in value and not {"action", "observation"}.isdisjoint(value)


def _is_member(value: JsonValue) -> bool:
    return isinstance(value, dict) and not _MEMBERS.isdisjoint(value)


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
