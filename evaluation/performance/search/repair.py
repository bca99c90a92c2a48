"""Repairs against tokens spent, with and without search: ``python -m evaluation.performance.search.repair``.

Runs ``openhands-rl evaluate`` on held-out repair tasks with the adapter of an ``openhands-rl demo --task repair``. It
compares ReAct with searches whose value function runs the tests in a fork for each candidate. No run has a token limit.
A task counts for a budget if it was resolved with at most that many tokens. Tokens are counted in two ways: prompt and
sampled, as a server without a cache bills them, and sampled alone, the cost with a prefix cache. Writes tables,
``search_repair.json`` and ``repair.svg`` into ``--out``; a stopped run resumes.

    python -m evaluation.performance.search.repair --run-dir runs/repair --tasks 100 --out runs/search-repair
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from evaluation.performance.search.svg import Point, Series, line_chart, svg_file
from openhands_rl_plugin.apps.demo_model import NAME, ensure_model
from openhands_rl_plugin.apps.serving import running_command
from openhands_rl_plugin.contrib.demo.runs import REPAIR_ADAPTER, RepairOptions
from openhands_rl_plugin.contrib.repair.rows import TESTS_AS_VALUE
from openhands_rl_plugin.core.statistics import paired_difference, wilson
from openhands_rl_plugin.core.types import Adapter, Frozen, JsonObject
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore

BUDGETS = {"billed": (1_000, 2_000, 4_000, 8_000, 16_000, 32_000), "sampled": (75, 150, 300, 600, 1_200, 2_400)}
CONTEXT = 3072  # of six turns and more
COLOURS = {"ReAct": "#666666", "BestOfN": "#1f77b4", "MCTS": "#2ca02c"}


class Row(Frozen):
    """One task: whether it was resolved, and the tokens spent on it. ``billed``: prompt and sampled."""

    task: str
    resolved: bool
    billed: int
    sampled: int

    def spent(self, kind: str) -> int:
        """Tokens of one of the kinds of ``BUDGETS``."""
        return self.billed if kind == "billed" else self.sampled


class Result(Frozen):
    """A strategy's episodes. ``failed``: how many ended by an infrastructure error, not by the agent."""

    strategy: str
    rows: tuple[Row, ...]
    failed: int

    def within(self, kind: str, budget: int) -> dict[str, float]:
        """Task -> 1 if it was resolved with no more tokens of that kind than ``budget``."""
        return {row.task: float(row.resolved and row.spent(kind) <= budget) for row in self.rows}


def options_of(strategy: str) -> JsonObject:
    """The options of a strategy."""
    match strategy:
        case "BestOfN":
            return {**TESTS_AS_VALUE, "n": 4, "temperature": 1.0}
        case "MCTS":
            return {**TESTS_AS_VALUE, "num_simulations": 8, "num_branches": 4, "temperature": 1.0}
    return {}


def evaluate(strategy: str, adapter: Adapter, url: str, args: argparse.Namespace) -> Result:
    """Run all tasks with one strategy by the command line. Exits if no episode is valid."""
    sizes = RepairOptions(run_directory=args.run_dir)
    config = args.out / "config.toml"
    config.write_text(
        f'[llm.eval]\nmodel = "openai/{adapter.name}"\nbase_url = "{url}/v1"\napi_key = "none"\n'
        f"temperature = 1.0\nnative_tool_calling = false\nmax_output_tokens = {sizes.answer_tokens}\n"
        f"[rl]\nmax_response_length = {sizes.answer_tokens}\n"
        f"max_prompt_length = {CONTEXT - sizes.answer_tokens}\n"
        f'[rl.workspace]\nprompt = "compact"\n[rl.serving]\nmodel = "{NAME}"\n'
    )
    words = [sys.executable, "-m", "openhands_rl_plugin", "evaluate", "repair-1", "--config", str(config)]
    words += ["--llm", "eval", "--agent", "RLAgent", "--limit", str(args.tasks)]
    note = f"{strategy}-{adapter.sha256[:8]}"  # versions of other runs have the same names
    words += ["--note", note, "--out", str(args.out), "--set", f"max_turns={args.turns}", f"max_workers={args.workers}"]
    words += [] if strategy == "ReAct" else [f"rollout_strategy={strategy}"]
    words += [f"strategy.{name}={json.dumps(value)}" for name, value in options_of(strategy).items()]
    subprocess.run(words, check=True)
    [output] = args.out.glob(f"repair-1-*/RLAgent/{adapter.name}_maxiter_{args.turns}_N_{note}-run_0/output.jsonl")
    outcomes = [json.loads(line)["test_result"]["outcome"] for line in output.read_text().splitlines()]
    rows = [
        Row(
            task=each["instance_id"],
            resolved=each["kind"] == "resolved",
            billed=each["prompt_tokens"] + each["completion_tokens"],
            sampled=each["completion_tokens"],
        )
        for each in outcomes
        if each["valid"]
    ]
    if not rows:
        raise SystemExit(f"no episode of {strategy} is valid: see {output.parent}")
    return Result(strategy=strategy, rows=tuple(rows), failed=len(outcomes) - len(rows))


