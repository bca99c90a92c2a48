"""``openhands-rl acp``: the agent for editors and GUIs, over the Agent Client Protocol on standard input and output."""

from __future__ import annotations

import argparse
from pathlib import Path

from openhands_rl_plugin.cli.options.fields import add_fields, read_fields
from openhands_rl_plugin.config.work import WorkOptions

ASK, AUTO = "ask", "auto"

EPILOG = """examples:
  openhands-rl acp --model policy --base-url http://127.0.0.1:8100/v1
  openhands-rl acp --config /home/me/config.toml --permissions auto

An editor starts this command itself. Zed, settings.json:
  "agent_servers": {"RLAgent": {"command": "openhands-rl", "args": ["acp", "--config", "/home/me/config.toml"]}}
Standard output belongs to the protocol; messages for people go to standard error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``WorkOptions``, the folder of conversations, and who is asked."""
    parser.add_argument(
        "--permissions",
        choices=[ASK, AUTO],
        default=ASK,
        help="ask: commands and changes of files wait for the user's yes; auto: they do not",
    )
    parser.add_argument(
        "--conversations",
        type=Path,
        default=Path("~/.openhands/rl_conversations"),
        metavar="DIR",
        help="folder in which conversations are kept, to be loaded again",
    )
    add_fields(parser, WorkOptions, lists="commas")


def run(args: argparse.Namespace) -> int:
    """Serve until the client closes the input. Raises ``ConfigError``."""
    from openhands_rl_plugin.hosts.programs import serve_acp

    options = read_fields(args, WorkOptions)
    return serve_acp(options, conversations=args.conversations.expanduser(), permissions=args.permissions)
