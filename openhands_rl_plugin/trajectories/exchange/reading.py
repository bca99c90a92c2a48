"""Records of files and folders, one at a time, each with its place for error messages."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import from_extra
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.trajectories.exchange.episodes import Imported
from openhands_rl_plugin.trajectories.exchange.foreign import BYTE_ORDER_MARK, ExchangeError, from_text

MAX_LINE = 256 * 2**20
MAX_DOCUMENT = 1024 * 2**20
EXTRA = "exchange"

_PEEK = 2**20

ROW_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet", ".traj", ".traj.gz")
CONVERSATION_FILE = "messages"
"""``trajectory_format`` of a row that is a whole file: a list of messages."""
_MEMBERS = {"model_patch", "instance_id", "messages", "trajectory"}


class Unit(NamedTuple):
    """One record to come: its place ("file:line"), how far reading got with it, and how to read it.

    ``read`` raises ``ExchangeError``, which then concerns this record only.
    """

    at: str
    done: int
    read: Callable[[], Imported | list[Imported]]


class Source(NamedTuple):
    """What an importer goes through; ``total`` is in the unit of ``Unit.done``, bytes or records."""

    total: int
    units: Iterator[Unit]
    in_bytes: bool = False


class Row(NamedTuple):
    """One row, not decoded yet. ``done``: bytes of the file read so far."""

    at: str
    done: int
    load: Callable[[], JsonObject]


def row_source(path: Path, convert: Callable[[JsonObject, Path], Imported | list[Imported]]) -> Source:
    """The rows of a file (JSON Lines, JSON, Parquet; gzip), or of all such files below a folder, in order of name."""
    files = files_below(path, ROW_SUFFIXES)

    def units() -> Iterator[Unit]:
        before = 0
        for file in files:
            try:
                for row in rows_of(file):
                    # The place of one row of several is no name of a file.
                    yield Unit(row.at, before + row.done, lambda row=row: convert(row.load(), Path(row.at)))
            except ExchangeError as error:
                yield Unit(str(file), before, partial(refuse, error))
            before += file.stat().st_size

    return Source(sum(file.stat().st_size for file in files), units(), in_bytes=True)


def refuse(error: ExchangeError) -> Imported:
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


def rows_of(file: Path) -> Iterator[Row]:
    """The rows of one file. Raises ``ExchangeError`` when the file as a whole cannot be read."""
    if file.name.endswith(".parquet"):
        yield from _parquet_rows(file)
        return
    with _reading(file), open(file, "rb", buffering=0) as raw:
        source: Any = gzip.GzipFile(fileobj=raw) if file.name.endswith(".gz") else raw
        stream = io.BufferedReader(source, _PEEK)
        if _is_lines(file, stream):
            yield from _lines(file, stream, raw)
        else:
            yield from _members(file, _document(file, stream), file.stat().st_size)


def read_document(file: Path) -> JsonObject:
    """A file that is one JSON object. Raises ``ExchangeError``."""
    with _reading(file), open(file, "rb") as stream:
        return _object(_document(file, stream))


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise ExchangeError(f"{file}: cannot be read: {error}") from error


def _is_lines(file: Path, stream: io.BufferedReader[Any]) -> bool:
    """Whether the file has one object a line, whatever it is called; a pretty-printed document has not."""
    start = stream.peek(_PEEK).removeprefix(BYTE_ORDER_MARK).lstrip()
    if ".jsonl" in file.name and not start.startswith(b"["):
        return True
    line, _, more = start.partition(b"\n")
    return line.startswith(b"{") and line.rstrip().endswith(b"}") and bool(more.strip())


def _lines(file: Path, stream: io.BufferedReader[Any], raw: io.FileIO) -> Iterator[Row]:
    number = 0
    while line := stream.readline(MAX_LINE + 1):
        number += 1
        if too_long := len(line) > MAX_LINE:
            while (more := stream.readline(MAX_LINE)) and not more.endswith(b"\n"):
                continue
            line = b""
        if too_long or not line.isspace():
            yield Row(f"{file}:{number}", raw.tell(), partial(_line, line))


def _line(line: bytes) -> JsonObject:
    if not line:
        raise ExchangeError(f"longer than {MAX_LINE >> 20} MiB")
    return _object(from_text(line))


def _document(file: Path, stream: io.BufferedReader[Any]) -> JsonValue:
    data = stream.read(MAX_DOCUMENT + 1)
    if len(data) > MAX_DOCUMENT:
        raise ExchangeError(f"{file}: larger than {MAX_DOCUMENT >> 20} MiB as one document; write it as JSON Lines")
    try:
        return from_text(data)
    except ExchangeError as error:
        raise ExchangeError(f"{file}: {error}") from error


def _members(file: Path, document: JsonValue, size: int) -> Iterator[Row]:
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
    for number, row in enumerate(rows, 1):
        at = f"{file}[{number - 1}]" if isinstance(document, list) else str(file)
        yield Row(at, size * number // len(rows), lambda row=row: _object(row))


def _is_message(value: JsonValue) -> bool:
    return isinstance(value, dict) and "role" in value and not {"content", "tool_calls"}.isdisjoint(value)


def _is_event(value: JsonValue) -> bool:
    """Whether it is an event of OpenHands V0, as its ``save_trajectory_path`` and its server list them."""
    return isinstance(value, dict) and "source" in value and not {"action", "observation"}.isdisjoint(value)


def _is_member(value: JsonValue) -> bool:
    return isinstance(value, dict) and not _MEMBERS.isdisjoint(value)


def _parquet_rows(file: Path) -> Iterator[Row]:
    pyarrow, parquet = optional("pyarrow"), optional("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            size, number, rows = file.stat().st_size, 0, max(1, table.metadata.num_rows)
            decode = {field.name: _decoder(pyarrow, field.type) for field in table.schema_arrow}
            for batch in table.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    number += 1
                    yield Row(f"{file}[{number - 1}]", size * number // rows, partial(_decoded, row, decode))
    except (pyarrow.ArrowException, OSError) as error:
        raise ExchangeError(f"{file}: cannot be read as Parquet: {error}") from error


def _decoded(row: Any, decode: Mapping[str, Callable[[JsonValue], JsonValue]]) -> JsonObject:
    # Times and decimals are no JSON; what has them is written as text.
    plain = _object(from_text(json.dumps(row, default=str)))
    return {name: decode[name](value) for name, value in plain.items()}


def _decoder(pyarrow: Any, kind: Any) -> Callable[[JsonValue], JsonValue]:
    """Reads values of an Arrow type in which some are JSON."""
    types = pyarrow.types
    if isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name == "arrow.json":
        return lambda value: from_text(value) if isinstance(value, str) else value
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = _decoder(pyarrow, kind.value_type)
        return lambda value: [inner(each) for each in value] if isinstance(value, list) else value
    if types.is_struct(kind):
        fields = {field.name: _decoder(pyarrow, field.type) for field in kind}
        return lambda value: (
            {name: fields[name](each) for name, each in value.items()} if isinstance(value, dict) else value
        )
    return lambda value: value


def optional(module: str) -> Any:
    """A module that comes with ``datasets``. Raises ``MissingExtraError`` without that library."""
    with from_extra(EXTRA, "datasets"):
        return import_module(module)


def _object(value: JsonValue) -> JsonObject:
    if not isinstance(value, dict):
        raise ExchangeError(f"must be a JSON object, not {type(value).__name__}")
    return value
