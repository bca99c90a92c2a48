"""``openhands-rl list STORE``: the stored episodes.

examples:
  openhands-rl list ~/.openhands/rl_trajectories
  openhands-rl list ~/.openhands/rl_trajectories --run demo --sort reward --desc --limit 10
  openhands-rl list ~/.openhands/rl_trajectories --contains webshop --max-reward 0.5 --sort tokens --desc
  openhands-rl list ~/.openhands/rl_trajectories --reward human --sort reward
  openhands-rl list ~/.openhands/rl_trajectories --failure infrastructure --since 2025-01-31
"""

from __future__ import annotations

import argparse
import json

from openhands_rl_plugin.cli.options import add_filters, add_reward, add_store, filter_of, natural, open_store, positive
from openhands_rl_plugin.core.judgements import OPINIONS, opinions_of
from openhands_rl_plugin.core.records import TrajectoryOrder

DEFAULT_LIMIT = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``STORE``, filters, order and page."""
    add_store(parser)
    add_filters(parser)
    orders = [each.value for each in TrajectoryOrder]
    parser.add_argument("--sort", choices=orders, default="stored", help="order of the list (default: stored)")
    parser.add_argument("--desc", action="store_true", help="highest or newest first")
    parser.add_argument(
        "--limit", type=positive, default=DEFAULT_LIMIT, metavar="EPISODES", help="at most so many episodes"
    )
    parser.add_argument("--offset", type=natural, default=0, metavar="EPISODES", help="skip the first ones")
    add_reward(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per line and episode")


async def run(args: argparse.Namespace) -> int:
    """Print the list. Raises ``RLError`` when the store or a filter is wrong."""
    from openhands_rl_plugin.trajectories.view.figures import list_table, rewarded_by
    from openhands_rl_plugin.trajectories.view.terminal import console

    order = {"sort": TrajectoryOrder(args.sort), "descending": args.desc}
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        chosen = filter_of(args).model_copy(update=order)
        if args.reward is None:
            page = {"limit": args.limit, "offset": args.offset}
            found = [summary async for summary in storage.summaries(chosen.model_copy(update=page))]
            matching = await storage.count(chosen)
        else:
            ranked = [summary async for summary in rewarded_by(storage, chosen, args.reward)]
            found, matching = ranked[args.offset : args.offset + args.limit], len(ranked)
        said = await opinions_of(storage, [each.id for each in found])
    if args.json:
        for summary in found:
            told = {name: said.get(summary.id, {}).get(name) for name in OPINIONS}
            print(json.dumps(summary.model_dump(mode="json") | told))
        return 0
    if found:
        console().print(list_table(found, said))
    range_ = f"{args.offset + 1} to {args.offset + len(found)} of {matching}" if found else f"none of {matching}"
    print(f"{range_} episodes" + ("; --offset shows more" if args.offset + len(found) < matching else ""))
    return 0
