"""Options of a command that are the fields of a section of the settings."""

from __future__ import annotations

import argparse
from typing import Literal, get_args, get_origin

from pydantic import ValidationError

from openhands_rl_plugin.config.rl import Settings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.validation import problems


def add_fields(group: argparse._ArgumentGroup, section: type[Settings]) -> None:
    """One option a field. What is not given is not in the namespace."""
    for name, field in section.model_fields.items():
        group.add_argument(
            option_of(name),
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help=f"{_choices(field.annotation)}default: {_text(field.default)}".replace("%", "%%"),
        )


def given_fields(args: argparse.Namespace, section: type[Settings]) -> dict[str, object]:
    """The fields that the options name, as text."""
    return {name: value for name, value in vars(args).items() if name in section.model_fields}


def settings_from[Section: Settings](args: argparse.Namespace, base: Section) -> Section:
    """``base`` with what the options change. Raises ``ConfigError`` that names the wrong options."""
    given = given_fields(args, type(base))
    for name, value in given.items():
        if isinstance(getattr(base, name), tuple):
            given[name] = [each for each in str(value).split(",") if each]
    try:
        # Not strictly: options are text.
        return type(base).model_validate(base.model_dump() | given, strict=False)
    except ValidationError as error:
        lines = (f"{option_of(at[-1])}: {what}" if at else what for at, what in problems(error, type(base)))
        raise ConfigError("\n".join(lines)) from error


def option_of(name: str) -> str:
    """``batch_size`` -> ``--batch-size``."""
    return f"--{name.replace('_', '-')}"


def _choices(annotation: object) -> str:
    return f"{', '.join(get_args(annotation))}; " if get_origin(annotation) is Literal else ""


def _text(default: object) -> str:
    return ",".join(default) if isinstance(default, tuple) else str(default).lower()
