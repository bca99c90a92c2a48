"""``openhands-rl tasks``: make repository tasks, check their quality, list them.

examples:
  openhands-rl tasks make inflection==0.5.1 tabulate==0.10.0 --out tasks.jsonl --per-package 4 --seed 1
  openhands-rl tasks make tinydb==4.8.0..4.9.0 --out tasks.jsonl      (also the changes between the two)
  openhands-rl tasks make ./my-repository@v1.2 --out tasks.jsonl      (also fixes in its history)
  openhands-rl tasks make swe-local --out swe_local.jsonl             (the packages of swe-local again)
  openhands-rl tasks check tasks.jsonl --repeats 3
  openhands-rl tasks check tasks.jsonl --results report.json --pass-rate 0.05 0.95
  openhands-rl tasks list swe-local --split heldout

A plan (.toml) has these options for many packages: see swe_local.toml in the package's tasks/data. Everything runs in
bubblewrap without network; packages are downloaded by your own pip or uv from its index.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options import above_zero, positive
from openhands_rl_plugin.cli.terminal import ENDING
from openhands_rl_plugin.core.errors import ConfigError

if TYPE_CHECKING:
    from openhands_rl_plugin.evals.tasks.packages import TaskPlan
    from openhands_rl_plugin.trajectories.view import ProgressBar

RESUME = "the same command continues where it stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``make``, ``check`` and ``list``."""
    what = parser.add_subparsers(dest="what", required=True, metavar="{make,check,list}")
    _add_make(what.add_parser("make", help="insert bugs into packages and keep those that make good tasks"))
    check = what.add_parser("check", help="the quality gate: oracle, no-op, flakiness, pass rate, duplicates")
    what_file = "a .jsonl file of tasks, swe-local, or repair"
    check.add_argument("file", metavar="FILE", help=what_file)
    check.add_argument("--repeats", type=positive, default=2, metavar="RUNS", help="test runs of each task")
    check.add_argument("--workers", type=positive, default=2, metavar="TASKS", help="tasks checked at a time")
    check.add_argument("--timeout", type=above_zero, default=600.0, metavar="SECONDS", help="for one test run")
    check.add_argument(
        "--results", type=Path, metavar="FILE", help="a policy's results: JSON, task id -> share of solved episodes"
    )
    allowed = "share of solved episodes that a task may have in --results (default: 0.01 0.99)"
    check.add_argument("--pass-rate", type=float, nargs=2, default=(0.01, 0.99), metavar=("LOW", "HIGH"), help=allowed)
    _add_cache(check)
    shown = what.add_parser("list", help="the tasks of a file, or of swe-local")
    shown.add_argument("file", metavar="FILE", nargs="?", default="swe-local", help=what_file)
    shown.add_argument("--split", metavar="NAME", help="only these: train, heldout, or more (of repair-1, -2, -3)")


def _add_make(make: argparse.ArgumentParser) -> None:
    source = "name==version, name==old..new, an archive, a git repository (@commit), a plan (.toml), swe-local"
    make.add_argument("sources", nargs="+", metavar="SOURCE", help=source)
    make.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .jsonl file to write")
    make.add_argument(
        "--per-package", type=positive, metavar="TASKS", help="tasks wanted per package (default: 4, or the plan's)"
    )
    make.add_argument("--seed", type=int, metavar="S", help="seed of the choice of bugs (default: 1, or the plan's)")
    make.add_argument("--python", metavar="VERSION", help="Python version of the tests (default: 3.12, or the plan's)")
    make.add_argument(
        "--with",
        dest="requirements",
        action="append",
        metavar="REQ",
        help="also install this for the tests; may be repeated",
    )
    make.add_argument("--timeout", type=above_zero, metavar="SECONDS", help="for one run of the tests (default: 60)")
    make.add_argument("--only", action="append", metavar="NAME", help="only this package of the plan; may be repeated")
    _add_cache(make)


