"""``openhands-rl list``: list stored episodes, or statistics of them by run, version or task.

examples:
  openhands-rl list ~/.openhands/rl_trajectories
  openhands-rl list ~/.openhands/rl_trajectories --run demo --sort reward --desc --limit 10
  openhands-rl list ~/.openhands/rl_trajectories --contains webshop --max-reward 0.5 --sort tokens --desc
  openhands-rl list ~/.openhands/rl_trajectories --reward human --sort reward
  openhands-rl list ~/.openhands/rl_trajectories --failure infrastructure --since 2025-01-31
  openhands-rl list ~/.openhands/rl_trajectories --by
  openhands-rl list ~/.openhands/rl_trajectories --by version --success-at 0.5
  openhands-rl list ~/.openhands/rl_trajectories --by task --run demo --reward human --json

--by prints statistics of each group: success, reward, turns, tokens, failures, and why turns have no token ids.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from functools import partial

from openhands_rl_plugin.apps.stores import open_store
from openhands_rl_plugin.cli.options import add_filters, add_option, add_store, filter_of, finite, positive
from openhands_rl_plugin.config.build import success_rule
from openhands_rl_plugin.core.errors import ConfigError, unknown_name
from openhands_rl_plugin.core.judgements import OPINIONS, opinions_of
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, TrajectoryOrder
from openhands_rl_plugin.trajectories import view


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``STORE``, filters, order and page."""
    add_store(parser)
    add_filters(parser)
    orders = [each.value for each in TrajectoryOrder]
    parser.add_argument("--sort", choices=orders, default="stored", help="order of the list (default: stored)")
    parser.add_argument("--desc", action="store_true", help="highest or newest first")
    add_option(parser, "--limit", "EPISODES", "at most so many episodes", type=positive, default=50)
    scores = "take this reward's scores: human, verifier, tests, ... (default: the newest judgement, else the return)"
    add_option(parser, "--reward", "NAME", scores)
    by = "statistics by run, environment, split, strategy, version or task, separated by commas"
    parser.add_argument("--by", nargs="?", const="run,environment,strategy,version", metavar="NAMES", help=by)
    at = "with --by: reward from which an episode counts as a success (default: its environment's criterion, else 1)"
    parser.add_argument("--success-at", type=finite, metavar="RETURN", help=at)
    parser.add_argument("--json", action="store_true", help="one JSON object per line and episode; of --by a list")


async def run(args: argparse.Namespace) -> int:
    """Print the list. Raises ``RLError`` when the store or a filter is wrong."""
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        order = {"sort": TrajectoryOrder(args.sort), "descending": args.desc, "limit": args.limit}
        chosen = filter_of(args)
        if args.by is not None:
            return await _statistics(args, storage, chosen)
        found, matching = await view.page_of(storage, chosen.model_copy(update=order), args.reward)
        opinions = await opinions_of(storage, [each.id for each in found])
    if args.json:
        for each in found:
            columns = {name: opinions.get(each.id, {}).get(name) for name in OPINIONS}
            print(json.dumps(each.model_dump(mode="json") | columns))
        return 0
    if found:
        view.console().print(view.list_table(found, opinions))
    print(f"{len(found)} of {matching} episodes" + ("; --limit shows more" if len(found) < matching else ""))
    return 0


async def _statistics(args: argparse.Namespace, storage: TrajectoryStorage, chosen: TrajectoryFilter) -> int:
    by = tuple(dict.fromkeys(name.strip() for name in args.by.split(",")))
    for name in by:
        if name not in view.GROUPINGS:
            raise ConfigError(f"--by: {unknown_name('grouping', name, view.GROUPINGS)}")
    summaries = view.rewarded_by(storage, chosen, args.reward) if args.reward else storage.summaries(chosen)
    notes = await view.notes_in(storage, view.without_rewards(chosen) if args.reward else chosen)
    rule = partial(success_rule, at=args.success_at)
    groups = await view.figures_of(summaries, by, lambda of, value: rule(of.environment).holds(value, of.stop), notes)
    if args.json:
        view.print_json(groups)
        return 0
    if not groups:
        print("no episodes match")
        return 0
    view.console().print(view.stats_table(groups, by))
    gaps = sum((Counter(group["gaps"]) for group in groups), Counter())
    for line in (*(f"{count:,} x {cause}" for cause, count in gaps.most_common()), *([view.REMEDY] if gaps else [])):
        print(line)
    return 0
