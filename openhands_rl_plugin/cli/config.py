"""``openhands-rl config init`` writes a file to start from; ``config check`` shows the effective settings.

examples:
  openhands-rl config init --model model --base-url http://127.0.0.1:8100/v1 --workspace ./my-repository
  openhands-rl config check config.toml
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from openhands_rl_plugin.config.build import check_plugins
from openhands_rl_plugin.config.toml import has_settings, load_settings, starting_config
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.trajectories.view import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``init [FILE]`` and ``check [FILE]``."""
    parser.add_argument(
        "action",
        choices=["check", "init"],
        help="init: write a config.toml to start from; check: print the effective settings of a file as JSON",
    )
    parser.add_argument(
        "file", type=Path, nargs="?", default=Path("config.toml"), metavar="FILE", help="the configuration file"
    )
    new = parser.add_argument_group("init", "What the new file says; every line can be edited afterwards.")
    new.add_argument("--model", default="model", metavar="NAME", help="name of the model on its server")
    new.add_argument(
        "--base-url",
        default="http://127.0.0.1:8100/v1",
        metavar="URL",
        help="OpenAI-compatible server of the model, up to and including /v1",
    )
    new.add_argument("--workspace", default="./workspace", metavar="DIR", help="folder that the agent works in")
    short = "compact: short instructions, for models with a context of less than 16,384 tokens"
    new.add_argument("--prompt", choices=["standard", "compact"], default="standard", help=short)


def run(args: argparse.Namespace) -> int:
    """Write a file, or print the effective settings as JSON. Raises ``ConfigError``."""
    if args.action == "init":
        return _init(args)
    settings = load_settings(args.file)
    try:
        if not has_settings(args.file):
            raise ConfigError(
                "there is no [rl] section in it (nor [extended.rl] or [agent.RLAgent.rl]); add one, or start with a "
                "file of `openhands-rl config init`"
            )
        check_plugins(settings)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{args.file}: {line}" for line in str(error).splitlines())) from error
    print_json({"rl": settings.model_dump(mode="json")})
    return 0


def _init(args: argparse.Namespace) -> int:
    text = starting_config(model=args.model, base_url=args.base_url, workspace=args.workspace, prompt=args.prompt)
    try:
        with args.file.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(
            f"{args.file} exists and stays as it is; give another name, and copy what you need from that"
        ) from error
    except OSError as error:
        raise ConfigError(f"{args.file} cannot be written: {error.strerror}") from error
    load_settings(args.file)
    options = shlex.join(["--config", str(args.file), "--workspace", args.workspace])
    print(f"wrote {args.file}; start the model's server, then:\n  openhands-rl run {options} -t 'What is to be done'")
    return 0
