"""``openhands-rl report RUN...``: the results of evaluations.

examples:
  openhands-rl report evaluation_outputs/swe-local-heldout
  openhands-rl report evaluation_outputs/*/CodeActAgent --out report
  openhands-rl report RUN_A RUN_B --store evaluation_outputs/trajectories --verifier verifier-2 --out report

RUN is a folder of runs, or an output.jsonl of this harness or of OpenHands' own. Runs whose folders differ only in
-run_<i> form one group. Intervals are bootstraps over tasks; pass@k and best@k are exact expectations over subsets.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options import STORE_HELP
from openhands_rl_plugin.cli.terminal import ENDING

if TYPE_CHECKING:
    from openhands_rl_plugin.evals.report.figures import Comparison
    from openhands_rl_plugin.evals.report.run_records import RunRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The runs, the store with a verifier's scores, and the folder of the report."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, or output.jsonl files")
    add_report_options(parser)


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Options of ``report`` and ``compare``."""
    parser.add_argument("--out", type=Path, metavar="DIR", help="write report.json and report.html to this folder")
    parser.add_argument("--store", metavar="STORE", help=f"store with a verifier's scores: {STORE_HELP}")
    version = "prefix of the version of the verifier's scores"
    parser.add_argument("--verifier", default="verifier", metavar="VERSION", help=version)
    parser.add_argument("--json", action="store_true", help="print report.json instead of tables")


def run(args: argparse.Namespace) -> int:
    """Print the results. Raises ``RLError`` when a run or the store cannot be read."""
    output_report(args, read_judged_runs(args, args.runs))
    return 0


def read_judged_runs(args: argparse.Namespace, paths: Sequence[Path]) -> tuple[RunRecord, ...]:
    """The runs, with a verifier's scores if a store is given."""
    from openhands_rl_plugin.evals.report.run_records import read_runs

    runs = read_runs(tuple(paths))
    return ENDING.run(_verified(args, runs)) if args.store else runs


def output_report(args: argparse.Namespace, runs: Sequence[RunRecord], comparison: Comparison | None = None) -> None:
    """Print the report and write its files."""
    from openhands_rl_plugin.evals.report.figures import figures_of
    from openhands_rl_plugin.evals.report.tables import EvaluationReport, write_json_report
    from openhands_rl_plugin.trajectories.view import print_json

    groups = figures_of(runs)
    if args.json:
        print_json(EvaluationReport(groups=groups, comparison=comparison))
    else:
        print_report(runs, comparison)
    if args.out is not None:
        from openhands_rl_plugin.apps.loop.reporting import report_writer

        write_json_report(args.out, groups, comparison)
        if (writer := report_writer()) is not None:
            writer.write_evaluation_report(args.out, runs, comparison)


def print_report(runs: Sequence[RunRecord], comparison: Comparison | None = None) -> None:
    """Print a table: one column per group of runs, one figure per line."""
    from openhands_rl_plugin.evals.report.figures import figures_of
    from openhands_rl_plugin.evals.report.tables import HEADINGS, comparison_rows, figure_row, kind_counts
    from openhands_rl_plugin.trajectories.view import console, table

    shown = console()
    groups = figures_of(runs)
    rows = [figure_row(group) for group in groups]
    lines = [(heading, *(row[at] for row in rows)) for at, heading in enumerate(HEADINGS)]
    lines.append(("outcomes", *(kind_counts(group) for group in groups)))
    if any(group.in_force for group in groups):
        lines.append(("in force", *(group.in_force or "not recorded" for group in groups)))
    shown.print(table(("", *(f"({at})" for at in range(1, len(groups) + 1))), lines))
    if comparison is not None:
        shown.print(table(("comparison", ""), comparison_rows(comparison)))


async def _verified(args: argparse.Namespace, runs: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    from openhands_rl_plugin.cli.options import open_store
    from openhands_rl_plugin.evals.report.run_records import with_verifier

    async with open_store(args.store) as storage:
        return await with_verifier(runs, storage, args.verifier)
