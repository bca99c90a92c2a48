"""The learning curve of finished runs as a chart: ``python -m evaluation.performance.loops.curves RUN ... --out FILE``.

A solid line is the success on held-out tasks after each kind of learning, with its 95 % interval; a dashed one that of
the episodes that an iteration trains on. Each RUN is the folder of a ``demo`` or ``loop``; the legend has its name.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from evaluation.performance.search.svg import Point, Series, line_chart, svg_file
from openhands_rl_plugin.training.loop.plan import EVALUATIONS, LoopState, StageRecord, success_of

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
NAMES = {"evaluate-base": "base", "evaluate-warm-start": "SFT", "evaluate-final": "RL"}
ITERATION = "iteration-"


def chart(runs: list[Path]) -> str:
    """The chart of the runs; its x axis has the stages of the longest one, in their order."""
    states = {run.name: LoopState.load(run / "state.json") for run in runs}
    count = max((sum(map(_is_iteration, state.records)) for state in states.values()), default=0)
    labels = ["base", "SFT", *(f"RL {at + 1}" for at in range(count)), "RL"]
    series: list[Series] = []
    for (name, state), colour in zip(states.items(), COLOURS, strict=False):
        series.append(Series(name=f"{name}, held out", colour=colour, points=tuple(_held_out(state, labels))))
        trained = tuple(_trained(state, labels.index("SFT") + 1))
        series.append(Series(name=f"{name}, in training", colour=colour, points=trained, dashed=True))
    return svg_file(line_chart(series, labels, "success"))


def _is_iteration(record: StageRecord) -> bool:
    return record.name.startswith(ITERATION)


def _held_out(state: LoopState, labels: list[str]) -> Iterator[Point]:
    for record in state.records:
        if record.name in EVALUATIONS and (success := success_of(record)) and success.mean is not None:
            last = len(labels) - 1
            slot = last if record.name == EVALUATIONS[-1] else labels.index(NAMES[record.name])
            yield Point(slot=slot, value=success.mean, low=success.low, high=success.high)


def _trained(state: LoopState, first: int) -> Iterator[Point]:
    for record in filter(_is_iteration, state.records):
        if (success := record.metrics.get("success")) is not None:
            yield Point(slot=first + int(record.name.removeprefix(ITERATION)), value=success)


def main() -> None:
    """Draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of finished runs, four at most")
    parser.add_argument("--out", type=Path, default=Path("curves.svg"), help="the SVG file")
    args = parser.parse_args()
    args.out.write_text(chart(args.runs), encoding="utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
