"""Files of exported rows. A half-written file never has the final name, and only its owner can read it."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from openhands_rl_plugin.core.files import PRIVATE, replacing
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, optional

Sink = Callable[[JsonObject], None]
"""Writes a row. Raises ``ExchangeError``."""

_ROW_GROUP = 256


@contextmanager
def json_file(target: Path) -> Iterator[Sink]:
    """JSON Lines, or one array when the target ends with ``.json``; compressed when it ends with ``.gz``.

    All rows are kept, or none after an error. Raises ``ExchangeError``.
    """
    array = target.name.removesuffix(".gz").endswith(".json")
    start, between, end = (b"[\n", b",\n", b"\n]\n") if array else (b"", b"\n", b"\n")
    with _writing(target), replacing(target, PRIVATE) as staged, open(staged, "wb") as raw:
        stream: Any = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if target.suffix == ".gz" else raw
        rows = 0

        def write(row: JsonObject) -> None:
            nonlocal rows
            stream.write((between if rows else start) + _encoded(row))
            rows += 1

        yield write
        stream.write(end if rows else b"[]\n" if array else b"")
        stream.close()


@contextmanager
def parquet_file(target: Path, columns: Sequence[str], *, as_objects: bool = True) -> Iterator[Sink]:
    """Rows with fixed columns, as ``datasets`` writes them; values without a column are dropped. ``as_objects``: the
    arguments of calls are JSON objects, not texts.

    Raises ``MissingExtraError`` without that library, else as ``json_file``.
    """
    datasets, parquet = optional("datasets"), optional("pyarrow.parquet")
    features = _features(datasets, columns, as_objects)
    rows: list[JsonObject] = []

    def flush() -> None:
        table = datasets.Dataset.from_list(rows, features=features).data.table
        writer.write_table(table.cast(writer.schema))
        rows.clear()

    def write(row: JsonObject) -> None:
        rows.append({column: row.get(column) for column in features})
        if len(rows) >= _ROW_GROUP:
            flush()

    with (
        _writing(target),
        replacing(target, PRIVATE) as staged,
        parquet.ParquetWriter(staged, features.arrow_schema) as writer,
    ):
        yield write
        if rows:
            flush()


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    if target.name in ("", ".."):
        raise ExchangeError(f"{target}: is a folder; name what is to be written in it")
    if not target.parent.is_dir():
        raise ExchangeError(f"{target}: cannot be written: there is no folder {target.parent}; make it first")
    try:
        yield
    except OSError as error:
        raise ExchangeError(f"{target}: cannot be written: {error}") from error


def _encoded(row: JsonObject) -> bytes:
    """JSON has no NaN and no infinity; as texts they are read back as the same numbers."""
    return to_json(row, inf_nan_mode="strings")


def _features(datasets: Any, columns: Sequence[str], as_objects: bool) -> Any:
    """The types of the columns: text unless it says otherwise here. ``datasets`` reads values that have no common type
    back as they were; trainers take null for absent."""
    text, unlike = datasets.Value("string"), datasets.Json()
    function = {"name": text, "arguments": unlike if as_objects else text}
    calls = datasets.List({"id": text, "type": text, "function": function})
    texts = dict.fromkeys(("role", "content", "reasoning_content", "tool_call_id", "name"), text)
    kinds = {
        **dict.fromkeys(("messages", "prompt", "chosen", "rejected"), datasets.List({**texts, "tool_calls": calls})),
        "tools": datasets.List(unlike),
        "test_result": unlike,
        **dict.fromkeys(("score", "margin", "value"), datasets.Value("float64")),
        **dict.fromkeys(("chosen_visits", "rejected_visits", "visits"), datasets.Value("int64")),
        **dict.fromkeys(("resolved", "on_path"), datasets.Value("bool")),
    }
    return datasets.Features({name: kinds.get(name, text) for name in columns})
