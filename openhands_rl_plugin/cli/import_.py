"""``openhands-rl import``: store trajectories that other tools recorded.

formats:
{formats}

examples:
  openhands-rl import output.jsonl --into ./trajectories
  openhands-rl import jobs/ --into ./trajectories             (Harbor's trials, or any folder: file by file)
  openhands-rl import llm_completions/ --format llm-completions --into ./trajectories
  openhands-rl import train.raw.parquet --format sft-native --into ./trajectories --skip-bad
  openhands-rl import all.jsonl.gz --format store --into mongodb://127.0.0.1/rl       (moves a store of your own)

The same record is stored once, however often it is imported. Only the formats "trajectories", "store" and "atif" carry
tokens; of the others `train` makes them with the chat template of its --model, to imitate or to prefer.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from openhands_rl_plugin.apps.stores import open_store
from openhands_rl_plugin.cli.options import STORE_HELP
from openhands_rl_plugin.cli.terminal import sayable
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.formats import source_of, table

RESUME = "the same command continues where it stopped"
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The source, its format and the store."""
    parser.epilog = (parser.epilog or "").replace("{formats}", table())
    parser.add_argument("file", type=Path, metavar="FILE", help="a file of the format, or a folder of such files")
    parser.add_argument("--format", metavar="FORMAT", help="one of the formats below (default: recognised)")
    parser.add_argument("--into", required=True, metavar="STORE", help=f"{STORE_HELP}; created if it does not exist")
    bad = "bad records are no error; in either case the others are stored"
    parser.add_argument("--skip-bad", action="store_true", help=bad)


async def run(args: argparse.Namespace) -> int:
    """Store what is new. Raises ``RLError`` at the end for bad records, unless those are skipped."""
    from openhands_rl_plugin.trajectories.exchange.formats import import_source
    from openhands_rl_plugin.trajectories.view import progress_bar

    names = Counter[str]()
    source = source_of(args.file, args.format, names)
    async with open_store(args.into, create=True) as storage:
        with progress_bar("importing") as bar:
            report = await import_source(source, storage, advanced=bar.update)
    if args.format is None and names:
        print("format: " + ", ".join(f"{name} ({count} files)" for name, count in names.most_common()))
    # Without --skip-bad the first one is the error.
    for message in report.bad[not args.skip_bad : _SHOWN]:
        print(f"skipped: {sayable(message)}", file=sys.stderr)
    bad = f"; {len(report.bad)} bad records skipped" if report.bad else ""
    print(f"{args.into}: {report.new} new trajectories of {report.records} records, {report.scores} scores{bad}")
    if report.bad and not args.skip_bad:
        raise ExchangeError(f"{report.bad[0]}; --skip-bad leaves such records out")
    return 0