def measure(args: argparse.Namespace) -> list[Result]:
    """Evaluate every strategy; ``search_repair.json`` is written after each one."""
    store = AdapterStore(args.run_dir / "adapters")
    adapter = store.get(args.adapter) if args.adapter else store.current(REPAIR_ADAPTER)
    if adapter is None:
        raise SystemExit(f"{args.run_dir} has no adapter: give a run of openhands-rl demo --task repair")
    serve = ["serve", "--model", str(ensure_model(args.model)), "--served-model-name", NAME]
    serve += [f"--max-batch={4 * args.workers}", f"--max-model-len={CONTEXT}", f"--adapters={store.root}"]
    results: list[Result] = []
    with running_command(serve, args.out / "serve.log") as url:
        asyncio.run(AdapterPublisher(f"{url}/v1", store).publish(adapter))
        for strategy in args.strategies:
            results.append(evaluate(strategy, adapter, url, args))
            found = {"adapter": adapter.name, "results": [each.model_dump() for each in results]}
            (args.out / "search_repair.json").write_text(json.dumps(found, indent=1))
    return results


def table(results: Sequence[Result], kind: str) -> Table:
    """The share of tasks resolved within each budget, and what was spent."""
    budgets = BUDGETS[kind]
    shown = Table(f"{kind} tokens", *(f"{budget:,}" for budget in budgets), "95 %", "spent", "episodes", "failed")
    for each in results:
        within = [sum(each.within(kind, budget).values()) for budget in budgets]
        last = wilson(int(within[-1]), len(each.rows))
        shown.add_row(
            each.strategy,
            *(f"{solved / len(each.rows):.2f}" for solved in within),
            f"{last.low:.2f}-{last.high:.2f}",
            f"{sum(row.spent(kind) for row in each.rows) / len(each.rows):,.0f}",
            str(len(each.rows)),
            str(each.failed),
        )
    return shown


def differences(results: Sequence[Result], kind: str) -> Iterator[str]:
    """Paired difference of each search and ReAct at the same budget, a line each."""
    plain = next((each for each in results if each.strategy == "ReAct"), None)
    for each in results:
        for budget in BUDGETS[kind] if plain is not None and each is not plain else ():
            assert plain is not None
            one, other = plain.within(kind, budget), each.within(kind, budget)
            tasks = sorted(one.keys() & other.keys())
            found = paired_difference([one[task] for task in tasks], [other[task] for task in tasks])
            yield (
                f"{budget:,} {kind} tokens: {each.strategy} - ReAct: {found.mean:+.2f} [{found.low:+.2f}, "
                f"{found.high:+.2f}] (paired bootstrap over {found.n} tasks)"
            )


def chart(results: Sequence[Result], kind: str) -> str:
    """The share resolved against the budget."""
    series = []
    for each in results:
        points = []
        for slot, budget in enumerate(BUDGETS[kind]):
            share = wilson(int(sum(each.within(kind, budget).values())), len(each.rows))
            points += [] if share.mean is None else [Point(slot=slot, value=share.mean, low=share.low, high=share.high)]
        series.append(Series(name=each.strategy, colour=COLOURS[each.strategy], points=tuple(points)))
    return line_chart(series, [f"{budget:,}" for budget in BUDGETS[kind]], "resolved")


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, required=True, help="a run of openhands-rl demo --task repair")
    parser.add_argument("--adapter", help="one of its versions (default: the current one)")
    parser.add_argument("--model", type=Path, help="the base model's directory (default: the demo's)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--strategies", nargs="+", choices=list(COLOURS), default=["ReAct", "BestOfN", "MCTS"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = measure(args)
    (args.out / "repair.svg").write_text(svg_file(chart(results, "sampled")))
    console = Console(width=110)  # of the tables, also where the output is a file
    for kind in BUDGETS:
        console.print(table(results, kind))
        for line in differences(results, kind):
            console.print(line, highlight=False)


if __name__ == "__main__":
    main()
