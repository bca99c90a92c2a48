"""How many tokens the trainer computes for groups of rollouts that begin alike, and what the layout itself costs.

    python -m evaluation.performance.training.packing [--json FILE]

16 rollouts of 30 turns, prompts of 6,000 tokens. "apart": of 16 tasks, so that nothing is shared between rollouts and
"per call" is what a call a sample would cost. "grouped": in groups of 8 that share the task's prompt; in each group
half of the rollouts share the first ten turns as well, as the branches of a search do. Counted are the tokens if every
call were a sample, if every rollout were, and the rows of the packed layout for several sizes of a pass; unique tokens
are those of a prefix tree over all rollouts. "bound" is the least that any choice of passes could come to: whole
sequences have to be in a pass together for their common beginning to be computed once.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

from openhands_rl_plugin.core.arrays import Floats, Ids, Mask
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.data.packing import common_prefix, lay_out, pack

ROLLOUTS, GROUP, TURNS, SHARED_TURNS = 16, 8, 30, 10
PROMPT, OBSERVATION, SAMPLED = 6_000, 700, 300
VOCABULARY = 150_000
PASSES = (65_536, 131_072, 262_144)


def rollouts(group: int = GROUP, seed: int = 0) -> list[Sample]:
    """The same sequences in every run; ``group`` of them are of one task."""
    source = random.Random(seed)

    def some(count: int) -> Ids:
        return Ids(source.choices(range(VOCABULARY), k=count))

    made = []
    turn = OBSERVATION + SAMPLED
    for number in range(ROLLOUTS // group):
        prompt, shared = some(PROMPT), some(SHARED_TURNS * turn)
        for member in range(group):
            begin = prompt + shared if member % 2 else prompt
            ids = begin + some(PROMPT + TURNS * turn - len(begin))
            mask = Mask(at >= PROMPT and (at - PROMPT) % turn < SAMPLED for at in range(len(ids)))
            logprobs = Floats(-0.5 * each for each in mask)
            made.append(Sample(trajectory_id=f"{number}-{member}", leaf=0, input_ids=ids, mask=mask, logprobs=logprobs))
    return made


def unique_tokens(samples: list[Sample]) -> int:
    """Nodes of a prefix tree, counted by walking it."""
    root: dict[int, dict] = {}
    count = 0
    for sample in samples:
        at = root
        for token in sample.input_ids:
            if token not in at:
                at[token] = {}
                count += 1
            at = at[token]
    return count


def fewest_rows(samples: list[Sample], size: int) -> int:
    """Rows of the best partition of one group into passes, by trying all; more than ten samples take too long."""
    ids = sorted((sample.input_ids for sample in samples), key=bytes)
    shared = {pair: common_prefix(ids[pair[0]], ids[pair[1]]) for pair in combinations(range(len(ids)), 2)}
    rows = {
        chosen: sum(len(ids[at]) for at in chosen) - sum(shared[pair] for pair in pairwise(chosen))
        for count in range(1, len(ids) + 1)
        for chosen in combinations(range(len(ids)), count)
    }

    @cache
    def fewest(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        rest = left[1:]
        return min(
            rows[one] + fewest(tuple(at for at in left if at not in one))
            for count in range(len(rest) + 1)
            for others in combinations(rest, count)
            if rows[one := (left[0], *others)] <= size or not others
        )

    return fewest(tuple(range(len(ids))))


def measure(group: int) -> dict[str, float]:
    """Counts, ratios to the unique tokens, and milliseconds of laying out."""
    samples = rollouts(group)
    unique = unique_tokens(samples)
    turn = OBSERVATION + SAMPLED
    per_call = ROLLOUTS * sum(PROMPT + (at + 1) * turn for at in range(TURNS))
    per_rollout = sum(len(sample.input_ids) for sample in samples)
    figures: dict[str, float] = {
        "unique_tokens": unique,
        "per_call_over_unique": per_call / unique,
        "per_rollout_over_unique": per_rollout / unique,
    }
    for size in PASSES:
        started = time.perf_counter()
        layouts = [lay_out([sample.input_ids for sample in one]) for one in pack(samples, size)]
        figures[f"layout_ms_{size}"] = (time.perf_counter() - started) * 1e3
        figures[f"rows_over_unique_{size}"] = sum(len(layout.ids) for layout in layouts) / unique
        if group > 1:
            # Groups have nothing in common, so the best of all is the best of each.
            parts = (samples[at : at + group] for at in range(0, len(samples), group))
            figures[f"bound_{size}"] = sum(fewest_rows(part, size) for part in parts) / unique
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    figures = {"apart": measure(1), "grouped": measure(GROUP)}
    for kind, found in figures.items():
        for name, value in found.items():
            print(f"{kind} {name}: {value:,.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
