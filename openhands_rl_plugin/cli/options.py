"""Options that several commands share: numbers, fields of settings, STORE, filters and suites of tasks."""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import UsageError, problems
from openhands_rl_plugin.core.records import SEARCHED, TrajectoryFilter

if TYPE_CHECKING:
    from openhands_rl_plugin.evals.swe.instances import Instance, InstanceBackend


def at_least[Number: (int, float)](least: Number, read: Callable[[str], Number]) -> Callable[[str], Number]:
    """The type of an option with a lower bound; stores and seeds keep 63 bits."""

    def number(text: str) -> Number:
        if not least <= (found := read(text)) <= sys.maxsize:
            bound = f"at most {sys.maxsize}" if found > sys.maxsize else f"at least {least:g}"
            raise argparse.ArgumentTypeError(f"must be {bound}, got {text:.40}")
        return found

    return number


positive, natural, above_zero = at_least(1, int), at_least(0, int), at_least(sys.float_info.min, float)
finite = at_least(-float(sys.maxsize), float)


def add_option(group: argparse._ActionsContainer, name: str, metavar: str, text: str, **how: Any) -> None:
    """An option with a value, which is a path where ``metavar`` is ``DIR`` or ``FILE``."""
    kind: dict[str, Any] = {"type": Path} if metavar in ("DIR", "FILE") else {}
    group.add_argument(name, metavar=metavar, help=text, **kind, **how)


def add_fields(
    group: argparse._ActionsContainer, model: type[BaseModel], *, from_file: bool = False, without: Collection[str] = ()
) -> None:
    """One option for each field of ``model``; an option that is not given is not in the namespace.

    ``from_file``: a configuration file may give what is required, so that only ``checked`` can refuse its absence.
    """
    for name in [each for each in model.model_fields if each not in without]:
        field = model.model_fields[name]
        how: dict[str, Any] = {"metavar": name.rpartition("_")[2].upper()}
        if get_origin(field.annotation) is tuple:
            how = {"metavar": "NAME", "nargs": "*", "action": "extend"}
        elif get_origin(field.annotation) is Literal:
            how = {"choices": get_args(field.annotation)}
        elif field.annotation is bool:  # a switch may be given alone
            how = {"metavar": "true|false", "nargs": "?", "const": "true"}
        default = field.get_default()
        shown = "" if field.is_required() or default in ("", None, ()) else f" (default: {default})"
        text = f"{field.description or ''}{shown}".replace("%", "%%")
        required = field.is_required() and not from_file
        group.add_argument(option_of(name), required=required, default=argparse.SUPPRESS, help=text, **how)


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


STORE_HELP = (
    "folder of a file store, mongodb://host/database, env:NAME of a variable that holds such a URI, or a config.toml"
)


def add_store(parser: argparse.ArgumentParser) -> None:
    """``STORE``."""
    parser.add_argument("store", metavar="STORE", help=STORE_HELP)


def add_skip_damaged(parser: argparse.ArgumentParser) -> None:
    """``--skip-damaged``, the ``skip_damaged`` of ``open_store``."""
    about = "leave out the episodes and scores that cannot be read any more, and list them on standard error"
    parser.add_argument("--skip-damaged", action="store_true", help=about)


