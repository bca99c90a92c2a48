"""``python -m openhands_rl_plugin.contrib.repair``: make the published repair tasks again."""

from __future__ import annotations

import argparse
from pathlib import Path

from openhands_rl_plugin.contrib.repair.making import RepairPlan, make_repair
from openhands_rl_plugin.contrib.repair.rows import data_file
from openhands_rl_plugin.evals.swe.backends.caching import default_cache
from openhands_rl_plugin.evals.tasks.packages import read_plan


class _Printed:
    def package(self, label: str, at: int, of: int) -> None:
        print(f"[{at + 1}/{of}] {label}")

    def tried(self, made: int, wanted: int, reason: str) -> None:
        print(f"  {made} of {wanted} tasks; {reason or 'made one'}")


def main() -> None:
    """Make the tasks of the plan, or of some of its packages."""
    parser = argparse.ArgumentParser(prog="python -m openhands_rl_plugin.contrib.repair", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .jsonl file to write")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this package; may be repeated")
    args = parser.parse_args()
    plan = read_plan(data_file("repair.toml"), RepairPlan)
    chosen = tuple(each for each in plan.packages if not args.only or each.name in args.only)
    made = make_repair(plan.model_copy(update={"packages": chosen}), args.out, default_cache(), _Printed())
    print(f"{args.out}: {made.tasks} tasks of {made.packages} packages", *made.problems, sep="\n  ")


if __name__ == "__main__":
    main()
