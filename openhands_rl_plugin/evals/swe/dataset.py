"""Reads instances (SWE-bench and SWE-Gym rows) and predictions from files.

An invalid row is reported in one line and does not affect the others.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue, ValidationError, field_validator
from pydantic_core import from_json

from openhands_rl_plugin.core.errors import ConfigError, from_extra, problems
from openhands_rl_plugin.core.files import is_contained
from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.evals.swe.types import Instance

GOLD = "gold"
"""Instead of a file of predictions: the gold patch of every row."""

_REQUIRED = ("instance_id", "repo", "base_commit")
_TESTS = ("fail_to_pass", "pass_to_pass")
_TEXTS = [name for name in Instance.model_fields if name not in (*_TESTS, "extra")]
_MOST_SHOWN = 20


class PatchPrediction(Frozen):
    """A model's prediction for an instance; ``model_patch`` is ``None`` without a patch."""

    instance_id: str
    model_patch: str | None = None
    model_name_or_path: str = "None"

    @field_validator("model_name_or_path")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if name.replace("/", "__") in (".", "..") or "\0" in name:
            raise ValueError(f"{name!r} cannot name a folder")
        return name


class Predictions(NamedTuple):
    """Valid predictions, one of a model and an instance, and one line for each invalid one."""

    rows: tuple[PatchPrediction, ...]
    problems: tuple[str, ...]


def read_instances(file: Path) -> tuple[Instance, ...]:
    """The instances of a .json (list, or object by id), .jsonl or .parquet file, in its order.

    Raises ``ConfigError`` with one line for each problem: a silently missing instance would change every metric.
    """
    instances: dict[str, Instance] = {}

    def read(row: JsonObject) -> None:
        instance = instance_of(row)
        if instance.instance_id in instances:
            raise ConfigError(f"{instance.instance_id} is there twice")
        instances[instance.instance_id] = instance

    if wrong := _read(file, read):
        raise ConfigError("\n".join(wrong[:_MOST_SHOWN]))
    if not instances:
        raise ConfigError(f"{file}: no instance in it")
    return tuple(instances.values())


def instance_of(row: Mapping[str, JsonValue]) -> Instance:
    """The instance of a row, whose columns of tests may be in lower case.

    Raises ``ConfigError`` that names missing or invalid columns; also for a row without tests.
    """
    if missing := [name for name in _REQUIRED if not isinstance(row.get(name), str) or not row[name]]:
        raise ConfigError(f"column {', '.join(missing)} is missing or empty; an instance has {', '.join(_REQUIRED)}")
    identity, repo, commit = (str(row[name]) for name in _REQUIRED)
    if "/" in identity or not is_contained(identity):
        raise ConfigError(f"the id {identity!r} cannot name a folder")
    if not is_contained(repo) or not re.fullmatch(r"\w[\w./-]*", commit):
        what = f"repo {repo!r:.100} or base_commit {commit!r:.100}"
        raise ConfigError(f"{identity}: {what} cannot be the name of a repository and a commit")
    tests = {name: _names(row.get(name.upper()), name) or _names(row.get(name), name) for name in _TESTS}
    if not any(tests.values()):
        raise ConfigError("columns FAIL_TO_PASS and PASS_TO_PASS name no test, so that no patch of it can be judged")
    texts = {name: "" if row.get(name) is None else str(row[name]) for name in _TEXTS}
    extra: JsonObject = {name: each for name, each in row.items() if name not in texts and name.lower() not in tests}
    return Instance.model_validate({**texts, **tests, "extra": extra})


def read_rows(file: Path) -> list[JsonObject]:
    """The rows of a .json, .jsonl or .parquet file, in its order. Raises ``ConfigError`` for one that is no object."""
    rows: list[JsonObject] = []
    if wrong := _read(file, rows.append):
        raise ConfigError("\n".join(wrong[:_MOST_SHOWN]))
    return rows


def row_of(instance: Instance) -> JsonObject:
    """The row as SWE-bench publishes it: test names as JSON in a string, then the other columns."""
    plain = instance.model_dump(mode="json", exclude={"extra", *_TESTS})
    if not instance.environment_setup_commit:
        del plain["environment_setup_commit"]
    return {**plain, **{name.upper(): json.dumps(getattr(instance, name)) for name in _TESTS}, **instance.extra}


