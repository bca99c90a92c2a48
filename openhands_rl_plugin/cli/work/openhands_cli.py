"""``openhands-rl cli``: OpenHands' own CLI, with RLAgent as its agent."""

from __future__ import annotations

import argparse

from openhands_rl_plugin.cli.options.fields import add_fields, read_fields
from openhands_rl_plugin.config.work import EpisodeOptions

EPILOG = """examples:
  openhands-rl cli
  openhands-rl cli --config config.toml --strategy BestOfN
  openhands-rl cli --store ./trajectories -- --headless --override-with-envs -t "Make the failing test pass"
  openhands-rl cli -- --resume --last

What follows -- are the CLI's own options. Its settings say which model, [rl] how it is rolled out and stored. The CLI
pins an SDK of its own, so it needs an environment of its own: pip install openhands_rl_plugin 'openhands==1.16.*'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``EpisodeOptions``, and the CLI's own arguments."""
    add_fields(parser, EpisodeOptions, lists="commas")
    parser.add_argument("words", nargs="*", metavar="-- ARGUMENT", help="arguments of OpenHands' CLI")


def run(args: argparse.Namespace) -> int:
    """The CLI, until it ends. Raises ``ConfigError``, also where it is not installed."""
    from openhands_rl_plugin.hosts.programs import run_openhands_cli

    return run_openhands_cli(args.words, read_fields(args, EpisodeOptions))
