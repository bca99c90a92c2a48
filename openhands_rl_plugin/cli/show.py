"""``openhands-rl show``: show a stored episode: its messages, with rewards, versions and token counts.

examples:
  openhands-rl show ~/.openhands/rl_trajectories 3f2a
  openhands-rl show ~/.openhands/rl_trajectories 3f2a --tree
  openhands-rl show ~/.openhands/rl_trajectories 3f2a --json | jq .totals
"""

from __future__ import annotations

import argparse

from openhands_rl_plugin.apps.stores import open_store
from openhands_rl_plugin.cli.options import add_skip_damaged, add_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``STORE ID`` and the form of the output."""
    add_store(parser)
    add_skip_damaged(parser)
    parser.add_argument("id", metavar="ID", help="the episode's id, or a unique prefix of it")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--tree", action="store_true", help="a line per node: siblings, visits, values, cost of search")
    how.add_argument("--full", action="store_true", help="do not shorten long messages")
    how.add_argument("--json", action="store_true", help="the same as JSON (`export` also has token ids and evidence)")


async def run(args: argparse.Namespace) -> int:
    """Print the episode. Raises ``RLError`` when the store or the id is wrong."""
    from openhands_rl_plugin.trajectories.view import as_json, console, find_episode, print_episode, print_json

    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        trajectory, scores = await find_episode(storage, args.id)
        labels = await storage.labels([trajectory.id])
    if args.json:
        print_json(as_json(trajectory, scores, labels))
    else:
        print_episode(console(), trajectory, scores, labels, tree=args.tree, full=args.full)
    return 0
