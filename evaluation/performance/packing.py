"""How many tokens the trainer computes for groups of rollouts that begin alike, and what the layout itself costs.

    python -m evaluation.performance.packing [--json FILE]

16 rollouts of 30 turns in groups of 8 that share the task's prompt of 6,000 tokens; in each group half of the rollouts
share the first ten turns as well, as the branches of a search do. Counted are the tokens if every call were a sample,
if every rollout were, and the rows of the packed layout for several sizes of a pass; unique tokens are those of a
prefix tree over all rollouts. A pass must hold several rollouts for their common beginning to be computed once.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from openhands_rl_plugin.training.batch import pack
from openhands_rl_plugin.training.layout import lay_out
from openhands_rl_plugin.types import Sample

ROLLOUTS, GROUP, TURNS, SHARED_TURNS = 16, 8, 30, 10
PROMPT, OBSERVATION, SAMPLED = 6_000, 700, 300
VOCABULARY = 150_000
PASSES = (65_536, 131_072, 262_144)


def rollouts(seed: int = 0) -> list[Sample]:
    """The same sequences in every run."""
    source = random.Random(seed)

    def some(count: int) -> tuple[int, ...]:
        return tuple(source.choices(range(VOCABULARY), k=count))

    made = []
    turn = OBSERVATION + SAMPLED
    for group in range(ROLLOUTS // GROUP):
        prompt, shared = some(PROMPT), some(SHARED_TURNS * turn)
        for member in range(GROUP):
            begin = prompt + shared if member % 2 else prompt
            ids = begin + some(PROMPT + TURNS * turn - len(begin))
            mask = tuple(at >= PROMPT and (at - PROMPT) % turn < SAMPLED for at in range(len(ids)))
            name = f"{group}-{member}"
            made.append(
                Sample(trajectory_id=name, leaf=0, input_ids=ids, mask=mask, logprobs=tuple(-0.5 * m for m in mask))
            )
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


def measure() -> dict[str, float]:
    """Counts, ratios to the unique tokens, and milliseconds of laying out."""
    samples = rollouts()
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
        layouts = [lay_out([sample.input_ids for sample in group]) for group in pack(samples, size)]
        figures[f"layout_ms_{size}"] = (time.perf_counter() - started) * 1e3
        figures[f"rows_over_unique_{size}"] = sum(len(layout.ids) for layout in layouts) / unique
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    figures = measure()
    for name, value in figures.items():
        print(f"{name}: {value:,.3f}")
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
