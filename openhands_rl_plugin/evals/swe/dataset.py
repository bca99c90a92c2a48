"""Reads instances (SWE-bench and SWE-Gym rows) and predictions from files.

An invalid row is reported in one line and does not affect the others.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from openhands_rl_plugin.core.errors import ConfigError, from_extra
from openhands_rl_plugin.core.files import is_contained
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError, from_text

GOLD = "gold"
"""Instead of a file of predictions: the gold patch of every row."""

MAX_FILE = 2 * 2**30
_REQUIRED = ("instance_id", "repo", "base_commit")
_TEXTS = (
    *("version", "problem_statement", "hints_text", "created_at", "patch", "test_patch", "environment_setup_commit"),
)
_TESTS = {"FAIL_TO_PASS": "fail_to_pass", "PASS_TO_PASS": "pass_to_pass"}
_OWN = {*_REQUIRED, *_TEXTS}


class PatchPrediction(Frozen):
    """A model's prediction for an instance; ``model_patch`` is ``None`` without a patch."""

    instance_id: str
    model_patch: str | None = None
    model_name_or_path: str = "None"


class Predictions(NamedTuple):
    """Valid predictions, one of a model and an instance, and one line for each invalid one."""

    rows: tuple[PatchPrediction, ...]
    problems: tuple[str, ...]


def read_instances(file: Path) -> tuple[Instance, ...]:
    """The instances of a .json (list, or object by id), .jsonl or .parquet file, in its order.

    Raises ``ConfigError`` with one line for each problem: a silently missing instance would change every metric.
    """
    instances: dict[str, Instance] = {}
    problems: list[str] = []
    for at, row in _rows(file):
        try:
            instance = instance_of(_object(row))
            if instance.instance_id in instances:
                raise ConfigError(f"{instance.instance_id} is there twice")
            instances[instance.instance_id] = instance
        except ConfigError as error:
            problems.append(f"{at}: {error}")
    if problems:
        raise ConfigError("\n".join(problems[:20]))
    if not instances:
        raise ConfigError(f"{file}: no instance in it")
    return tuple(instances.values())


def instance_of(row: Mapping[str, JsonValue]) -> Instance:
    """The instance of a row, whose columns of tests may be in lower case.

    Raises ``ConfigError`` that names missing or invalid columns; also for a row without tests.
    """
    if missing := [name for name in _REQUIRED if not isinstance(row.get(name), str) or not row[name]]:
        raise ConfigError(f"column {', '.join(missing)} is missing or empty; an instance has {', '.join(_REQUIRED)}")
    identity = str(row["instance_id"])
    if "/" in identity or not is_contained(identity):
        raise ConfigError(f"the id {identity!r} cannot name a folder")
    if not is_contained(str(row["repo"])) or not re.fullmatch(r"\w[\w./-]*", str(row["base_commit"])):
        what = f"repo {row['repo']!r:.100} or base_commit {row['base_commit']!r:.100}"
        raise ConfigError(f"{identity}: {what} cannot be the name of a repository and a commit")
    tests = {field: _tests([row[each] for each in row if each.upper() == name], name) for name, field in _TESTS.items()}
    if not any(tests.values()):
        raise ConfigError(f"columns {' and '.join(_TESTS)} name no test, so that no patch of it can be judged")
    texts = {name: _text(row.get(name)) for name in (*_REQUIRED, *_TEXTS)}
    extra: JsonObject = {name: value for name, value in row.items() if name not in _OWN and name.upper() not in _TESTS}
    return Instance.model_validate({**texts, **tests, "extra": extra})


def read_rows(file: Path) -> Iterator[JsonObject]:
    """The rows of a .json, .jsonl or .parquet file, in its order. Raises ``ConfigError`` for one that is no object."""
    for at, row in _rows(file):
        try:
            yield _object(row)
        except ConfigError as error:
            raise ConfigError(f"{at}: {error}") from error


def row_of(instance: Instance) -> JsonObject:
    """The row as SWE-bench publishes it: test names as JSON in a string, then the other columns."""
    plain = instance.model_dump(mode="json", exclude={"extra", *_TESTS.values()})
    tests = {name: json.dumps(list(getattr(instance, field))) for name, field in _TESTS.items()}
    if not instance.environment_setup_commit:
        del plain["environment_setup_commit"]
    return {**plain, **tests, **instance.extra}


