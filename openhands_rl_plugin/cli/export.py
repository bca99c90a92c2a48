"""``openhands-rl export``: stored trajectories in a format that others read."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.stored import add_filters, filter_of, positive
from openhands_rl_plugin.cli.options.stores import STORE_HELP, open_store
from openhands_rl_plugin.cli.options.transfer import add_format, bar, formats_epilog
from openhands_rl_plugin.core.records import TrajectoryFilter

if TYPE_CHECKING:
    from openhands_rl_plugin.trajectories.exchange.transfer import ExportReport

HELP = "write stored trajectories in a format that others read"
EPILOG = formats_epilog("""examples:
  openhands-rl export ./trajectories --format sft-text --out sft.jsonl --resolved
  openhands-rl export ./trajectories --format sft-native --out sft.parquet --min-reward 0.5 --run night-3
  openhands-rl export ./trajectories --format predictions --out preds.jsonl
  openhands-rl export ./trajectories --format trajectories --out all.jsonl.gz

Secrets of known shapes are never written. The file appears when it is complete, readable by its owner only.
""")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``STORE``, the format, the target and the filters."""
    parser.add_argument("store", metavar="STORE", help=STORE_HELP)
    add_format(parser)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help=".jsonl, .json (one array), either with .gz, or .parquet; a new folder for llm-completions",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="at most N trajectories")
    add_filters(parser)
    parser.add_argument(
        "--resolved",
        action=argparse.BooleanOptionalAction,
        help="only those judged as resolved (by the report, else a score of at least 1), or as not",
    )


def run(args: argparse.Namespace) -> int:
    """Write the file. Raises ``RLError`` when store, format, filter or target cannot be used."""
    from openhands_rl_plugin.trajectories.exchange.formats import exportable

    chosen, rows = exportable(args.format)
    where = _within(chosen.scope, filter_of(args)).model_copy(update={"limit": args.limit})

    async def export() -> ExportReport:
        from openhands_rl_plugin.trajectories.exchange.transfer import export_store

        async with open_store(args.store) as storage:
            total = await storage.count(where)
            with chosen.sink(args.out) as sink, bar("exporting", total) as advanced:
                return await export_store(storage, where, rows, sink, wanted=args.resolved, advanced=advanced)

    report = asyncio.run(export())
    print(f"{args.out}: {report.rows} rows of {report.trajectories} trajectories")
    for reason, times in report.left_out.most_common(10):
        print(f"  {times} left out: {reason}")
    return 0


def _within(scope: TrajectoryFilter, chosen: TrajectoryFilter) -> TrajectoryFilter:
    """What the person chose, with the scope of the format where nothing was said."""
    changes = {}
    if chosen.failed is None and chosen.failure_kind is None and chosen.stop is None:
        changes["failed"] = scope.failed
    if chosen.finished and chosen.stop is None:
        changes["finished"] = scope.finished
    return chosen.model_copy(update=changes)
