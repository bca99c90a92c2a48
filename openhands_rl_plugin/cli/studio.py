"""``openhands-rl studio``: stored episodes, runs, evaluations and adapters in the browser."""

from __future__ import annotations

import argparse

from openhands_rl_plugin.cli.options.fields import add_fields, read_fields
from openhands_rl_plugin.cli.options.foreground import (
    add_access_log,
    log_accesses_if_asked,
    sayable,
    wait_until_stopped,
)
from openhands_rl_plugin.cli.options.stored import author
from openhands_rl_plugin.cli.options.stores import STORE_HELP, check_store, storage_at

EPILOG = """examples:
  openhands-rl studio ~/.openhands/rl_trajectories
  openhands-rl studio ./trajectories mongodb://127.0.0.1/night --tokenizer ./Qwen3-0.6B
  OPENHANDS_RL_API_KEY=... openhands-rl studio ./trajectories --host 0.0.0.0 --allow-host studio.example.org

The printed link opens one browser; another one needs another link, which is printed then, or the key. Everything is
only read, except that labels are added.
"""
PATIENCE = 8.0
"""Seconds: requests under way have five of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to show, and one option for each field of ``StudioConfig``."""
    from openhands_rl_plugin.apps.studio.config import StudioConfig

    parser.add_argument("sources", nargs="+", metavar="STORE", help=STORE_HELP)
    add_fields(parser, StudioConfig, lists="commas")
    add_access_log(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ``RLError`` when a source, an option or the port cannot be used."""
    from openhands_rl_plugin.apps.studio.config import StudioConfig
    from openhands_rl_plugin.apps.studio.server import running_studio
    from openhands_rl_plugin.apps.studio.sources import StudioSources

    config = read_fields(args, StudioConfig, {"author": author()})
    for where in args.sources:
        check_store(where)
    log_accesses_if_asked(args)
    sources = StudioSources({sayable(where): storage_at(where) for where in args.sources})
    with running_studio(config, sources) as studio:
        print(f"the studio is at {studio.link} (works once); Ctrl-C stops it", flush=True)
        wait_until_stopped()
    return 0