def _time(text: str) -> float:
    """A local date and time, as seconds since 1970."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"must be like 2025-01-31T12:00, got {text:.40}") from error


_FILTERS = {
    "run": ("run_id", "episodes of this run"),
    "task": ("task_id", "episodes of this task"),
    "split": ("split", "episodes of tasks of this split, such as train or heldout"),
    "adapter": ("adapter", "sampled from a version of this adapter"),
    "policy-version": ("policy_version", "sampled from this version number"),
    "failed": ("failed", "only failed episodes, or only the others"),
    "failure": ("failure_kind", "what the episode failed of"),
    "min-reward": ("reward_at_least", "lowest reward"),
    "max-reward": ("reward_at_most", "highest reward"),
    "since": ("since", "ended at this local time or later: 2025-01-31T12:00"),
    "until": ("until", "ended at this time or before"),
    "contains": ("contains", f"with this text in one of {', '.join(SEARCHED).replace('_id', '').replace('_', ' ')}"),
    "labelled": ("label", "with this tag, or a label of this kind, such as verdict"),
}
"""Option -> field of ``TrajectoryFilter``, and its help."""


def add_filters(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``TrajectoryFilter`` that picks episodes, and ``--skip-damaged``."""
    add_skip_damaged(parser)
    group = parser.add_argument_group("filters", "Every filter that is given must match; bounds are inclusive.")
    for option, (field, about) in _FILTERS.items():
        kind = get_args(TrajectoryFilter.model_fields[field].annotation)[0]
        how: dict[str, Any] = {"metavar": option.rpartition("-")[2].upper()}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif issubclass(kind, StrEnum):
            how = {"choices": [*map(str, kind)]}
        elif option in ("since", "until"):
            how = {"metavar": "TIME", "type": _time}
        group.add_argument(f"--{option}", dest=f"where_{field}", help=about, **how)
    ended = group.add_mutually_exclusive_group()
    ended.add_argument("--unfinished", action="store_true", help="only episodes that have not ended")
    ended.add_argument("--all", action="store_true", help="also episodes that have not ended")


def filter_of(args: argparse.Namespace) -> TrajectoryFilter:
    """The filter that the options give. Raises ``UsageError``."""
    # A command may have an option of its own in the place of a filter, as ``train --adapter``.
    given: dict[str, Any] = {field: getattr(args, f"where_{field}", None) for field, _ in _FILTERS.values()}
    given["finished"] = False if args.unfinished else None if args.all else True
    return checked(TrajectoryFilter, given, {field: f"--{option}" for option, (field, _) in _FILTERS.items()})


def add_settings(parser: argparse._ActionsContainer, *, required: bool = False) -> None:
    """``--config`` and ``--set``."""
    add_option(parser, "--config", "FILE", "a config.toml", required=required)
    about = "settings over those of --config, such as max_turns=30 training.learning_rate=1e-5"
    add_option(parser, "--set", "KEY=VALUE", about, action="extend", nargs="+", default=[])


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


def add_tasks(group: argparse._ActionsContainer) -> None:
    """Which tasks of the suite."""
    add_option(group, "--dataset-file", "FILE", "the suite's rows: .jsonl, .json or .parquet")
    add_option(group, "--tasks", "TASKS", "tasks of an environment, from task 0 on", type=positive)
    add_option(group, "--include", "ID", "only these ids or patterns ('psf__*')", nargs="+", default=[])
    add_option(group, "--exclude", "ID", "all but these ids or patterns", nargs="+", default=[])
    add_option(group, "--limit", "TASKS", "use at most so many tasks", type=positive)


def add_bounds(group: argparse._ActionsContainer) -> None:
    """Processes and times."""
    add_option(group, "--processes", "COUNT", "processes that roll out the episodes (0: this one only)", type=natural)
    add_option(group, "--timeout", "SECONDS", "for an episode", type=above_zero, default=7200.0)
    add_option(group, "--test-timeout", "SECONDS", "for a patch's tests", type=above_zero, default=1800.0)


def add_repositories(group: argparse._ActionsContainer) -> None:
    """Add the options about where repository tasks run."""
    where = "local: bubblewrap sandboxes; docker: the tasks' images, by docker or podman"
    group.add_argument("--backend", choices=["local", "docker"], default="local", help=where)
    add_option(group, "--mirror", "DIR", "git repositories as owner/name.git (default: clone from the network)")
    add_option(group, "--cache", "DIR", "folder for Python environments")


def backend_of(
    args: argparse.Namespace, instances: Iterable[Instance | None], *, network: bool = False
) -> InstanceBackend | None:
    """The back end that ``add_repositories`` chose, for these instances; ``None`` without any.

    ``network``: tests may use it.
    """
    from openhands_rl_plugin.evals.runs.suites import make_backend

    given = {"mirror": args.mirror, "cache": args.cache, "network": network}
    found = [each for each in instances if each is not None]
    return make_backend(args.backend, **given, instances=found) if found else None
