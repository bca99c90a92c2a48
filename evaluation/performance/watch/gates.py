"""What the gates of a watch let through and stop by chance: ``python -m evaluation.performance.watch.gates``.

Two versions play the same tasks, one attempt each, many times. A candidate is *worse* by twice the margin (in success,
or in trouble) or *equal*. With a chance of ``shared`` both have the same luck in a task, which is what pairs them; else
they succeed independently of each other. Verdicts are those of the gates themselves, each once for a number of tasks
done worse and better.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from openhands_rl_plugin.contrib.watch.gates import held_out_gate, safety_gate
from openhands_rl_plugin.contrib.watch.trouble import FLAGGED, STUCK, TROUBLES
from openhands_rl_plugin.core.statistics import Estimate, wilson


@dataclass
class Gate:
    """A gate's verdict for n tasks of which so many went worse and better; ``passes`` asks it only where no verdict on
    something better or worse has said it."""

    ask: Callable[[int, int], bool]
    passed: list[tuple[int, int]] = field(default_factory=list)
    stopped: list[tuple[int, int]] = field(default_factory=list)

    def passes(self, worse: int, better: int) -> bool:
        """Whether the candidate passes."""
        if any(w >= worse and b <= better for w, b in self.passed):
            return True
        if any(w <= worse and b >= better for w, b in self.stopped):
            return False
        found = self.ask(worse, better)
        (self.passed if found else self.stopped).append((worse, better))
        return found


def held_out(tasks: int, margin: float) -> Gate:
    """The held-out gate; better means more success."""

    def ask(worse: int, better: int) -> bool:
        before, after = _sides(tasks, worse, better)
        return held_out_gate("candidate", after, {"used": before}, margin).passed

    return Gate(ask)


def safety(tasks: int, margin: float, kind: str, level: float) -> Gate:
    """The safety gate where one kind of trouble changes; worse means more of it."""

    def ask(worse: int, better: int) -> bool:
        after, before = _sides(tasks, worse, better)
        quiet = {each: dict.fromkeys(before, 0.0) for each in TROUBLES}
        return safety_gate("candidate", {**quiet, kind: after}, {**quiet, kind: before}, margin, level).passed

    return Gate(ask)


def _sides(tasks: int, worse: int, better: int) -> tuple[dict[str, float], dict[str, float]]:
    """Tasks with 1 in the first only, with 1 in the second only, and the others."""
    names = [f"task-{at:04d}" for at in range(tasks)]
    first = {name: float(at < worse) for at, name in enumerate(names)}
    return first, {name: float(worse <= at < worse + better) for at, name in enumerate(names)}


def draw(generator: random.Random, tasks: int, before: float, after: float, shared: float) -> tuple[int, int]:
    """In how many tasks something went well before only, and after only; the chances of it are given."""
    lost = gained = 0
    for _ in range(tasks):
        luck = generator.random()
        other = luck if generator.random() < shared else generator.random()
        lost += luck < before and other >= after
        gained += luck >= before and other < after
    return lost, gained


def chance(trials: int, happens: Callable[[], bool]) -> Estimate:
    """How often it happened, with Wilson's 95% interval."""
    return wilson(sum(happens() for _ in range(trials)), trials)


def table(title: str, rows: list[tuple[str, list[Estimate]]], heads: list[str]) -> str:
    """Markdown."""
    lines = [f"| {title} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, cells in rows:
        lines.append(f"| {name} | {' | '.join(f'{c.mean:.3f} ({c.low:.3f} to {c.high:.3f})' for c in cells)} |")
    return "\n".join(lines)


def measure(tasks: int, margin: float, trials: int, seed: int, level: float) -> str:
    """The tables for one number of tasks."""
    generator = random.Random(f"{seed}/{tasks}")
    success = held_out(tasks, margin)
    stuck, flagged = (safety(tasks, margin, kind, level) for kind in (STUCK, FLAGGED))

    def rate(gate: Gate, before: float, after: float, shared: float, *, trouble: bool, passes: bool) -> Estimate:
        def once() -> bool:
            lost, gained = draw(generator, tasks, before, after, shared)
            worse, better = (gained, lost) if trouble else (lost, gained)
            return gate.passes(worse, better) is passes

        return chance(trials, once)

    heads = ["false pass, worse by 2 margins", "false stop, equal", "false stop, equal, 0.8 of the luck shared"]
    rows = [
        (
            f"held-out, success {level:g}",
            [
                rate(success, level, level - 2 * margin, 0.0, trouble=False, passes=True),
                rate(success, level, level, 0.0, trouble=False, passes=False),
                rate(success, level, level, 0.8, trouble=False, passes=False),
            ],
        )
        for level in (0.3, 0.5, 0.8, 0.95)
    ]
    for name, gate, level in (
        *(("stuck", stuck, level) for level in (0.0, 0.1)),
        *(("flagged", flagged, level) for level in (0.0, 0.01, 0.03, 0.1)),
    ):
        rows.append(
            (
                f"safety, {name} {level:g}",
                [
                    rate(gate, level, level + 2 * margin, 0.0, trouble=True, passes=True),
                    rate(gate, level, level, 0.0, trouble=True, passes=False),
                    rate(gate, level, level, 0.8, trouble=True, passes=False),
                ],
            )
        )
    return table(f"{tasks} tasks, margin {margin:g}", rows, heads)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", default=[40, 100, 200])
    parser.add_argument("--margin", type=float, default=0.05)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", type=float, default=0.1, help="of the test of flagged commands and secrets")
    args = parser.parse_args()
    for tasks in args.tasks:
        print(measure(tasks, args.margin, args.trials, args.seed, args.level), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
