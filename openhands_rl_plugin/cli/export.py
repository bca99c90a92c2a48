"""``openhands-rl export``: write stored trajectories in a format that other tools read.

formats:
{formats}

examples:
  openhands-rl export ./trajectories --format sft-text --out sft.jsonl --resolved
  openhands-rl export ./trajectories --format sft-native --out sft.parquet --min-reward 0.5 --run night-3
  openhands-rl export ./trajectories --format predictions --out preds.jsonl
  openhands-rl export ./trajectories --format trajectories --out all.jsonl.gz

Calls have their arguments as objects, as chat templates want them: those of Qwen2.5 and Llama 3.1 print texts once more
as JSON. Parquet is read by datasets (TRL) with messages, tools and arguments as they are in JSON.

Secrets of known shapes are never written. The file appears when it is complete, readable by its owner only.
"""

from __future__ import annotations

import argparse

from openhands_rl_plugin.apps.stores import open_store
from openhands_rl_plugin.cli.options import add_filters, add_option, add_store, filter_of, positive
from openhands_rl_plugin.cli.terminal import sayable
from openhands_rl_plugin.trajectories.exchange.formats import exportable, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``STORE``, the format, the target and the filters."""
    parser.epilog = (parser.epilog or "").replace("{formats}", table())
    add_store(parser)
    parser.add_argument("--format", required=True, metavar="FORMAT", help="one of the formats below")
    add_option(parser, "--out", "FILE", ".jsonl, also with .gz, or .parquet", required=True)
    parser.add_argument("--limit", type=positive, metavar="EPISODES", help="at most so many trajectories")
    add_filters(parser)
    judged = "only resolved episodes (by the test report, else by a score of at least 1), or only unresolved ones"
    parser.add_argument("--resolved", action=argparse.BooleanOptionalAction, help=judged)


async def run(args: argparse.Namespace) -> int:
    """Write the file. Raises ``RLError`` when store, format, filter or target cannot be used."""
    from openhands_rl_plugin.trajectories.exchange.formats import export_store
    from openhands_rl_plugin.trajectories.view import progress_bar

    chosen = exportable(args.format)
    where = chosen.within(filter_of(args)).model_copy(update={"limit": args.limit})
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        total, resolved = await storage.count(where), args.resolved
        with chosen.sink(args.out) as sink, progress_bar("exporting", total) as bar:
            report = await export_store(storage, where, chosen, sink, wanted=resolved, advanced=bar.update)
    print(f"{args.out}: {report.rows} rows of {report.trajectories} trajectories")
    for reason, times in report.left_out.most_common(10):
        print(f"  {times} left out: {sayable(reason)}")
    return 0
