"""Options of the commands that let a policy answer: one for each field of their configuration."""

from __future__ import annotations

import argparse
from typing import get_origin

from pydantic import BaseModel, ValidationError

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.validation import problems


def add_fields(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """``--base-url``, ``--model`` and so on; a tuple takes several words."""
    for name, field in model.model_fields.items():
        default = field.get_default()
        said = "" if field.is_required() or default in ("", None, ()) else f" (default: {default})"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            required=field.is_required(),
            default=argparse.SUPPRESS,
            metavar="VALUE",
            nargs="*" if get_origin(field.annotation) is tuple else None,
            help=f"{field.description or ''}{said}".replace("%", "%%"),
        )


def read_fields[M: BaseModel](args: argparse.Namespace, model: type[M]) -> M:
    """What was given, checked. Raises ``ConfigError`` that names the option."""
    try:
        return model.model_validate({name: value for name, value in vars(args).items() if name in model.model_fields})
    except ValidationError as error:
        lines = (f"--{at[-1].replace('_', '-')}: {what}" if at else what for at, what in problems(error, model))
        raise ConfigError("\n".join(lines)) from error