def read_predictions(source: str, instances: Iterable[Instance]) -> Predictions:
    """The predictions in a .jsonl or .json file (list, or object by id), or the gold patches for ``gold``.

    Raises ``ConfigError`` when the file as a whole cannot be read.
    """
    known = {instance.instance_id: instance for instance in instances}
    if source == GOLD:
        gold = tuple(
            PatchPrediction(instance_id=name, model_patch=each.patch, model_name_or_path=GOLD)
            for name, each in known.items()
        )
        return Predictions(gold, ())
    # SWE-Gym's own tools write ids in lower case.
    spelt = {name.lower(): name for name in known}
    rows: dict[tuple[str, str], PatchPrediction] = {}
    problems: list[str] = []
    for at, row in _rows(Path(source)):
        try:
            prediction = _prediction(_object(row), spelt)
            model, name = prediction.model_name_or_path, prediction.instance_id
            # Two names of models may name one folder.
            if (model.replace("/", "__"), name) in rows:
                raise ConfigError(f"a second prediction of {model} for {name}; the first one is graded")
            rows[model.replace("/", "__"), name] = prediction
        except ConfigError as error:
            problems.append(f"{at}: {error}")
    return Predictions(tuple(rows.values()), tuple(problems))


def _prediction(row: JsonObject, spelt: Mapping[str, str]) -> PatchPrediction:
    identity = row.get("instance_id")
    if not isinstance(identity, str):
        raise ConfigError("no instance_id")
    if identity.lower() not in spelt:
        raise ConfigError(f"unknown instance {identity!r}")
    if "model_patch" not in row:
        raise ConfigError(f"{identity}: no model_patch")
    patch, model = row["model_patch"], row.get("model_name_or_path")
    if not isinstance(patch, str | None):
        raise ConfigError(f"{identity}: model_patch must be text, not {type(patch).__name__}")
    name = model if isinstance(model, str) and model else "None"
    if name.replace("/", "__") in (".", "..") or "\0" in name:
        raise ConfigError(f"{identity}: the model's name {name!r} cannot name a folder")
    return PatchPrediction(instance_id=spelt[identity.lower()], model_patch=patch, model_name_or_path=name)


def _text(value: JsonValue) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)


def _tests(values: Sequence[JsonValue], column: str) -> tuple[str, ...]:
    """The names in the spellings of one column: a list, or its text in JSON or Python."""
    found = {_names(value, column) for value in values} - {()}
    if len(found) > 1:
        raise ConfigError(f"column {column} is there twice, with different tests")
    return found.pop() if found else ()


def _names(value: JsonValue, column: str) -> tuple[str, ...]:
    if isinstance(value, str):
        text = value.strip() or "[]"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            try:
                value = ast.literal_eval(text)
                tokens = tokenize.generate_tokens(io.StringIO(text).readline)
                # Python joins texts between which a comma is missing, as where numpy wrote them.
                if isinstance(value, list) and sum(each.type == tokenize.STRING for each in tokens) != len(value):
                    value = {}
            except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
                raise ConfigError(f"column {column} is neither a list nor its text in JSON or Python") from error
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name.strip() for name in value):
        raise ConfigError(f"column {column} must be a list of test names")
    return tuple(str(name) for name in value)


def _object(value: object) -> JsonObject:
    if callable(value):
        value = value()
    if not isinstance(value, dict):
        raise ConfigError(f"must be a JSON object, not {type(value).__name__}")
    return value


def _rows(file: Path) -> Iterator[tuple[str, object]]:
    """The rows with their positions; a JSONL row is a function that parses it, which may raise ``ConfigError``."""
    try:
        size = file.stat().st_size
        if size > MAX_FILE:
            raise ConfigError(f"{file}: {size >> 20} MiB are more than {MAX_FILE >> 20}; split the file")
        if file.suffix == ".parquet":
            yield from _parquet(file)
        elif file.suffix == ".json":
            yield from _members(file, _loads(file.read_text(encoding="utf-8-sig")))
        else:
            with open(file, encoding="utf-8-sig", newline="\n") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield f"{file}:{number}", partial(_loads, line)
    except ConfigError as error:
        raise ConfigError(str(error) if str(file) in str(error) else f"{file}: {error}") from error
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise ConfigError(f"{file}: there is no such file; give a .jsonl, .json or .parquet file") from error
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text") from error


def _loads(text: str) -> JsonValue:
    try:
        return from_text(text)
    except ExchangeError as error:
        raise ConfigError(str(error)) from error


def _members(file: Path, document: JsonValue) -> Iterator[tuple[str, object]]:
    if isinstance(document, dict) and not document.keys() & {"instance_id", "environment"}:
        for name, row in document.items():
            yield f"{file}[{name!r}]", {"instance_id": name, **row} if isinstance(row, dict) else row
        return
    for index, row in enumerate(document if isinstance(document, list) else [document]):
        yield f"{file}[{index}]", row


def _parquet(file: Path) -> Iterator[tuple[str, object]]:
    with from_extra("exchange", "pyarrow"):
        pyarrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    # JSON has no times: they become text.
                    yield f"{file}[{number}]", json.loads(json.dumps(row, default=str))
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file}: cannot be read as Parquet: {error}") from error
