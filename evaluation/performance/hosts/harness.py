"""What the harness itself costs: rollouts of small instances with an instant model, through OpenHands' controllers.

    python -m evaluation.performance.hosts.harness [--instances 16] [--workers 2] [--repeats 3] [--suite FILE] \
        [--json FILE]

Every attempt is a checkout, a session in bubblewrap with three commands, the patch, and all files of a run. Without
``--suite`` the instances are a small git repository, set up by cloning it, and the patches are not graded. The time
that the workers take to import OpenHands is in ``per task``, as it is in any evaluation; ``steady`` is the time between
the ends of attempts, from the first one that every worker has finished.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.evals.runs.evaluate import evaluate, process_count
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, bounded
from openhands_rl_plugin.evals.runs.run_files import Outcome
from openhands_rl_plugin.evals.runs.suites import EvalTask, Suite, make_backend, swe_task
from openhands_rl_plugin.evals.swe.instances import Instance, InstanceBackend, PatchVerdict, VerdictKind, read_instances
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

REPLIES = [
    {"bash": "git log --oneline | head -3; ls"},
    {"bash": "grep -rn def . | head"},
    {"bash": "echo '#' >> new.py"},
]
SUITE = Suite(name="small", dataset="small", split="test")


@dataclass(frozen=True)
class Measurement:
    """One evaluation; times in seconds."""

    instances: int
    workers: int
    failed: int
    wall: float
    per_task: float
    steady: float


class Clones:
    """Instances of one small repository."""

    name = "clones"

    def __init__(self, origin: Path) -> None:
        self._origin = origin

    async def check(self) -> None:
        """Nothing is needed but git."""

    async def checkout(self, instance: Instance, directory: Path) -> TaskWorkspace:
        """A clone."""
        await asyncio.to_thread(_git, directory.parent, "clone", "--quiet", str(self._origin), str(directory))
        return TaskWorkspace(root=directory.parent, repository=directory.name)

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """Not judged."""
        return PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.UNRESOLVED)


def _git(directory: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *who, *words], cwd=directory, check=True, stdout=subprocess.DEVNULL)


def _small(folder: Path, count: int) -> tuple[InstanceBackend, list[Instance]]:
    origin = folder / "origin"
    for number in range(40):
        file = origin / f"package{number % 4}" / f"module{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"def f{at}(x):\n    return x + {at}\n\n\n" for at in range(50)))
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "start")):
        _git(origin, *words)
    instances = [
        Instance(instance_id=f"small__small-{number}", repo="small/small", version="1", base_commit="HEAD")
        for number in range(count)
    ]
    return Clones(origin), instances


def _entries(instances: Sequence[Instance]) -> list[EvalTask]:
    problem = script([*REPLIES, {"finish": "done"}])
    return [swe_task(each.model_copy(update={"problem_statement": problem}), SUITE) for each in instances]


async def _evaluated(
    url: str, folder: Path, entries: Sequence[EvalTask], backend: InstanceBackend, workers: int, grade: bool
) -> Measurement:
    serving = ServingSettings(model="instant", base_url=url)
    plan = EvaluationPlan(
        suite=SUITE,
        agent="CodeActAgent",
        settings=bounded(RLSettings(serving=serving, max_workers=workers), SUITE),
        out=folder,
        graders=workers,
    )
    ends: list[float] = []
    failed = 0

    def finished(outcome: Outcome) -> None:
        nonlocal failed
        ends.append(time.perf_counter())
        failed += outcome.turns != len(REPLIES) + 1

    started = time.perf_counter()
    async with FileTrajectoryStorage(folder / "trajectories") as storage:
        await evaluate(
            plan,
            entries,
            storage=storage,
            backend=backend,
            grade=grade,
            processes=process_count(workers),
            started=lambda _: finished,
        )
    wall, count = time.perf_counter() - started, len(entries)
    first = min(workers, count - 1)
    return Measurement(
        instances=count,
        workers=workers,
        failed=failed + count - len(ends),
        wall=round(wall, 2),
        per_task=round(wall / count, 3),
        steady=round((ends[-1] - ends[first]) / max(1, count - 1 - first), 3),
    )


async def _measure(options: argparse.Namespace, url: str, folder: Path) -> Measurement:
    if options.suite is None:
        backend, instances = _small(folder, options.instances)
    else:
        backend, instances = make_backend("local"), list(read_instances(options.suite))[: options.instances]
    entries = _entries(instances)
    return await _evaluated(url, folder / "out", entries, backend, options.workers, options.suite is not None)


def _median(rows: Sequence[Measurement]) -> Measurement:
    return sorted(rows, key=lambda row: row.wall)[len(rows) // 2]


def main() -> None:
    """Measure, print a table and one line of JSON, and write the same JSON to ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--suite", type=Path, help="rows to play and grade by the local back end")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    before = os.getloadavg()[0]
    rows = []
    with instant_model() as url:
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(asyncio.run(_measure(options, url, Path(folder))))
    table = Table(title="Rollouts with an instant model (median of the repeats, by wall time)")
    for column in asdict(rows[0]):
        table.add_column(column.replace("_", " "), justify="right")
    table.add_row(*(str(value) for value in asdict(_median(rows)).values()))
    Console().print(table)
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "load_before": round(before, 2)}
    per_task = statistics.median(row.per_task for row in rows)
    report = json.dumps({"machine": machine, "per_task": per_task, "rows": [asdict(row) for row in rows]})
    print(report)
    if options.json is not None:
        options.json.write_text(report + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
