"""Options that several commands share: numbers, fields of settings, STORE, filters and suites of tasks."""

from __future__ import annotations

import argparse
import getpass
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import (
    CaughtFailure,
    ConfigError,
    DamagedError,
    UsageError,
    boundary,
    from_extra,
    problems,
)
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import SEARCHED, DamagedRecord, TrajectoryFilter
from openhands_rl_plugin.core.types import FailureKind, JsonObject, StopReason

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from openhands_rl_plugin.evals.swe.types import Instance, InstanceBackend


def finite(text: str) -> float:
    """Any number but NaN and infinity."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r:.40}")
    return number


def whole(text: str) -> int:
    """A whole number of at most 63 bits, which stores, seeds and servers can keep."""
    try:
        number = int(text)
    except ValueError:
        number = sys.maxsize + 1
    if abs(number) > sys.maxsize:
        raise argparse.ArgumentTypeError(f"must be a whole number of at most {sys.maxsize}, got {text!r:.40}")
    return number


def at_least[Number: (int, float)](
    least: Number, read: Callable[[str], Number], most: float = math.inf
) -> Callable[[str], Number]:
    """The type of an option with a lower bound, and maybe an upper one."""

    def bounded(text: str) -> Number:
        if not least <= (number := read(text)) <= most:
            low = "must be above 0" if 0 < least < 1 else f"must be at least {least:g}"
            raise argparse.ArgumentTypeError(low if number < least else f"must be at most {most:g}")
        return number

    return bounded


positive, natural, port = at_least(1, whole), at_least(0, whole), at_least(0, whole, 65535)
not_negative, above_zero = at_least(0.0, finite), at_least(sys.float_info.min, finite)

_METAVARS = {
    "url": "URL",
    "env": "VARIABLE",
    "timeout": "SECONDS",
    "host": "ADDRESS",
    "listen": "ADDRESS",
    "path": "DIR",
}
"""What a value is, by the last word of its field's name; a number is named by the last word itself."""
_LONGEST_CHOICES = 24


def add_fields(
    group: argparse._ActionsContainer, model: type[BaseModel], *, from_file: bool = False, without: Collection[str] = ()
) -> None:
    """One option for each field of ``model``; an option that is not given is not in the namespace.

    ``from_file``: a configuration file may give what is required, so that only ``checked`` can refuse its absence.
    """
    for name, field in model.model_fields.items():
        if name in without:
            continue
        several = get_origin(field.annotation) is tuple
        # A switch may be given alone.
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        group.add_argument(
            option_of(name),
            required=field.is_required() and not from_file,
            default=argparse.SUPPRESS,
            metavar="NAME" if several else _metavar(name, field),
            help=_help(field),
            **({"nargs": "*", "action": "extend"} if several else switch),
        )


def given_fields(args: argparse.Namespace, model: type[BaseModel]) -> dict[str, object]:
    """The fields that the options name; a value is text, of a tuple a list of texts."""
    return {name: value for name, value in vars(args).items() if name in model.model_fields}


def read_fields[M: BaseModel](args: argparse.Namespace, model: type[M], defaults: Mapping[str, object] = {}) -> M:
    """``defaults`` with what the options change. Raises ``UsageError`` that names the wrong options."""
    return checked(model, {**defaults, **given_fields(args, model)})


def checked[M: BaseModel](model: type[M], values: Mapping[str, object], names: Mapping[str, str] = {}) -> M:
    """``model`` of ``values``; ``names``: the options of fields that are called otherwise. Raises ``UsageError``."""
    try:
        # Not strictly: options are text.
        return model.model_validate(values, strict=False)
    except ValidationError as error:
        found = problems(error, model)
        lines = (f"{names.get(at[-1], option_of(at[-1]))}: {what}" if at else what for at, what in found)
        raise UsageError("\n".join(lines)) from error


def option_of(name: str) -> str:
    """``batch_size`` -> ``--batch-size``."""
    return f"--{name.replace('_', '-')}"


def _metavar(name: str, field: FieldInfo) -> str:
    last = name.rpartition("_")[2]
    if get_origin(field.annotation) is Literal:
        return _choices(field) or last.upper()
    if (meant := _METAVARS.get(last)) is not None:
        return meant
    kinds = {field.annotation, *get_args(field.annotation)}
    return "true|false" if bool in kinds else last.upper()


def _choices(field: FieldInfo) -> str:
    """The values of a choice, where they are few and short."""
    shown = "|".join(map(str, get_args(field.annotation)))
    return shown if len(shown) <= _LONGEST_CHOICES else ""


