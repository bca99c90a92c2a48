"""``openhands-rl tasks``: make tasks from real packages, check their quality, list them.

examples:
  openhands-rl tasks make ./my-repository@v1.2 --out tasks.jsonl      (bugs in its code, and fixes in its history)
  openhands-rl tasks make https://github.com/jpvanhal/inflection@0.5.1 --out tasks.jsonl --per-package 4 --seed 1
  openhands-rl tasks check tasks.jsonl --repeats 3
  openhands-rl tasks list swe-local --split heldout

Tests run in bubblewrap without a network; what they need is installed from your package index before.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from openhands_rl_plugin.cli.options import above_zero, checked, positive
from openhands_rl_plugin.cli.terminal import ENDING, sayable
from openhands_rl_plugin.evals.runs.suites import make_backend, own_suite, rows_file
from openhands_rl_plugin.evals.swe.backends import default_cache
from openhands_rl_plugin.evals.swe.instances import read_instances
from openhands_rl_plugin.evals.tasks.make import TaskPlan, check_tasks, make_tasks, table_of
from openhands_rl_plugin.evals.tasks.source import find_source
from openhands_rl_plugin.trajectories.view import console, progress_bar

RESUME = "the same command begins again; environments that are installed stay"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``make``, ``check`` and ``list``."""
    what = parser.add_subparsers(dest="what", required=True, metavar="{make,check,list}")
    make = what.add_parser("make", help="insert bugs into repositories and keep those that make good tasks")
    source = "a git repository, FOLDER or URL, with @COMMIT if that is not HEAD"
    make.add_argument("source", metavar="SOURCE", help=source)
    make.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .jsonl file to write")
    make.add_argument("--per-package", type=positive, default=4, metavar="TASKS", help="tasks wanted")
    make.add_argument("--seed", type=int, default=1, metavar="S", help="seed of the choice of bugs")
    make.add_argument("--python", metavar="VERSION", help="Python version of the tests (default: the running one)")
    more = "also install this for the tests; may be repeated"
    make.add_argument("--with", dest="requirements", action="append", default=[], metavar="REQ", help=more)
    some = "run these tests (an argument of pytest) instead of all that are found; may be repeated"
    make.add_argument("--tests", action="append", default=[], metavar="PATH", help=some)
    make.add_argument("--timeout", type=above_zero, default=60.0, metavar="SECONDS", help="for one run of the tests")
    check = what.add_parser("check", help="the quality gate: oracle, no-op, flakiness, duplicates")
    what_file = "a .jsonl file of tasks, swe-local, or repair"
    check.add_argument("file", metavar="FILE", help=what_file)
    check.add_argument("--repeats", type=positive, default=2, metavar="RUNS", help="test runs of each task")
    check.add_argument("--workers", type=positive, default=2, metavar="TASKS", help="tasks checked at a time")
    check.add_argument("--timeout", type=above_zero, default=600.0, metavar="SECONDS", help="for one test run")
    for each in (make, check):
        text = "folder for Python environments (default: in the user's cache folder)"
        each.add_argument("--cache", type=Path, metavar="DIR", help=text)
    shown = what.add_parser("list", help="the tasks of a file, or of swe-local")
    shown.add_argument("file", metavar="FILE", nargs="?", default="swe-local", help=what_file)
    shown.add_argument("--split", metavar="NAME", help="only these: train, heldout, or more (of repair-1, -2, -3)")


def run(args: argparse.Namespace) -> int:
    """Make, check or list; exit code 1 when a task does not pass the gate. Raises ``RLError``."""
    if args.what == "list":
        return _list(args)
    args.cache = args.cache or default_cache()
    return _make(args) if args.what == "make" else ENDING.run(_check(args))


def _make(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if name in TaskPlan.model_fields and value is not None}
    match = re.fullmatch(r"(.+?)(?:@([^@/:]+(?:/[^@:]+)?))?", args.source)
    source = find_source(match[1] if match else args.source, (match and match[2]) or "HEAD", args.cache)
    plan = checked(TaskPlan, {**given, "source": source, "wanted": args.per_package})
    with progress_bar("making", args.per_package) as bar:
        making = make_tasks(plan, args.out, args.cache, lambda made, why: bar.update(made, note=why or "made one"))
        count = ENDING.run(making)
    print(f"{args.out}: {count} of {args.per_package} tasks")
    return 0


async def _check(args: argparse.Namespace) -> int:
    path = rows_file(args.file)
    instances = read_instances(path)
    backend = make_backend("local", cache=args.cache, instances=instances)
    options = {"repeats": args.repeats, "workers": args.workers, "timeout": args.timeout}
    with progress_bar("checking", len(instances)) as bar:
        found = await check_tasks(instances, backend, **options, on_checked=lambda name: bar.advance())
    for name, problems in found.items():
        for problem in problems:
            print(sayable(f"{name}: {problem}"))
    bad = sum(map(bool, found.values()))
    print(f"{path}: {len(found) - bad} of {len(found)} tasks pass")
    return int(bad > 0)


def _list(args: argparse.Namespace) -> int:
    path, own = rows_file(args.file), own_suite(args.file)
    if own is not None and own.further and args.split == own.further:
        instances = [entry.instance for entry in own.tasks(own.further) if entry.instance is not None]
    else:
        instances = [each for each in read_instances(path) if args.split in (None, each.extra.get("split"))]
    console().print(table_of(instances))
    return 0
