"""``openhands-rl compare RUN_A RUN_B``: whether the second evaluation is better than the first.

examples:
  openhands-rl compare evaluation_outputs/swe-local-heldout/CodeActAgent evaluation_outputs/swe-local-heldout/RLAgent
  openhands-rl compare before/output.jsonl after/output.jsonl --out comparison

With one run on either side the p-value is from McNemar's exact test, with several from a sign permutation test over the
tasks' differences. The interval of the difference is a bootstrap over tasks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from openhands_rl_plugin.cli.report import add_report_options, output_report, read_judged_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two sides, and the folder of the report."""
    parser.add_argument("first", type=Path, metavar="RUN_A", help="a folder with one or more runs, or an output.jsonl")
    parser.add_argument("second", type=Path, metavar="RUN_B", help="the same, over the same data")
    add_report_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print the comparison. Raises ``RLError`` when a run cannot be read or no task is in both."""
    from openhands_rl_plugin.evals.report.figures import compare

    first, second = read_judged_runs(args, [args.first]), read_judged_runs(args, [args.second])
    output_report(args, (*first, *second), compare(first, second))
    return 0