def _help(field: FieldInfo) -> str:
    parts = [field.description.rstrip(".")] if field.description else []
    if get_origin(field.annotation) is Literal and not _choices(field):
        parts.append(f"one of {', '.join(map(str, get_args(field.annotation)))}")
    text = "; ".join(parts)
    default = field.get_default()
    if not field.is_required() and default not in ("", None, ()):
        text += f" (default: {str(default).lower() if isinstance(default, bool) else default})"
    return text.strip().replace("%", "%%")


_MOST_NAMED = 20

STORE_HELP = (
    "folder of a file store, mongodb://host/database, env:NAME of a variable that holds such a URI, or a config.toml"
)

_CONTENTS = ("trajectories.sqlite", "trajectories")
_MONGODB = ("mongodb://", "mongodb+srv://")
_VARIABLE = "env:"
_CONFIGURATION = ".toml"


def storage_at(where: str) -> TrajectoryStorage:
    """The storage of a folder (created at the first write), of a database, or of a ``config.toml``'s ``[rl.storage]``.

    Raises ``ConfigError``.
    """
    from openhands_rl_plugin.config.build import open_storage
    from openhands_rl_plugin.config.registry import build
    from openhands_rl_plugin.config.toml import load_settings

    if where.endswith(_CONFIGURATION):
        return open_storage(load_settings(Path(where).expanduser()))
    uri = _mongodb_uri(where)
    if uri is None:
        return build("storages", "file", {"path": where})
    name = urlsplit(uri).path.strip("/")
    return build("storages", "mongodb", {"connection_string": uri, **({"database_name": name} if name else {})})


@asynccontextmanager
async def open_store(
    where: str, *, create: bool = False, skip_damaged: bool | None = None
) -> AsyncIterator[TrajectoryStorage]:
    """The store at a path or URI; reading never creates one. Raises ``ConfigError`` or ``StorageError``.

    ``skip_damaged``: leave out what cannot be read, and say what that is on standard error; ``None`` for a command
    without that option, whose error does not name it.
    """
    from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

    storage = storage_at(where)
    lost: list[DamagedRecord] = []
    try:
        if is_folder(where):
            _check_folder(where, create)
        if skip_damaged is not None and isinstance(storage, FileTrajectoryStorage):
            await storage.check()
        if skip_damaged:
            lost = storage.skip_damaged()
        yield storage
    except DamagedError as error:
        if skip_damaged is not False:
            raise
        raise DamagedError(f"{error}. --skip-damaged reads everything else") from error
    finally:
        _print_lost(lost)
        await storage.close()


def _print_lost(lost: Sequence[DamagedRecord]) -> None:
    """What was left out, by id, row and cause."""
    if not lost:
        return
    print(f"left out, because {len(lost)} stored record(s) cannot be read:", file=sys.stderr)
    for record in lost[:_MOST_NAMED]:
        print(f"  {record.in_words()}", file=sys.stderr)
    if len(lost) > _MOST_NAMED:
        print(f"  and {len(lost) - _MOST_NAMED} more", file=sys.stderr)


def is_folder(where: str) -> bool:
    """Whether a STORE is given by its folder. Raises ``ConfigError`` for a URI that cannot be used."""
    return not where.endswith(_CONFIGURATION) and _mongodb_uri(where) is None


def _check_folder(where: str, create: bool) -> None:
    folder = Path(where).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{where}: this is a file; give the folder of a store" + _meant(folder))
    if not create and not any((folder / name).exists() for name in _CONTENTS):
        cause = "has no trajectories in it" if folder.is_dir() else "does not exist"
        raise ConfigError(f"{where}: this folder {cause}; give the folder in [rl.storage] path")


def _meant(file: Path) -> str:
    return f", here {file.parent}" if file.name in _CONTENTS else ""


def _mongodb_uri(where: str) -> str | None:
    """The URI, or ``None`` for a path. Refuses a password, as other users can see the command line."""
    if where.startswith(_VARIABLE):
        name = where.removeprefix(_VARIABLE)
        if (uri := os.environ.get(name)) is None:
            raise ConfigError(f"the environment variable {name} is not set")
        if not uri.startswith(_MONGODB):
            raise ConfigError(f"the environment variable {name} does not begin with {' or '.join(_MONGODB)}")
        return uri
    if not where.startswith(_MONGODB):
        return None
    if urlsplit(where).password is not None:
        raise ConfigError(
            f"a password on the command line is visible to other users; put the URI into an environment variable, give "
            f"{_VARIABLE}ITS_NAME"
        )
    return where


