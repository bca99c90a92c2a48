"""How long the laptop suite takes: every task's own patch, or one that changes nothing, graded by the local back end.

The first round sets environments and repositories up where the cache lacks them, and is shown apart; the others are
what grading takes. Every round has to resolve all tasks (``--no-op``: none), with the same outcome of every test.

    python -m evaluation.performance.grading.swe_local [--file FILE] [--rounds 3] [--workers 2] [--no-op] [--cache DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from openhands_rl_plugin.evals.runs.suites import local_rows, make_backend
from openhands_rl_plugin.evals.swe.backends import default_cache
from openhands_rl_plugin.evals.swe.instances import Instance, InstanceBackend, PatchVerdict, read_instances
from openhands_rl_plugin.evals.tasks.make import NO_OP


async def round_of(
    backend: InstanceBackend, instances: tuple[Instance, ...], workers: int, *, no_op: bool
) -> tuple[float, list[PatchVerdict]]:
    """Wall time in seconds and the verdicts, in the order of the instances."""
    turns = asyncio.Semaphore(workers)

    async def graded(instance: Instance) -> PatchVerdict:
        with tempfile.TemporaryDirectory() as folder:
            async with turns:
                patch = NO_OP if no_op else instance.patch
                return await backend.grade(instance, patch, logs=Path(folder) / instance.instance_id, timeout=600)

    began = time.monotonic()
    verdicts = await asyncio.gather(*map(graded, instances))
    return time.monotonic() - began, verdicts


def outcome(verdicts: list[PatchVerdict]) -> list[tuple[str, frozenset[str], frozenset[str]]]:
    """What must not differ between rounds."""
    return [
        (each.kind, frozenset(each.fail_to_pass.failure), frozenset(each.pass_to_pass.failure)) for each in verdicts
    ]


async def measure(args: argparse.Namespace) -> int:
    """Print a line a round; 1 when a round is not as it has to be."""
    instances = read_instances(args.file)
    backend = make_backend("local", cache=args.cache)
    await backend.check()
    wrong, seconds, first = 0, [], None
    for at in range(args.rounds):
        took, verdicts = await round_of(backend, instances, args.workers, no_op=args.no_op)
        resolved, same = sum(each.resolved for each in verdicts), first in (None, outcome(verdicts))
        first = first or outcome(verdicts)
        wrong += resolved != (0 if args.no_op else len(instances)) or not same
        overhead = statistics.median(each.seconds - each.test_seconds for each in verdicts)
        seconds += [took] if at else []
        note = "" if at else " (with set-up)"
        print(f"round {at + 1}{note}: {took:.0f} s, {resolved} of {len(instances)} resolved, overhead {overhead:.2f} s")
        for each in verdicts:
            if each.resolved == args.no_op:
                print(f"  {each.instance_id}: {each.kind} {each.reason}")
    if seconds:
        print(f"median without set-up: {statistics.median(seconds):.0f} s; the rounds {'differ' if wrong else 'agree'}")
    return int(wrong > 0)


def main() -> int:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=local_rows())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-op", action="store_true")
    parser.add_argument("--cache", type=Path, default=default_cache())
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
