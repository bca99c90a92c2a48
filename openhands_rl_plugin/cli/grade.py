"""``openhands-rl grade``: verdicts on predictions, with or without a container engine."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.stored import positive
from openhands_rl_plugin.core.errors import ConfigError

if TYPE_CHECKING:
    from openhands_rl_plugin.evals.swe.grading import Graded
    from openhands_rl_plugin.evals.swe.protocols import InstanceBackend
    from openhands_rl_plugin.evals.swe.rows import Prediction
    from openhands_rl_plugin.evals.swe.types import Instance, Verdict

HELP = "grade patches on SWE-bench, SWE-Gym or own instances"
EPILOG = """examples:
  openhands-rl grade preds.jsonl --instances rows.jsonl --mirror ./mirrors --out ./graded
  openhands-rl grade gold --instances rows.parquet --workers 2 --out ./graded
  openhands-rl grade preds.json --instances rows.jsonl --backend docker --out ./graded

The local back end needs bubblewrap, git and uv, and the Pythons that the instances name (uv python install 3.9). Rows
of SWE-bench and SWE-Gym need: pip install 'openhands_rl_plugin[swe]'. Set-up uses the network, tests do not.
"""
RESUME = "the same command goes on where it stopped"
_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The predictions, the instances, and where and how to grade."""
    parser.add_argument("predictions", metavar="PREDICTIONS", help=".jsonl or .json; or gold: the rows' own patches")
    parser.add_argument("--instances", type=Path, required=True, metavar="ROWS", help=".jsonl, .json or .parquet")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="logs and reports")
    parser.add_argument("--backend", choices=("local", "docker"), default="local")
    parser.add_argument("--mirror", type=Path, metavar="DIR", help="git repositories, as owner/name.git; else clones")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="environments of the local back end")
    parser.add_argument("--workers", type=positive, default=1, metavar="N", help="instances at a time")
    parser.add_argument("--timeout", type=positive, default=1800, metavar="S", help="seconds of one instance's tests")
    parser.add_argument("--run-id", default="run", metavar="NAME", help="names the folder and the report")
    parser.add_argument("--ids", nargs="+", metavar="ID", help="these instances only")
    parser.add_argument("--network", action="store_true", help="let tests use the network")


def run(args: argparse.Namespace) -> int:
    """Grade. Raises ``RLError`` when nothing can be graded; a bad prediction costs itself only."""
    from openhands_rl_plugin.evals.runs.backends import make_backend
    from openhands_rl_plugin.evals.swe.grading import GradingPlan, summary
    from openhands_rl_plugin.evals.swe.rows import read_instances, read_predictions

    if not args.run_id.replace("-", "").replace("_", "").replace(".", "").isalnum() or args.run_id.startswith("."):
        raise ConfigError(f"--run-id {args.run_id!r}: letters, digits, dots, dashes and underscores only")
    instances = _chosen(read_instances(args.instances), args.ids)
    found = read_predictions(args.predictions, instances)
    for problem in found.problems[:_SHOWN]:
        print(f"left out: {problem}", file=sys.stderr)
    if len(found.problems) > _SHOWN:
        print(f"left out: {len(found.problems) - _SHOWN} more", file=sys.stderr)
    if not found.rows:
        raise ConfigError(f"{args.predictions}: no prediction for these instances")
    plan = GradingPlan(run_id=args.run_id, workers=args.workers, timeout=args.timeout)
    backend = make_backend(args.backend, mirror=args.mirror, cache=args.cache, network=args.network)
    graded = asyncio.run(_grade(backend, instances, list(found.rows.values()), plan, args.out))
    print(f"{summary(graded.verdicts)}\n" + "\n".join(map(str, graded.reports)))
    return 0


async def _grade(backend: InstanceBackend, instances, predictions: list[Prediction], plan, out: Path) -> Graded:
    from openhands_rl_plugin.evals.swe.grading import grade_all

    try:
        await backend.check()
        with _progress(len(predictions)) as show:
            return await grade_all(backend, instances, predictions, plan, out, on_verdict=show)
    finally:
        await backend.close()


def _chosen(instances: tuple[Instance, ...], ids: list[str] | None) -> tuple[Instance, ...]:
    if ids is None:
        return instances
    known = {instance.instance_id for instance in instances}
    if unknown := sorted(set(ids) - known):
        raise ConfigError(f"--ids: no such instance: {', '.join(unknown)}")
    return tuple(instance for instance in instances if instance.instance_id in ids)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Verdict], None]]:
    """A bar with the time left on stderr, where that is a terminal, and one line a verdict."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    left = (TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("grading"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *left)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("grading", total=total)

        def show(verdict: Verdict) -> None:
            why = f": {verdict.reason}" if verdict.reason else ""
            line = f"{verdict.instance_id}  {verdict.kind.value}{why}  ({verdict.seconds:.1f} s)"
            console.print(line, highlight=False, soft_wrap=True, markup=False)
            progress.advance(task)

        yield show