def add_store(parser: argparse.ArgumentParser) -> None:
    """``STORE``."""
    parser.add_argument("store", metavar="STORE", help=STORE_HELP)


def add_skip_damaged(parser: argparse.ArgumentParser) -> None:
    """``--skip-damaged``, the ``skip_damaged`` of ``open_store``."""
    parser.add_argument(
        "--skip-damaged",
        action="store_true",
        help="leave out the episodes and scores that cannot be read any more, and list them on standard error",
    )


_TIMES = "2025-01-31T12:00 (local), or seconds since 1970"


def _time(text: str) -> float:
    """Seconds since 1970, or a local date and time."""
    for read in (finite, lambda text: datetime.fromisoformat(text).timestamp()):
        with suppress(argparse.ArgumentTypeError, ValueError, OverflowError, OSError):
            return read(text)
    raise argparse.ArgumentTypeError(f"must be like {_TIMES}; got {text!r}")


_SEARCHED = ", ".join(name.removesuffix("_id").replace("_", " ") for name in SEARCHED)
_FILTERS: Sequence[tuple[str, str, dict[str, Any], str]] = (
    ("run", "run_id", {"metavar": "ID"}, "episodes of this run"),
    ("group", "group_id", {"metavar": "ID"}, "episodes of this group of attempts at one task"),
    ("task", "task_id", {"metavar": "ID"}, "episodes of this task"),
    ("environment", "environment", {"metavar": "NAME"}, "episodes in this environment"),
    ("split", "split", {"metavar": "NAME"}, "episodes of tasks of this split, such as train or heldout"),
    ("strategy", "strategy", {"metavar": "NAME"}, "episodes of this rollout strategy, such as ReAct"),
    ("adapter", "adapter", {"metavar": "NAME"}, "sampled from a version of this adapter"),
    ("policy-version", "policy_version", {"type": natural, "metavar": "VERSION"}, "sampled from this version number"),
    ("stop", "stop", {"choices": [each.value for each in StopReason]}, "why the episode ended"),
    (
        "failed",
        "failed",
        {"action": argparse.BooleanOptionalAction},
        "only failed episodes, or only the others",
    ),
    ("failure", "failure_kind", {"choices": [each.value for each in FailureKind]}, "what the episode failed of"),
    ("min-reward", "reward_at_least", {"type": finite, "metavar": "REWARD"}, "lowest reward"),
    ("max-reward", "reward_at_most", {"type": finite, "metavar": "REWARD"}, "highest reward"),
    ("since", "since", {"type": _time, "metavar": "TIME"}, f"ended at this time or later: {_TIMES}"),
    ("until", "until", {"type": _time, "metavar": "TIME"}, "ended at this time or before"),
    ("contains", "contains", {"metavar": "TEXT"}, f"with this text in one of {_SEARCHED}"),
    ("labelled", "label", {"metavar": "TEXT"}, "with this tag, or a label of this kind, such as verdict"),
)
"""Option, field of ``TrajectoryFilter``, how argparse reads it, its help."""


