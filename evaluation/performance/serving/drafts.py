"""What guessing tokens ahead earns: ``python -m evaluation.performance.serving.drafts RUN --model PATH``.

The turns of a run of ``openhands-rl demo`` (their prompts, as they were recorded, several tasks beside each other) are
answered again by its latest adapter, with ``draft_tokens`` 0 and 8, in turns on the same machine.
Prints tokens sampled a second of both, their ratio, the share of guesses that were right, and the share of answers that
are the same token for token (with equal seeds; the others differ by rounding). Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from openhands_rl_plugin.apps.demo_model import default_model_directory
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Trajectory
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.config import GeneratorConfig
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sampling import DecodingParams
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

ADAPTER = "latest"
DRAFTS = 8


def prompts_of(trajectory: Trajectory) -> Iterator[tuple[int, ...]]:
    """The prompt of each answer of an episode that was acted on."""
    seen: tuple[int, ...] = ()
    for at in trajectory.path():
        node = trajectory.nodes[at]
        if not node.sampled or node.tokens is None:
            continue
        seen = (*(seen if node.tokens.extends else ()), *node.tokens.prompt_ids)
        yield seen
        seen = (*seen, *node.tokens.sampled_ids)


async def recorded(run: Path, count: int) -> list[tuple[int, ...]]:
    """``count`` prompts of the episodes that a run stored last, turn by turn."""
    async with FileTrajectoryStorage(run / "trajectories") as storage:
        episodes = [list(prompts_of(each)) async for each, _ in storage.find(TrajectoryFilter())]
    turns = [prompt for episode in episodes[-count:] for prompt in episode]
    return turns[:count]


def answered(
    generator: Generator, prompts: Sequence[tuple[int, ...]], params: DecodingParams, first: int
) -> tuple[list[tuple[int, ...]], float]:
    """The answers, all prompts at once, and the seconds that they took."""
    started = time.perf_counter()
    handles = [
        generator.submit(prompt, params.with_seed(first + at), adapter=ADAPTER) for at, prompt in enumerate(prompts)
    ]
    answers = [handle.future.result().token_ids for handle in handles]
    return answers, time.perf_counter() - started


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished demo")
    parser.add_argument("--model", type=Path, default=default_model_directory(), help="its model")
    parser.add_argument("--batch", type=int, default=20, help="sequences at once (default: 20)")
    parser.add_argument("--rounds", type=int, default=1, help="prompts that are timed, of `batch` each (default: 1)")
    parser.add_argument("--repeats", type=int, default=3, help="how often both are timed, in turns (default: 3)")
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    prompts = asyncio.run(recorded(options.run, options.batch * (options.rounds + 1)))
    if len(prompts) <= options.batch:
        parser.error(f"{options.run} has {len(prompts)} turns with token ids; set --batch to less")
    store = AdapterStore(options.run / "adapters")
    path = next(iter(sorted(store.root.glob("*-v*"))[-1:]), None)
    if path is None:
        parser.error(f"there is no adapter in {store.root}")
    params = DecodingParams(max_tokens=options.max_tokens)
    first, rest = prompts[: options.batch], prompts[options.batch :]
    rates: dict[int, list[float]] = {0: [], DRAFTS: []}
    found: dict[int, list[tuple[int, ...]]] = {}
    drafted = accepted = 0
    for turn in range(options.repeats):
        for drafts in sorted(rates, reverse=bool(turn % 2)):
            config = GeneratorConfig(model=str(options.model), max_batch=options.batch, draft_tokens=drafts)
            # One at a time: two generators in a process slow each other down even while they rest.
            with Generator(config) as generator:
                generator.load_adapter(ADAPTER, path)
                answered(generator, first, params, 0)  # fills the cache, and shows the forms
                found[drafts], seconds = answered(generator, rest, params, options.batch)
                rates[drafts].append(sum(map(len, found[drafts])) / seconds)
                drafted, accepted = drafted + generator.guesses[0], accepted + generator.guesses[1]
    same = [one == other for one, other in zip(found[0], found[DRAFTS], strict=True)]
    ratio = statistics.median(after / before for before, after in zip(rates[0], rates[DRAFTS], strict=True))
    figures = {
        "tokens a second without drafts": statistics.median(rates[0]),
        "tokens a second with drafts": statistics.median(rates[DRAFTS]),
        "ratio": ratio,
        "guesses that were right": accepted / max(drafted, 1),
        "answers that are the same": statistics.mean(same),
    }
    table = Table(
        "figure",
        "value",
        title=f"{options.run.name}: {len(same)} answers, {options.batch} at once, {options.repeats} times",
    )
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}")
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