def _add_cache(parser: argparse.ArgumentParser) -> None:
    text = "folder for Python environments (default: in the user's cache folder)"
    parser.add_argument("--cache", type=Path, metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Make, check or list; exit code 1 when a task does not pass the gate. Raises ``RLError``."""
    if args.what == "make":
        return _make(args)
    return ENDING.run(_check(args)) if args.what == "check" else _list(args)


class _Watcher:
    """Shows the packages done and the last bug: as a bar on a terminal, as lines elsewhere."""

    def __init__(self, bar: ProgressBar) -> None:
        self._bar = bar
        self._done = 0

    def package(self, label: str, at: int, of: int) -> None:
        """A package begins."""
        self._done = at
        self._bar.update(at, of, what=label, note="")
        self._print(f"[{at + 1}/{of}] {label}")

    def tried(self, made: int, wanted: int, reason: str) -> None:
        """A bug was tried; ``reason``: why it makes no task, empty when it does."""
        last = f"{made} of {wanted} tasks; " + (reason or "made one")
        self._bar.update(self._done, note=last)
        self._print(f"  {last}")

    def _print(self, line: str) -> None:
        if not self._bar.drawn:
            self._bar.print(line)


def _make(args: argparse.Namespace) -> int:
    from openhands_rl_plugin.evals.swe.backends.caching import default_cache
    from openhands_rl_plugin.evals.tasks.suite import make_suite
    from openhands_rl_plugin.trajectories.view import progress_bar

    plan = _plan(args)
    with progress_bar("making") as bar:
        places = args.out, args.cache or default_cache(), _Watcher(bar)
        made = make_suite(plan, *places)
    print(f"{args.out}: {made.tasks} tasks of {made.packages} packages")
    for problem in made.problems:
        print(f"  {problem}")
    return 0


def _plan(args: argparse.Namespace) -> TaskPlan:
    """The plan that the sources and options give. Raises ``ConfigError``."""
    from openhands_rl_plugin.core.errors import unknown_name
    from openhands_rl_plugin.evals.tasks.packages import (
        SUITE,
        SUITE_PLAN,
        TaskPlan,
        parse_source,
        read_plan,
        suite_file,
    )

    files = [suite_file(SUITE_PLAN) if each == SUITE else Path(each) for each in args.sources]
    plans = [read_plan(file) for file in files if file.suffix == ".toml"]
    if plans and len(args.sources) > 1:
        raise ConfigError("give one plan, or sources, not both: a plan has settings of its own")
    plan = plans[0] if plans else TaskPlan(packages=tuple(parse_source(each) for each in args.sources))
    changes = {name: getattr(args, name) for name in ("per_package", "seed", "python", "timeout")}
    changes = {name: value for name, value in changes.items() if value is not None}
    if args.requirements:
        changes["requirements"] = (*plan.requirements, *args.requirements)
    if args.only:
        known = {package.name: package for package in plan.packages}
        if wrong := [name for name in args.only if name not in known]:
            raise ConfigError(f"--only: {unknown_name('package', wrong[0], known)}")
        changes["packages"] = tuple(known[name] for name in args.only)
    return TaskPlan.model_validate({**dict(plan), **changes})


async def _check(args: argparse.Namespace) -> int:
    from openhands_rl_plugin.evals.runs.backends import make_backend
    from openhands_rl_plugin.evals.swe.backends.caching import default_cache
    from openhands_rl_plugin.evals.swe.dataset import read_instances
    from openhands_rl_plugin.evals.tasks.gate import QualityGate, check_tasks
    from openhands_rl_plugin.evals.tasks.packages import tasks_file
    from openhands_rl_plugin.trajectories.view import progress_bar

    path, cache = tasks_file(args.file), args.cache or default_cache()
    low, high = args.pass_rate
    gate = QualityGate(repeats=args.repeats, workers=args.workers, timeout=args.timeout, low=low, high=high)
    backend = make_backend("local", cache=cache, instances=read_instances(path))
    try:
        with progress_bar("checking") as bar:
            report = await check_tasks(
                path,
                backend,
                gate,
                results=args.results,
                on_progress=lambda done, total, last: bar.update(done, total, note=last),
            )
    finally:
        await backend.close()
    for task in report.tasks:
        for problem in task.check.problems if task.check else ():
            print(f"{task.instance_id}: {problem}")
    bad = sum(bool(task.check and task.check.problems) for task in report.tasks)
    print(f"{path}: {len(report.tasks) - bad} of {len(report.tasks)} tasks pass")
    return int(bad > 0)


def _list(args: argparse.Namespace) -> int:
    from openhands_rl_plugin.evals.runs.suites import own_suite
    from openhands_rl_plugin.evals.swe.dataset import read_instances
    from openhands_rl_plugin.evals.tasks.gate import read_lineage, table_of
    from openhands_rl_plugin.evals.tasks.packages import tasks_file
    from openhands_rl_plugin.trajectories.view import console

    path, own = tasks_file(args.file), own_suite(args.file)
    lineage = read_lineage(path)
    if own is not None and own.further and args.split == own.further:
        lineage, instances = None, [entry.instance for entry in own.tasks(own.further) if entry.instance is not None]
    else:
        instances = [each for each in read_instances(path) if args.split in (None, each.extra.get("split"))]
    console().print(table_of(instances, lineage))
    return 0