def add_filters(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``TrajectoryFilter`` that picks episodes, and ``--skip-damaged``."""
    add_skip_damaged(parser)
    group = parser.add_argument_group("filters", "Every filter that is given must match; bounds are inclusive.")
    for option, field, read, about in _FILTERS:
        names = (f"--{option}", "--run-id") if option == "run" else (f"--{option}",)
        group.add_argument(*names, dest=f"where_{field}", help=about, **read)
    ended = group.add_mutually_exclusive_group()
    ended.add_argument("--unfinished", action="store_true", help="only episodes that have not ended")
    ended.add_argument("--all", action="store_true", help="also episodes that have not ended")


def filter_of(args: argparse.Namespace) -> TrajectoryFilter:
    """The filter that the options give. Raises ``ConfigError`` when nothing can match."""
    # A command may have an option of its own in the place of a filter, as ``train --adapter``.
    given: dict[str, Any] = {field: getattr(args, f"where_{field}", None) for _, field, _, _ in _FILTERS}
    # An episode that has not ended stopped as "unfinished", whatever else is asked for.
    unfinished = args.unfinished or given["stop"] == StopReason.UNFINISHED
    where = TrajectoryFilter(**given, finished=False if unfinished else None if args.all else True)
    for low, high, options in (
        (where.reward_at_least, where.reward_at_most, "--min-reward and --max-reward"),
        (where.since, where.until, "--since and --until"),
    ):
        if low is not None and high is not None and low > high:
            raise ConfigError(f"{options}: nothing lies between {low:g} and {high:g}; swap them")
    return where


def add_reward(parser: argparse.ArgumentParser) -> None:
    """``--reward``: which scores stand as rewards."""
    about = (
        "take the scores of this reward as the rewards: human, verifier, tests, ... (default: the newest judgement of "
    )
    parser.add_argument("--reward", metavar="NAME", help=f"{about}the outcome, or else the return)")


def add_settings(parser: argparse._ActionsContainer, *, required: bool = False) -> None:
    """``--config`` and ``--set``."""
    parser.add_argument("--config", type=Path, required=required, metavar="FILE", help="a config.toml")
    about = "settings over those of --config, such as max_turns=30 training.learning_rate=1e-5"
    parser.add_argument("--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help=about)


def settings_of(args: argparse.Namespace, *first: str, last: Sequence[str] = ()) -> RLSettings:
    """The settings of ``--config`` and ``--set``; ``first``: defaults where there is no file, ``last``: over all.

    Raises ``ConfigError``.
    """
    defaults = () if args.config else first
    return load_settings(args.config, changes=[*defaults, *args.set, *last])


def author() -> str:
    """Who judges, as this machine knows the user; empty where it does not."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


def json_object(text: str) -> JsonObject:
    """The options of a plugin, as an option's type."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError('must be a JSON object, such as {"threshold": 0.5}')
    return found


def add_tasks(group: argparse._ActionsContainer) -> None:
    """Which tasks of the suite."""
    group.add_argument("--dataset-file", type=Path, metavar="FILE", help="the suite's rows: .jsonl, .json or .parquet")
    group.add_argument("--tasks", type=positive, metavar="TASKS", help="tasks of an environment, from task 0 on")
    group.add_argument("--include", nargs="+", default=[], metavar="ID", help="only these ids or patterns ('psf__*')")
    group.add_argument("--exclude", nargs="+", default=[], metavar="ID", help="all but these ids or patterns")
    group.add_argument("--limit", type=positive, metavar="TASKS", help="use at most so many tasks")


def add_bounds(group: argparse._ActionsContainer) -> None:
    """Processes and times."""
    about = "processes that roll out the episodes (0: this one only)"
    group.add_argument("--processes", type=natural, metavar="PROCESSES", help=about)
    for option, kind, seconds, what in (
        ("--timeout", above_zero, 7200.0, "an episode"),
        ("--test-timeout", above_zero, 1800.0, "a patch's tests"),
    ):
        text = f"seconds for {what}"
        group.add_argument(option, type=kind, default=seconds, metavar="SECONDS", help=text)


def add_repositories(group: argparse._ActionsContainer) -> None:
    """Where repository tasks run."""
    where = "local: bubblewrap sandboxes; docker: the tasks' images, by docker or podman"
    group.add_argument("--backend", choices=["local", "docker"], default="local", help=where)
    mirror = "folder of git repositories as owner/name.git (default: clone from the network)"
    group.add_argument("--mirror", type=Path, metavar="DIR", help=mirror)
    group.add_argument("--cache", type=Path, metavar="DIR", help="folder for Python environments")


@asynccontextmanager
async def open_backend(
    args: argparse.Namespace, instances: Iterable[Instance], *, network: bool = False
) -> AsyncIterator[InstanceBackend]:
    """The back end that ``add_repositories`` chose, for these instances, until the block ends; ``network``: tests may
    use it.
    """
    from openhands_rl_plugin.evals.runs.backends import make_backend

    backend = make_backend(args.backend, mirror=args.mirror, cache=args.cache, network=network, instances=instances)
    try:
        yield backend
    finally:
        await backend.close()


TOKENIZER = "tokenizer.json"


def load_tokenizer(folder: Path) -> Tokenizer:
    """Of a folder's ``tokenizer.json``, or of that file. Raises ``ConfigError`` and ``MissingExtraError``."""
    with from_extra("train", "tokenizers"):
        from tokenizers import Tokenizer
    file = folder / TOKENIZER if folder.is_dir() else folder
    if not file.is_file():
        raise ConfigError(f"--tokenizer: there is no {file}; give the folder of a model that has a {TOKENIZER}")
    try:
        with boundary(FailureKind.MODEL, "tokenizer"):
            return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except CaughtFailure as error:
        raise ConfigError(f"--tokenizer: {file} cannot be read: {error.failure.message}") from error