def read_predictions(source: str, instances: Iterable[Instance]) -> Predictions:
    """The predictions in a .jsonl or .json file (list, or object by id), or the gold patches for ``gold``.

    Raises ``ConfigError`` when the file as a whole cannot be read.
    """
    known = {instance.instance_id: instance for instance in instances}
    if source == GOLD:
        golds = ((name, each.patch) for name, each in known.items())
        rows = (PatchPrediction(instance_id=name, model_patch=patch, model_name_or_path=GOLD) for name, patch in golds)
        return Predictions(tuple(rows), ())
    # SWE-Gym's own tools write ids in lower case.
    spelt = {name.lower(): name for name in known}
    found: dict[tuple[str, str], PatchPrediction] = {}

    def read(row: JsonObject) -> None:
        prediction = _prediction(row, spelt)
        model, name = prediction.model_name_or_path, prediction.instance_id
        # Two names of models may name one folder.
        if (model.replace("/", "__"), name) in found:
            raise ConfigError(f"a second prediction of {model} for {name}; the first one is graded")
        found[model.replace("/", "__"), name] = prediction

    wrong = _read(Path(source), read)
    return Predictions(tuple(found.values()), tuple(wrong))


def _prediction(row: JsonObject, spelt: Mapping[str, str]) -> PatchPrediction:
    identity = spelt.get(str(row.get("instance_id")).lower())
    if identity is None:
        raise ConfigError(f"unknown instance {row.get('instance_id')!r}")
    if "model_patch" not in row:
        raise ConfigError(f"{identity}: no model_patch")
    named = {"model_name_or_path": row["model_name_or_path"]} if row.get("model_name_or_path") else {}
    try:
        return PatchPrediction.model_validate({"instance_id": identity, "model_patch": row["model_patch"], **named})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(at)} {what}" for at, what in problems(error, PatchPrediction))
        raise ConfigError(f"{identity}: {wrong}") from error


def _names(value: JsonValue, name: str) -> tuple[str, ...]:
    """Names of tests: a list, or its text in JSON or Python."""
    column = name.upper()
    if isinstance(value, str):
        text = value.strip() or "[]"
        try:
            value = from_json(text)
        except ValueError:
            try:
                # Python joins texts between which a comma is missing, as where numpy wrote them.
                value = {} if re.search(r"""['"]\s+['"]""", text) else ast.literal_eval(text)
            except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
                raise ConfigError(f"column {column} is neither a list nor its text in JSON or Python") from error
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name.strip() for name in value):
        raise ConfigError(f"column {column} must be a list of test names")
    return tuple(map(str, value))


def _read(file: Path, read: Callable[[JsonObject], None]) -> list[str]:
    """Call ``read`` with each row; the problems, a line each. Raises ``ConfigError`` for an unreadable file."""
    found: list[str] = []
    try:
        for at, row in _rows(file):
            try:
                value = from_json(row) if isinstance(row, str) else row
                if not isinstance(value, dict):
                    raise ConfigError(f"must be a JSON object, not {type(value).__name__}")
                read(value)
            except ConfigError as error:
                found.append(f"{at}: {error}")
            except ValueError as error:
                found.append(f"{at}: not valid JSON: {error}")
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: there is no such file; give a .jsonl, .json or .parquet file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    return found


def _rows(file: Path) -> Iterator[tuple[str, JsonValue]]:
    """The rows with their positions; a JSONL row is its line."""
    if file.suffix == ".parquet":
        yield from ((f"{file}[{number}]", row) for number, row in enumerate(_parquet(file)))
    elif file.suffix == ".json":
        document: JsonValue = from_json(file.read_text(encoding="utf-8-sig"))
        if isinstance(document, dict) and not document.keys() & {"instance_id", "environment"}:
            for name, row in document.items():
                yield f"{file}[{name!r}]", {"instance_id": name, **row} if isinstance(row, dict) else row
        else:
            for number, row in enumerate(document if isinstance(document, list) else [document]):
                yield f"{file}[{number}]", row
    else:
        with open(file, encoding="utf-8-sig", newline="\n") as lines:
            yield from ((f"{file}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())


def _parquet(file: Path) -> Iterator[JsonObject]:
    with from_extra("exchange", "pyarrow"):
        pyarrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=64):
                # JSON has no times: they become text.
                yield from json.loads(json.dumps(batch.to_pylist(), default=str))
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file}: cannot be read as Parquet: {error}") from error
