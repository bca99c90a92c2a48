"""Files of exported rows. A half-written file never has the final name, and only its owner can read it."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

from pydantic_core import to_json

from openhands_rl_plugin.core.files import PRIVATE, replacing
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.reading import optional

Columns = Mapping[str, Any]
"""Column -> ``datasets`` type: a name such as ``"string"``, a list of one of these, or another mapping;
``JSON`` for values that have no common type: ``datasets`` reads them back as they were, others as text."""

JSON = "json"

_ROW_GROUP = 256


class Sink(Protocol):
    """Takes rows; a context manager that keeps all of them, or none after an error. Raises ``ExchangeError``."""

    def write(self, name: str, row: JsonObject) -> None:
        """Add a row; ``name`` is its file below a folder."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Staged(ABC):
    """A file under a temporary name beside its target, which it replaces in one step."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __enter__(self) -> Self:
        _check_place(self.target)
        try:
            with ExitStack() as stack:
                self._open(stack.enter_context(replacing(self.target, PRIVATE)))
                stack.callback(self._close)
                self._opened = stack.pop_all()
        except OSError as error:
            raise ExchangeError(f"{self.target}: cannot be written: {error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._opened.__exit__(kind, error, trace)
        except OSError as failed:
            raise ExchangeError(f"{self.target}: cannot be written: {failed}") from failed

    @abstractmethod
    def _open(self, staged: Path) -> None:
        """Begin to write to the file ``staged``."""

    @abstractmethod
    def _close(self) -> None:
        """Write the buffered rows, and close."""


class JsonFile(_Staged):
    """JSON Lines, or one array when the target ends with ``.json``; compressed when it ends with ``.gz``."""

    def write(self, name: str, row: JsonObject) -> None:
        """Add a line."""
        try:
            self._stream.write(self._separator + _written(row))
        except OSError as error:
            raise ExchangeError(f"{self.target}: cannot be written: {error}") from error
        self._separator = self._between

    def _open(self, staged: Path) -> None:
        self._raw = open(staged, "wb")  # noqa: SIM115  (closed by _close)
        compressed = self.target.suffix == ".gz"
        self._stream: IO[bytes] = gzip.GzipFile("", "wb", fileobj=self._raw, mtime=0) if compressed else self._raw  # pyright: ignore[reportAttributeAccessIssue]
        array = self.target.name.removesuffix(".gz").endswith(".json")
        self._separator, self._between, self._end = (b"[\n", b",\n", b"\n]\n") if array else (b"", b"\n", b"\n")
        self._nothing = b"[]\n" if array else b""

    def _close(self) -> None:
        self._stream.write(self._end if self._separator is self._between else self._nothing)
        self._stream.close()
        self._raw.close()


class ParquetFile(_Staged):
    """Rows with fixed columns, as ``datasets`` writes them. Raises ``MissingExtraError`` without that library."""

    def __init__(self, target: Path, columns: Columns) -> None:
        super().__init__(target)
        datasets = optional("datasets")
        features = {name: _feature(datasets, kind) for name, kind in columns.items()}
        self._features = datasets.Features(features)
        self._dataset, self._parquet = datasets.Dataset, optional("pyarrow.parquet")
        self._rows: list[JsonObject] = []

    def write(self, name: str, row: JsonObject) -> None:
        """Add a row; values without a column are dropped."""
        self._rows.append({column: row.get(column) for column in self._features})
        if len(self._rows) >= _ROW_GROUP:
            self._write_rows()

    def _open(self, staged: Path) -> None:
        self._writer = self._parquet.ParquetWriter(staged, self._features.arrow_schema)

    def _close(self) -> None:
        if self._rows:
            self._write_rows()
        self._writer.close()

    def _write_rows(self) -> None:
        table = self._dataset.from_list(self._rows, features=self._features).data.table
        self._writer.write_table(table.cast(self._writer.schema))
        self._rows = []


class Folder:
    """One file a row, in a folder for its group; the folder must not exist, or be empty.

    A name is "group/owner/file", or "group/owner/folder/file". The first owner of a group has the folder ``group``, the
    second one ``attempt_2/group``, and so on.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self._owners: dict[str, list[str]] = {}

    def __enter__(self) -> Self:
        _check_place(self.target)
        try:
            if self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir())):
                raise ExchangeError(f"{self.target}: is there already; name a new folder")
            self._staged = Path(tempfile.mkdtemp(prefix=f".{self.target.name}.", dir=self.target.parent))  # mode 0700
        except OSError as error:
            raise ExchangeError(f"{self.target}: cannot be written: {error}") from error
        return self

    def write(self, name: str, row: JsonObject) -> None:
        """Write ``row`` to its file."""
        group, owner, *inner, file_name = (safe_name(part) for part in name.split("/"))
        owners = self._owners.setdefault(group, [])
        if owner not in owners:
            owners.append(owner)
        attempt = owners.index(owner) + 1
        folder = self._staged / group if attempt == 1 else self._staged / f"attempt_{attempt}" / group
        folder = folder.joinpath(*inner)
        file = folder / file_name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(_written(row))
        except OSError as error:
            raise ExchangeError(f"{self.target}: cannot be written: {error}") from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            shutil.rmtree(self._staged, ignore_errors=True)
            return
        try:
            if self.target.exists():
                self.target.rmdir()
            os.replace(self._staged, self.target)
        except OSError as failed:
            raise ExchangeError(f"{self.target}: cannot be written: {failed}") from failed


def _check_place(target: Path) -> None:
    if target.name in ("", ".."):
        raise ExchangeError(f"{target}: is a folder; name what is to be written in it")
    if not target.parent.is_dir():
        raise ExchangeError(f"{target}: cannot be written: there is no folder {target.parent}; make it first")


def _written(row: JsonObject) -> bytes:
    """JSON has no NaN and no infinity; as texts they are read back as the same numbers."""
    return to_json(row, inf_nan_mode="strings")


def safe_name(text: str) -> str:
    """``text`` as the name of a file: no separators, no leading dots, at most 200 characters."""
    return re.sub(r"[^\w.@+=-]", "__", text).lstrip(".")[:200] or "_"


def _feature(datasets: Any, kind: Any) -> Any:
    if isinstance(kind, Mapping):
        return {name: _feature(datasets, inner) for name, inner in kind.items()}
    if isinstance(kind, list):
        return datasets.List(_feature(datasets, kind[0]))
    return datasets.Json() if kind == JSON else datasets.Value(kind)
