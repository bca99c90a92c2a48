"""The figures of ``grpo`` over its seeds: each side's held-out success, and the differences on the same goals."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from openhands_rl_plugin.core.statistics import Estimate, paired_difference, wilson
from openhands_rl_plugin.core.types import Frozen

SUCCESS = 0.999
SIDES = ("sft", "ours", "trl")
PAIRS = (("sft", "ours"), ("sft", "trl"), ("trl", "ours"))


class Part(Frozen):
    """A side of one seed. ``returns``: task -> return of its held-out episode; times are of the adapter that counts.

    ``rollout_success``: of the training rollouts, batch by batch, as far as they were trained on within the budget;
    ``rollout_share``: of the time until the adapter that counts, processor time for TRL, wall time for ours; 0 where it
    is not known, as ``cpu_seconds``.
    """

    side: str
    seed: int
    minutes: float
    returns: dict[str, float]
    steps: int = 0
    episodes: int = 0
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    rollout_success: tuple[float, ...] = ()
    rollout_share: float = 0.0

    @property
    def success(self) -> Estimate:
        """Held-out success with its Wilson interval."""
        return wilson(sum(value >= SUCCESS for value in self.returns.values()), len(self.returns))


def read_parts(directories: Sequence[Path]) -> tuple[Part, ...]:
    """The finished sides below the directories. Exits where one holds none, or a seed and side stand twice."""
    parts: dict[tuple[int, str], Part] = {}
    for directory in directories:
        files = [directory / f"{side}.json" for side in SIDES]
        found = [Part.model_validate_json(file.read_text()) for file in files if file.exists()]
        if not found:
            raise SystemExit(f"{directory} holds no finished side of a comparison")
        for part in found:
            if parts.setdefault((part.seed, part.side), part) is not part:
                raise SystemExit(f"{directory}: there is another {part.side} of seed {part.seed}")
    return tuple(parts.values())


def difference(parts: Sequence[Part], before: str, after: str) -> Estimate:
    """Mean difference of success over goals that both sides ran. A goal counts once, with its mean over the seeds."""
    by_goal: dict[str, list[tuple[float, float]]] = defaultdict(list)
    sides = {(part.seed, part.side): part for part in parts}
    for seed in sorted({part.seed for part in parts}):
        first, later = sides.get((seed, before)), sides.get((seed, after))
        if first is None or later is None:
            continue
        for goal in sorted(first.returns.keys() & later.returns.keys()):
            by_goal[goal].append((float(first.returns[goal] >= SUCCESS), float(later.returns[goal] >= SUCCESS)))
    means = [[statistics.fmean(column) for column in zip(*pairs, strict=True)] for pairs in by_goal.values()]
    return paired_difference([mean[0] for mean in means], [mean[1] for mean in means])


def overall(parts: Sequence[Part], side: str) -> Estimate:
    """A side's success over all episodes of all seeds."""
    returns = [value for part in parts if part.side == side for value in part.returns.values()]
    return wilson(sum(value >= SUCCESS for value in returns), len(returns))


def report(directories: Sequence[Path]) -> None:
    """Print the tables."""
    parts = read_parts(directories)
    sides = [side for side in SIDES if any(part.side == side for part in parts)]
    shown = Table(title="held-out success, with 95 % intervals")
    for column in ("seed", "side", "success", "95 %", "goals", "reward", "steps", "episodes", "CPU min", "of", "wall"):
        shown.add_column(column, justify="left" if column == "side" else "right")
    for part in sorted(parts, key=lambda part: (part.seed, SIDES.index(part.side))):
        reward = f"{statistics.fmean(part.returns.values()):.3f}" if part.returns else "-"
        spent = f"{part.cpu_seconds / 60:.1f}" if part.cpu_seconds else "-"
        counts = (str(part.steps), str(part.episodes), spent, f"{part.minutes:g}")
        learned = (*counts, f"{part.wall_seconds / 60:.1f}") if part.side != "sft" else ("-",) * 5
        shown.add_row(str(part.seed), part.side, *_shown(part.success), reward, *learned)
    for side in sides:
        shown.add_row("all", side, *_shown(overall(parts, side)))
    console = Console(width=110)  # of the table, also where the output is a file
    console.print(shown)
    for before, after in PAIRS:
        if before in sides and after in sides:
            found = difference(parts, before, after)
            console.print(
                f"{after} - {before}: {found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}] "
                f"(paired bootstrap over {found.n} goals)"
            )
    for part in parts:
        if part.rollout_success:
            shares = " ".join(f"{value:.2f}" for value in part.rollout_success)
            share = f"; they took {part.rollout_share:.0%} of the time" if part.rollout_share else ""
            console.print(f"seed {part.seed}, {part.side}: success of the training rollouts {shares}{share}")


def _shown(estimate: Estimate) -> tuple[str, str, str]:
    return f"{estimate.mean:.3f}", f"{estimate.low:.3f}-{estimate.high:.3f}", str(estimate.n)
