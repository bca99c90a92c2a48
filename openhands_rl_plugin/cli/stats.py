"""``openhands-rl stats STORE``: statistics of stored episodes.

examples:
  openhands-rl stats ~/.openhands/rl_trajectories
  openhands-rl stats ~/.openhands/rl_trajectories --by version --success-at 0.5
  openhands-rl stats ~/.openhands/rl_trajectories --reward human --by version
  openhands-rl stats ~/.openhands/rl_trajectories --run demo --by task --json
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from openhands_rl_plugin.cli.options import add_filters, add_reward, add_store, filter_of, finite, open_store
from openhands_rl_plugin.core.errors import ConfigError, unknown_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``STORE``, filters and groups."""
    add_store(parser)
    add_reward(parser)
    add_filters(parser)
    parser.add_argument(
        "--by",
        default="run,environment,strategy,version",
        metavar="NAMES",
        help="group by run, environment, split, strategy, version or task, separated by commas",
    )
    at = "reward from which an episode counts as a success (default: its environment's criterion, else 1)"
    parser.add_argument("--success-at", type=finite, metavar="RETURN", help=at)
    config = "a config.toml, whose [rl.reward] threshold is the criterion where --success-at is not given"
    parser.add_argument("--config", type=Path, metavar="FILE", help=config)
    parser.add_argument("--json", action="store_true", help="print JSON")


async def run(args: argparse.Namespace) -> int:
    """Print the statistics. Raises ``RLError`` when the store or a filter is wrong."""
    from openhands_rl_plugin.config.success import success_rule
    from openhands_rl_plugin.config.toml import load_settings
    from openhands_rl_plugin.trajectories.drift import BEGINNING
    from openhands_rl_plugin.trajectories.view.figures import (
        GROUPINGS,
        REMEDY,
        figures_of,
        notes_of,
        rewarded_by,
        stats_table,
        without_rewards,
    )
    from openhands_rl_plugin.trajectories.view.terminal import console, print_json

    reward = load_settings(args.config).reward if args.config is not None else None
    by = tuple(dict.fromkeys(name.strip() for name in args.by.split(",")))
    for name in by:
        if name not in GROUPINGS:
            raise ConfigError(f"--by: {unknown_name('grouping', name, GROUPINGS)}")
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        chosen = filter_of(args)
        if args.reward is None:
            summaries = storage.summaries(chosen)
        else:
            summaries = rewarded_by(storage, chosen, args.reward)
            chosen = without_rewards(chosen)
        notes = {each.id: notes_of(each, scores) async for each, scores in storage.find(chosen)}
        groups = await figures_of(
            summaries,
            by,
            lambda of, paid: success_rule(of.environment, reward, at=args.success_at).holds(paid, of.stop),
            notes,
        )
    if args.json:
        print_json(groups)
    elif groups:
        console().print(stats_table(groups, by))
        _print_segments(sum((Counter(group["segments"]) for group in groups), Counter()), BEGINNING)
        _print_gaps(sum((Counter(group["gaps"]) for group in groups), Counter()), REMEDY)
    else:
        print("no episodes match")
    return 0


def _print_segments(counts: Counter[str], beginning: str) -> None:
    """Only where an episode has more than one."""
    first = counts.pop(beginning, 0)
    if counts:
        causes = ", ".join(f"{count:,} by {cause}" for cause, count in counts.most_common())
        print(f"{first + counts.total():,} segments in {first:,} episodes: {causes} (see doctor drift)")


def _print_gaps(counts: Counter[str], remedy: str) -> None:
    for cause, count in counts.most_common():
        print(f"{count:,} x {cause}")
    if counts:
        print(remedy)
