"""Files of exported rows. A half-written file never has the final name, and only its owner can read it."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from openhands_rl_plugin.core.files import PRIVATE, draft_folder, replacing
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, optional

Sink = Callable[[str, JsonObject], None]
"""Writes a row; the text is the name of its file below a folder. Raises ``ExchangeError``."""

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

        def write(name: str, row: JsonObject) -> None:
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

    def write(name: str, row: JsonObject) -> None:
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
def folder_of_files(target: Path) -> Iterator[Sink]:
    """One file a row, in a folder for its group; the target must not exist, or be an empty folder.

    A name is "group/owner/file", or "group/owner/folder/file". The first owner of a group has the folder ``group``, the
    second one ``attempt_2/group``, and so on. Raises as ``json_file``.
    """
    owners: dict[str, list[str]] = {}
    with _writing(target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ExchangeError(f"{target}: is there already; name a new folder")
        with draft_folder(target.parent, f".{target.name}.") as staged:

            def write(name: str, row: JsonObject) -> None:
                group, owner, *inner, file_name = (safe_name(part) for part in name.split("/"))
                known = owners.setdefault(group, [])
                if owner not in known:
                    known.append(owner)
                attempt = known.index(owner) + 1
                folder = (staged if attempt == 1 else staged / f"attempt_{attempt}").joinpath(group, *inner)
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with open(os.open(folder / file_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as stream:
                    stream.write(_encoded(row))

            yield write
            if target.exists():
                target.rmdir()
            os.replace(staged, target)


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


def safe_name(text: str) -> str:
    """``text`` as the name of a file: no separators, no leading dots, at most 200 characters."""
    return re.sub(r"[^\w.@+=-]", "__", text).lstrip(".")[:200] or "_"


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
