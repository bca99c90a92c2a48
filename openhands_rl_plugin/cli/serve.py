"""``openhands-rl serve``: serve a model and its LoRA adapters."""

from __future__ import annotations

import argparse

from pydantic import ValidationError

from openhands_rl_plugin.cli.options.foreground import wait_until_stopped
from openhands_rl_plugin.core.errors import ConfigError, MissingExtraError
from openhands_rl_plugin.core.validation import problems
from openhands_rl_plugin.models.generator.config import ServerConfig

HELP = "serve a model and its LoRA adapters over an OpenAI-compatible API"
EPILOG = """examples:
  openhands-rl serve --model ./SmolLM2-135M-Instruct --port 8100
  OPENHANDS_RL_API_KEY=... openhands-rl serve --model ./model --host 0.0.0.0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``ServerConfig``."""
    for name, field in ServerConfig.model_fields.items():
        default = "" if field.is_required() else f" (default: {field.default})"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            required=field.is_required(),
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help=f"{field.description or ''}{default}".strip().replace("%", "%%"),
        )


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ``RLError`` when the options, the model or the port cannot be used."""
    given = {name: value for name, value in vars(args).items() if name in ServerConfig.model_fields}
    try:
        config = ServerConfig.model_validate(given)
    except ValidationError as error:
        lines = (f"--{at[-1].replace('_', '-')}: {what}" for at, what in problems(error, ServerConfig))
        raise ConfigError("\n".join(lines)) from error
    try:
        from openhands_rl_plugin.models.server.server import running_server
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    print(f"loading {config.model}", flush=True)
    with running_server(config) as url:
        print(f"{config.base_name} at {url}/v1; Ctrl-C ends it", flush=True)
        wait_until_stopped()
    return 0
