"""What grading costs beside the tests: overhead of one patch, and set-up of a second instance of an environment.

The instances are rows of your own (SWE-bench, SWE-Gym, or rows with a ``test_command``); the repositories are in
``--mirror``. The first instance of a repository is set up before anything is timed. Then, in turns:

- overhead: the wall time of grading the row's own patch, without the evaluation script's;
- second instance: the set-up of another commit of the same repository, its environment being in the cache.

    python -m evaluation.performance.grading rows.jsonl --mirror ./mirrors --cache ./cache
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from openhands_rl_plugin.swe.caching import remove
from openhands_rl_plugin.swe.local import LocalBackend
from openhands_rl_plugin.swe.repositories import MirrorSource
from openhands_rl_plugin.swe.rows import read_instances
from openhands_rl_plugin.swe.types import Instance, Verdict


async def measure(backend: LocalBackend, instances: tuple[Instance, ...], repeats: int, timeout: float) -> None:
    """Print a line an instance and the medians over all."""
    seconds: dict[str, list[float]] = defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for instance in instances:
        layer = await backend.prepare(instance)
        kin = (instance.repo, instance.version.split(".")[0])
        if kin in seen:
            await remove(layer)
            began = time.monotonic()
            await backend.prepare(instance)
            seconds["second instance"].append(time.monotonic() - began)
            print(f"{instance.instance_id:<40} set up again in {seconds['second instance'][-1]:6.2f} s", flush=True)
        seen.add(kin)
    for _ in range(repeats):
        for instance in instances:
            verdict = await graded(backend, instance, timeout)
            seconds["overhead"].append(verdict.seconds - verdict.test_seconds)
            print(
                f"{instance.instance_id:<40} {verdict.kind.value}: {verdict.seconds:7.2f} s, "
                f"of which beside the evaluation script {seconds['overhead'][-1]:5.2f} s",
                flush=True,
            )
    for name, values in seconds.items():
        print(f"{name}: median {statistics.median(values):.2f} s, largest {max(values):.2f} s, {len(values)} values")


async def graded(backend: LocalBackend, instance: Instance, timeout: float) -> Verdict:
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
    backend = LocalBackend(cache=args.cache, sources=[MirrorSource(args.mirror)])
    asyncio.run(measure(backend, tuple(rows), args.repeats, args.timeout))


if __name__ == "__main__":
    main()
