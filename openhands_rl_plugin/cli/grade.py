"""``openhands-rl grade``: grade patches on SWE-bench, SWE-Gym or your own instances.

examples:
  openhands-rl grade preds.jsonl --instances rows.jsonl --mirror ./mirrors --out ./graded
  openhands-rl grade gold --instances rows.parquet --workers 2 --out ./graded
  openhands-rl grade preds.json --instances rows.jsonl --backend docker --out ./graded

The local back end needs bubblewrap, git and uv, and the Pythons that the instances name (uv python install 3.9). Rows
of SWE-bench and SWE-Gym need: pip install 'openhands_rl_plugin[swe]'. Set-up uses the network, tests do not.
The report of model org/name is DIR/org__name.RUN_ID.json; why a patch is unresolved stands in its verdict.json.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from openhands_rl_plugin.cli.options import add_repositories, backend_of, positive
from openhands_rl_plugin.cli.terminal import sayable
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.evals.runs.plan import select
from openhands_rl_plugin.evals.swe.grading import grade_all, summary
from openhands_rl_plugin.evals.swe.instances import (
    PatchPrediction,
    PatchVerdict,
    VerdictKind,
    read_instances,
    read_predictions,
)
from openhands_rl_plugin.trajectories.view import progress_bar

RESUME = "the same command continues where it stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The predictions, the instances, and where and how to grade."""
    predictions = "a .jsonl or .json file, also of several models; gold: the rows' own patches"
    parser.add_argument("predictions", metavar="PREDICTIONS", help=predictions)
    rows = "the tasks: a .jsonl, .json or .parquet file"
    parser.add_argument("--instances", type=Path, required=True, metavar="ROWS", help=rows)
    out = "folder for logs and for MODEL.RUN_ID.json, the report of a model"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=out)
    add_repositories(parser)
    parser.add_argument("--workers", type=positive, default=1, metavar="INSTANCES", help="instances graded at a time")
    parser.add_argument("--timeout", type=positive, default=1800, metavar="SECONDS", help="for an instance's tests")
    parser.add_argument("--run-id", default="run", metavar="NAME", help="in the names of reports and the logs' folder")
    parser.add_argument("--ids", nargs="+", default=[], metavar="ID", help="only these ids or patterns ('psf__*')")
    parser.add_argument("--network", action="store_true", help="let tests use the network")


async def run(args: argparse.Namespace) -> int:
    """Grade; exit code 1 when nothing got a verdict. Raises ``RLError`` for files that cannot be read."""
    if not re.fullmatch(r"\w[\w.-]*", args.run_id):
        raise ConfigError(f"--run-id {args.run_id!r}: letters, digits, dots, dashes and underscores only")
    instances = select(read_instances(args.instances), lambda each: each.instance_id, args.ids)
    predictions = read_predictions(args.predictions, instances)
    asked = {each.instance_id for each in predictions}
    rows = [instance for instance in instances if instance.instance_id in asked]
    if (backend := backend_of(args, rows, network=args.network)) is None:
        raise ConfigError(f"{args.predictions}: no prediction is of a row of {args.instances}")
    await backend.check()
    with progress_bar("grading", len(predictions)) as bar:

        def show(prediction: PatchPrediction, verdict: PatchVerdict) -> None:
            why = f": {verdict.reason}" if verdict.reason else ""
            who = f"{prediction.model_name_or_path}  {verdict.instance_id}"
            bar.print(f"{who}  {verdict.kind.value}{why}  ({verdict.seconds:.1f} s)")
            bar.advance()

        given = {"run_id": args.run_id, "workers": args.workers, "timeout": args.timeout, "on_verdict": show}
        verdicts, reports = await grade_all(backend, instances, predictions, args.out, **given)
    print(sayable(f"{summary(verdicts)}\n" + "\n".join(map(str, reports))))
    if failed := [each for each in verdicts.values() if each.kind is VerdictKind.INFRASTRUCTURE]:
        print(sayable(f"{len(failed)} of {len(verdicts)} have no verdict: {failed[0].reason}"), file=sys.stderr)
    return int(len(failed) == len(verdicts))
