"""What grading costs beside the tests: overhead of one patch, and set-up of a second instance of an environment.

The instances are rows of your own (SWE-bench, SWE-Gym, or rows with a ``test_command``); the repositories are in
``--mirror``. Every instance is set up before anything is timed. Then, in turns, ``--repeats`` times:

- second instance: the set-up of another instance of the same environment, made anew each time: the row at the commit
  before its own (which is set up once before, too: what is timed is work from the cache, not a download);
- overhead: the wall time of grading the row's own patch, without the evaluation script's.

Repositories with modules in C are compiled in both, as their official scripts have it.

    python -m evaluation.performance.grading.overhead rows.jsonl --mirror ./mirrors --cache ./cache
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from openhands_rl_plugin.environments.workspace.processes import checked
from openhands_rl_plugin.evals.swe.backends.caching import remove
from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.backends.repositories import MirrorSource, find_repository
from openhands_rl_plugin.evals.swe.dataset import read_instances
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.swe.types import Instance, PatchVerdict


async def measure(
    backend: LocalBackend, mirrors: MirrorSource, instances: tuple[Instance, ...], repeats: int, timeout: float
) -> None:
    """Print a line a measurement and the medians."""
    seconds: dict[str, list[float]] = defaultdict(list)
    others = {instance.instance_id: await before(instance, mirrors) for instance in instances}
    for instance in instances:
        await backend.prepare(instance)
        await backend.prepare(others[instance.instance_id])
    for _ in range(repeats):
        for instance in instances:
            other = others[instance.instance_id]
            await remove(await backend.prepare(other))
            began = time.monotonic()
            await backend.prepare(other)
            seconds[f"second instance of {instance.repo}"].append(time.monotonic() - began)
            verdict = await graded(backend, instance, timeout)
            seconds["overhead"].append(verdict.seconds - verdict.test_seconds)
            print(
                f"{instance.instance_id:<40} {verdict.kind.value}: {verdict.seconds:7.2f} s, "
                f"of which beside the evaluation script {seconds['overhead'][-1]:5.2f} s; "
                f"second instance {seconds[f'second instance of {instance.repo}'][-1]:5.2f} s",
                flush=True,
            )
    for name, values in seconds.items():
        print(f"{name}: median {statistics.median(values):.2f} s, largest {max(values):.2f} s, {len(values)} values")


async def before(instance: Instance, mirrors: MirrorSource) -> Instance:
    """The row at its commit's first parent, with the environment that it had."""
    git = await find_repository(instance, [mirrors])
    parent = ["git", "-c", "safe.directory=*", f"--git-dir={git}", "rev-parse", f"{instance.base_commit}^"]
    commit = (await checked(parent, f"the parent of {instance.base_commit[:12]}")).text.strip()
    changes = {
        "base_commit": commit,
        "instance_id": f"{instance.instance_id}-before",
        "environment_setup_commit": instance.environment_setup_commit or instance.base_commit,
    }
    return instance.model_copy(update=changes)


async def graded(backend: LocalBackend, instance: Instance, timeout: float) -> PatchVerdict:
    """Grade the row's own patch."""
    with tempfile.TemporaryDirectory(prefix="grading-") as folder:
        return await backend.grade(instance, instance.patch, logs=Path(folder), timeout=timeout)


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--mirror", type=Path, required=True)
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--ids", nargs="*", default=[])
    args = parser.parse_args()
    rows = [row for row in read_instances(args.rows) if not args.ids or row.instance_id in args.ids]
    mirrors = MirrorSource(args.mirror)
    backend = LocalBackend(cache=args.cache, sources=[mirrors], guard=RewardHackGuard())
    asyncio.run(measure(backend, mirrors, tuple(rows), args.repeats, args.timeout))


if __name__ == "__main__":
    main()
