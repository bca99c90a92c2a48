"""``openhands-rl show STORE ID``: one stored episode."""

from __future__ import annotations

import argparse
import asyncio

from openhands_rl_plugin.cli.options.stored import add_store
from openhands_rl_plugin.cli.options.stores import open_store

HELP = "show a stored episode: what was said, with rewards, versions and token counts"
EPILOG = """examples:
  openhands-rl show ~/.openhands/rl_trajectories 3f2a
  openhands-rl show ~/.openhands/rl_trajectories 3f2a --tree
  openhands-rl show ~/.openhands/rl_trajectories 3f2a --json | jq .totals
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``STORE ID`` and how to show it."""
    add_store(parser)
    parser.add_argument("id", metavar="ID", help="the episode's id, or enough of its beginning")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--tree",
        action="store_true",
        help="a line for each node, with siblings, visits, values and what the search spent",
    )
    how.add_argument("--full", action="store_true", help="all of every message, however long")
    how.add_argument(
        "--json",
        action="store_true",
        help="the same as JSON; token ids and evidence: `export`",
    )


def run(args: argparse.Namespace) -> int:
    """Print the episode. Raises ``RLError`` when the store or the id is wrong."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from openhands_rl_plugin.trajectories.view.episode import find_episode
    from openhands_rl_plugin.trajectories.view.pages import print_episode, print_tree
    from openhands_rl_plugin.trajectories.view.terminal import console, print_json

    async with open_store(args.store) as storage:
        episode = await find_episode(storage, args.id)
    if args.json:
        print_json(episode)
    elif args.tree:
        print_tree(console(), episode)
    else:
        print_episode(console(), episode, full=args.full)
    return 0
