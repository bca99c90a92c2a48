"""Options that are the fields of a pydantic model: name, type, default and description are taken from the model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from openhands_rl_plugin.config.fields import Settings
from openhands_rl_plugin.core.errors import UsageError, problems

_METAVARS = {
    "url": "URL",
    "env": "VARIABLE",
    "bytes": "BYTES",
    "tokens": "TOKENS",
    "len": "TOKENS",
    "length": "TOKENS",
    "timeout": "SECONDS",
    "minutes": "MINUTES",
    "port": "PORT",
    "host": "ADDRESS",
    "listen": "ADDRESS",
    "path": "DIR",
    "template": "FILE",
    "batch_size": "EPISODES",
    "samples_per_task": "EPISODES",
    "keep_best": "EPISODES",
    "tasks_per_iteration": "TASKS",
    "max_tokens_per_micro_batch": "TOKENS",
    "target_modules": "NAME,NAME,...",
    "patience": "SECONDS",
    "staleness": "VERSIONS",
    "success": "RATE",
    "above": "REWARD",
    "label_at": "REWARD",
    "success_at": "REWARD",
    "clip_low": "DISTANCE",
    "clip_high": "DISTANCE",
    "correction_low": "WEIGHT",
    "correction_high": "WEIGHT",
    "negatives": "RATIO",
    "scale": "FACTOR",
    "label": "REWARD",
}
"""What a value is, by its field's name or the last word of that; a number is named by the last word itself."""
_LONGEST_CHOICES = 24


def add_fields(
    group: argparse._ActionsContainer,
    model: type[BaseModel],
    *,
    lists: Literal["words", "commas"],
    from_file: bool = False,
) -> None:
    """One option for each field of ``model``; an option that is not given is not in the namespace.

    ``lists``: whether a tuple takes several words (and the option may be repeated), or one word with commas in it. A
    command with positional arguments needs commas.
    ``from_file``: a configuration file may give what is required, so that only ``checked`` can refuse its absence.
    """
    for name, field in model.model_fields.items():
        if get_origin(field.annotation) is tuple and lists == "words":
            group.add_argument(
                option_of(name),
                nargs="*",
                action="extend",
                default=argparse.SUPPRESS,
                help=_help(field),
                metavar="NAME",
            )
            continue
        # A switch may be given alone, unless a positional argument could be taken for its value.
        switch = {"nargs": "?", "const": "true"} if field.annotation is bool and lists == "words" else {}
        group.add_argument(
            option_of(name),
            required=field.is_required() and not from_file,
            default=argparse.SUPPRESS,
            metavar=_metavar(name, field),
            help=_help(field),
            **switch,
        )
    for old in _renamed(model):
        group.add_argument(option_of(old), default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _renamed(model: type[BaseModel]) -> Mapping[str, str]:
    """Old names of fields, which are accepted but not shown in ``--help``."""
    return model.renamed_keys if issubclass(model, Settings) else {}


def given_fields(args: argparse.Namespace, model: type[BaseModel]) -> dict[str, object]:
    """The fields that the options name; a value is text, of a tuple a list of texts."""
    given = {name: value for name, value in vars(args).items() if name in {*model.model_fields, *_renamed(model)}}
    if issubclass(model, Settings):
        given = model.with_new_names(given)
    for name, value in given.items():
        if get_origin(model.model_fields[name].annotation) is tuple and isinstance(value, str):
            given[name] = [each for each in value.split(",") if each]
    return given


def read_fields[M: BaseModel](args: argparse.Namespace, model: type[M], defaults: Mapping[str, object] = {}) -> M:
    """``defaults`` with what the options change. Raises ``UsageError`` that names the wrong options."""
    return checked(model, {**defaults, **given_fields(args, model)})


def settings_from[M: BaseModel](args: argparse.Namespace, base: M) -> M:
    """``base`` with what the options change. Raises ``UsageError`` that names the wrong options."""
    return read_fields(args, type(base), base.model_dump())


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
    if (meant := _METAVARS.get(name) or _METAVARS.get(last)) is not None:
        return meant
    if name == "held_out":  # of a loop and of a verifier
        return "TASKS" if field.annotation is int else "FRACTION"
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
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        text += f" (default: {shown.lower() if isinstance(default, bool) else shown})"
    return text.strip().replace("%", "%%")
