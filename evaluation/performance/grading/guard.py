"""How many attacks the reward-hack guard lets pass, and how many honest patches it does not.

    python -m evaluation.performance.grading.guard [--tests tests/evals/swe] [--workers 2] [--only WORDS]

Attacks and honest patches are those of the tests; every one is graded in a sandbox with pytest of this
environment.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from openhands_rl_plugin.evals.swe.backends import LocalBackend
from openhands_rl_plugin.evals.swe.guard import RewardHackGuard


def patches(folder: Path, only: str) -> dict[str, dict[str, Callable[[], str]]]:
    """Group -> name -> what makes the patch."""
    sys.path.insert(0, str(folder))
    found = {
        "attacks": {each.name: each.patch for each in import_module("attacks").ATTACKS},
        "honest": {each.name: each.patch for each in import_module("honest_patches").HONEST},
    }
    return {group: {name: make for name, make in each.items() if only in name} for group, each in found.items()}


async def measure(args: argparse.Namespace) -> int:
    """Print a line a group, and the patches that got the wrong verdict; 1 when there are any."""
    groups = patches(args.tests, args.only)
    turns, wrong = asyncio.Semaphore(args.workers), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sample: Any = import_module("pytest_sample").make_pytest_sample(folder)
        backend = LocalBackend(cache=folder / "cache", mirror=sample.mirror, guard=RewardHackGuard())
        await backend.prepare(sample.instance)

        async def resolved(group: str, at: int, make: Callable[[], str]) -> bool:
            async with turns:
                logs = folder / group / str(at)
                return (await backend.grade(sample.instance, make(), logs=logs, timeout=60.0)).resolved

        for group, each in groups.items():
            began = time.monotonic()
            found = await asyncio.gather(*(resolved(group, at, make) for at, make in enumerate(each.values())))
            odd = [name for name, paid in zip(each, found, strict=True) if paid is not (group == "honest")]
            wrong += len(odd)
            took = time.monotonic() - began
            print(f"{group}: {len(each) - len(odd)} of {len(each)} as they have to be, {took:.0f} s", *odd, sep="\n  ")
    return int(wrong > 0)


def main() -> int:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, default=Path("tests/evals/swe"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="patches whose names hold this")
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
