"""``openhands-rl export``: stored trajectories in a format that other tools read."""

from __future__ import annotations

import argparse
from pathlib import Path

from openhands_rl_plugin.cli.options.stored import add_filters, filter_of, positive
from openhands_rl_plugin.cli.options.stores import STORE_HELP, open_store
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.trajectories.exchange.formats import exportable, table

EPILOG = f"""formats:
{table()}

examples:
  openhands-rl export ./trajectories --format sft-text --out sft.jsonl --resolved
  openhands-rl export ./trajectories --format sft-native --out sft.parquet --min-reward 0.5 --run night-3
  openhands-rl export ./trajectories --format predictions --out preds.jsonl
  openhands-rl export ./trajectories --format trajectories --out all.jsonl.gz

Secrets of known shapes are never written. The file appears when it is complete, readable by its owner only.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``STORE``, the format, the target and the filters."""
    parser.add_argument("store", metavar="STORE", help=STORE_HELP)
    parser.add_argument("--format", required=True, metavar="F", help="one of the formats below")
    kinds = ".jsonl, .json (one array), either with .gz, or .parquet; a new folder for llm-completions"
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=kinds)
    parser.add_argument("--limit", type=positive, metavar="N", help="at most N trajectories")
    add_filters(parser)
    parser.add_argument(
        "--resolved",
        action=argparse.BooleanOptionalAction,
        help="only resolved episodes (by the test report, else by a score of at least 1), or only unresolved ones",
    )


async def run(args: argparse.Namespace) -> int:
    """Write the file. Raises ``RLError`` when store, format, filter or target cannot be used."""
    from openhands_rl_plugin.cli.options.progress import progress_bar
    from openhands_rl_plugin.trajectories.exchange.transfer import export_store

    chosen, rows = exportable(args.format)
    where = _within(chosen.scope, filter_of(args)).model_copy(update={"limit": args.limit})
    async with open_store(args.store) as storage:
        total = await storage.count(where)
        with chosen.sink(args.out) as sink, progress_bar("exporting", total) as bar:
            report = await export_store(storage, where, rows, sink, wanted=args.resolved, advanced=bar.update)
    print(f"{args.out}: {report.rows} rows of {report.trajectories} trajectories")
    for reason, times in report.left_out.most_common(10):
        print(f"  {times} left out: {reason}")
    return 0


def _within(scope: TrajectoryFilter, chosen: TrajectoryFilter) -> TrajectoryFilter:
    """The given filter, with the scope of the format where no option was given."""
    changes = {}
    if chosen.failed is None and chosen.failure_kind is None and chosen.stop is None:
        changes["failed"] = scope.failed
    if chosen.finished and chosen.stop is None:
        changes["finished"] = scope.finished
    return chosen.model_copy(update=changes)
