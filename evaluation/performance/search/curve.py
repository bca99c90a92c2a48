"""Success against tokens spent, for acting with and without search: ``python -m evaluation.performance.search.curve``.

Runs held-out goals of the embedded webshop with ReAct, best-of-n, Tree of Thoughts and MCTS. All have the same token
budgets an episode (prompt and sampled, as the server bills them). All have the same value function: the return of a
rollout of the policy in a fork. Give ``--run-dir`` of a finished ``openhands-rl demo`` for its trained adapter. Writes
a table, ``search_curve.json`` and ``curve.svg`` into ``--out``; a stopped run resumes.

    python -m evaluation.performance.search.curve --run-dir runs/demo --goals 100 --seeds 0 1 2 --out runs/curve
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from evaluation.performance.search.svg import Point, Series, line_chart, svg_file
from openhands_rl_plugin.apps.demo_model import NAME, ensure_model
from openhands_rl_plugin.apps.serving import running_command
from openhands_rl_plugin.config import registry
from openhands_rl_plugin.contrib.demo.runs import ADAPTER, ANSWER_TOKENS, CONTEXT_TOKENS, DemoOptions, shop_tasks
from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.statistics import over_tasks, paired_difference, wilson
from openhands_rl_plugin.core.types import (
    Adapter,
    EpisodeRequest,
    Frozen,
    JsonObject,
    Limits,
    SamplingParams,
    StrategySpec,
    Task,
    Trajectory,
)
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, WebEnvClient
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.client import OpenAIEngine, SeededEngine
from openhands_rl_plugin.rollout.episode import SessionRunner
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SUCCESS = 0.999
CACHE_BYTES = 2 * 1024**3  # the trees of all episodes in flight; evicted prompts are computed again by each simulation
COLOURS = {"ReAct": "#666666", "BestOfN": "#1f77b4", "ToT": "#ff7f0e", "MCTS": "#2ca02c"}


class Cell(Frozen):
    """One point of the curve. ``by_goal``: task -> mean success over the seeds."""

    policy: str
    strategy: str
    budget: int
    episodes: int
    failed: int
    successes: int
    success: float
    low: float
    high: float
    reward: float
    tokens: float
    steps: float
    by_goal: dict[str, float]


def options_of(strategy: str, budget: int, seed: int) -> JsonObject:
    """The options of a strategy for a budget of tokens an episode. ReAct spends what it needs."""
    rollout: JsonObject = {"value": "rollout", "value_options": {"depth": 6}, "seed": seed}
    spend: JsonObject = {"episode_budget": {"tokens": budget}}
    match strategy:
        case "BestOfN":
            # As many as the budget is spent on, or the larger ones would not be equal: four spend about 7,000 tokens.
            return {**rollout, **spend, "n": max(4, budget // 1_750)}
        case "ToT":
            return {**rollout, **spend, "num_branches": 3, "depth": 2, "beam": 2}
        case "MCTS":
            search: JsonObject = {"num_simulations": 400, "first_branches": 3, "num_branches": 6, "decide_by": "best"}
            return {**rollout, **spend, **search, "exploration_weight": 0.5}
    return {"sampling": {}}


def make_strategy(strategy: str, budget: int, seed: int) -> Strategy:
    """Build the strategy for a budget of tokens an episode."""
    return registry.build(
        "strategies", "StandardReAct" if strategy == "ReAct" else strategy, options_of(strategy, budget, seed)
    )


async def run_point(
    policy: str, served: str, strategy: str, budget: int, args: argparse.Namespace, urls: tuple[str, str]
) -> Cell:
    """Run all goals and seeds of one point of the curve."""
    shop_url, model_url = urls
    environment = HttpEnvironmentOptions(base_url=shop_url, react_format=False)

    def engine(request: EpisodeRequest) -> SeededEngine:
        # Search gives seeds of its own.
        seed = request.seed if strategy == "ReAct" else None
        sampling = SamplingParams(temperature=1.0, max_tokens=ANSWER_TOKENS)
        return SeededEngine(OpenAIEngine(served, f"{model_url}/v1", base_model=NAME), sampling, seed)

    runner = SessionRunner(
        make_environment=lambda request: WebEnvClient(environment),
        make_strategy=lambda request: make_strategy(strategy, budget, request.seed),
        make_engine=engine,
        strategy_spec=StrategySpec(name=strategy, options=options_of(strategy, budget, 0)),
        base_model=NAME,
        limits=Limits(max_turns=6, max_prompt_length=CONTEXT_TOKENS - ANSWER_TOKENS, max_response_length=ANSWER_TOKENS),
    )
    episodes: list[Trajectory] = []
    storage = FileTrajectoryStorage(args.out / "trajectories")
    try:
        for seed in args.seeds:
            plan = RolloutPlan(
                run_id=f"curve-{policy}-{strategy}-{budget}-{seed}",
                tasks=goals(args.goals),
                served_model=served,
                seed=seed,
                concurrency=args.concurrency,
            )
            with bar(f"{policy} {strategy} {budget} seed {seed}", args.goals) as advance:
                episodes += await roll_out(plan, runner, storage, lambda _: advance())
    finally:
        await storage.close()
    return cell(policy, strategy, budget, episodes)


def goals(count: int) -> tuple[Task, ...]:
    """The demo's held-out goals, in the demo's order."""
    return tuple(entry.task for entry in shop_tasks(DemoOptions(run_directory=Path(), held_out=count)).held_out)


def cell(policy: str, strategy: str, budget: int, episodes: list[Trajectory]) -> Cell:
    """Counts, intervals and means over valid episodes. Failed ones are counted: they may be the harder ones."""
    failed = sum(trajectory.failure is not None for trajectory in episodes)
    episodes = [trajectory for trajectory in episodes if trajectory.failure is None]
    successes = sum(trajectory.episode_return >= SUCCESS for trajectory in episodes)
    tokens = [trajectory.usage.prompt_tokens + trajectory.usage.completion_tokens for trajectory in episodes]
    steps = [sum(node.sampled and node.reward is not None for node in trajectory.nodes) for trajectory in episodes]
    by_goal: dict[str, list[float]] = defaultdict(list)
    for trajectory in episodes:
        by_goal[trajectory.task.id].append(float(trajectory.episode_return >= SUCCESS))
    means = {goal: fmean(values) for goal, values in by_goal.items()}
    # Episodes of one goal are alike: with several seeds it is the goals that are independent.
    interval = wilson(successes, len(episodes)) if len(episodes) == len(means) else over_tasks(list(means.values()))
    return Cell(
        policy=policy,
        strategy=strategy,
        budget=budget,
        episodes=len(episodes),
        failed=failed,
        successes=successes,
        success=float("nan") if interval.mean is None else interval.mean,
        low=interval.low or 0.0,
        high=1.0 if interval.high is None else interval.high,
        reward=sum(trajectory.episode_return for trajectory in episodes) / max(len(episodes), 1),
        tokens=sum(tokens) / max(len(tokens), 1),
        steps=sum(steps) / max(len(steps), 1),
        by_goal=means,
    )


@contextlib.contextmanager
def bar(title: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar with the time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


@contextlib.contextmanager
def servers(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The demo's shop and model server."""
    shop = ["env", "webshop"]
    policy = ["serve", "--model", str(ensure_model(args.model)), "--served-model-name", NAME]
    policy += [f"--max-batch={args.concurrency}", f"--max-model-len={CONTEXT_TOKENS}", f"--cache-bytes={CACHE_BYTES}"]
    policy += [f"--adapters={args.run_dir / 'adapters'}"] if args.run_dir else []
    with (
        running_command(shop, args.out / "webshop.log") as shop_url,
        running_command(policy, args.out / "serve.log") as model_url,
    ):
        yield shop_url, model_url


async def measure(args: argparse.Namespace, urls: tuple[str, str]) -> list[Cell]:
    """Every point, written down as soon as it is there."""
    cells: list[Cell] = []
    for policy, adapter in (await policies(args, urls[1])).items():
        name, weights = (NAME, NAME) if adapter is None else (adapter.name, adapter.sha256)
        for strategy in args.strategies:
            for budget in args.budgets if strategy != "ReAct" else [0]:
                claim(args.out, policy, strategy, budget, weights)
                cells.append(await run_point(policy, name, strategy, budget, args, urls))
                (args.out / "search_curve.json").write_text(json.dumps([each.model_dump() for each in cells], indent=1))
    return cells


def claim(out: Path, policy: str, strategy: str, budget: int, weights: str) -> None:
    """Bind a point's episodes to the weights and options that sampled them. Exits where it has others."""
    noted = out / "points" / f"{policy}-{strategy}-{budget}.json"
    wanted = json.dumps({"weights": weights, "options": options_of(strategy, budget, 0)}, indent=1)
    if not noted.exists():
        noted.parent.mkdir(exist_ok=True)
        noted.write_text(wanted)
    elif noted.read_text() != wanted:
        raise SystemExit(f"{out} holds episodes of {policy} {strategy} {budget} with other options: give another --out")


async def policies(args: argparse.Namespace, model_url: str) -> dict[str, Adapter | None]:
    """Label -> what is served on top of the base model: nothing, and the run's current adapter."""
    served: dict[str, Adapter | None] = {"base": None}
    if args.run_dir is not None:
        store = AdapterStore(args.run_dir / "adapters")
        adapter = store.current(ADAPTER)
        if adapter is None:
            raise SystemExit(f"{args.run_dir} has no adapter: give a finished run of openhands-rl demo")
        await AdapterPublisher(f"{model_url}/v1", store).publish(adapter)
        served["trained"] = adapter
    return {label: adapter for label, adapter in served.items() if label in args.policies}


def table(cells: list[Cell]) -> Table:
    """The points as a table."""
    shown = Table("policy", "strategy", "budget", "success", "95 %", "reward", "tokens", "steps", "episodes", "failed")
    for each in cells:
        shown.add_row(
            each.policy,
            each.strategy,
            str(each.budget or "-"),
            f"{each.success:.2f}",
            f"{each.low:.2f}-{each.high:.2f}",
            f"{each.reward:.2f}",
            f"{each.tokens:,.0f}",
            f"{each.steps:.1f}",
            str(each.episodes),
            str(each.failed),
        )
    return shown


def differences(cells: list[Cell]) -> Iterator[str]:
    """What the searches with a tree earn beyond the others with the same budget, goal by goal."""
    for each in cells:
        if each.strategy not in ("MCTS", "ToT"):
            continue
        for other in cells:
            if (
                other.policy == each.policy
                and other.strategy in ("ReAct", "BestOfN")
                and other.budget in (0, each.budget)
            ):
                goals = sorted(each.by_goal.keys() & other.by_goal.keys())
                found = paired_difference([other.by_goal[g] for g in goals], [each.by_goal[g] for g in goals])
                yield (
                    f"{each.policy}, {each.budget:,} tokens: {each.strategy} - {other.strategy}: {found.mean:+.2f} "
                    f"[{found.low:+.2f}, {found.high:+.2f}] (paired bootstrap over {found.n} goals)"
                )


def chart(cells: list[Cell], budgets: list[int]) -> str:
    """Success against budget as SVG; ReAct, which has no budget, is a level line."""
    series = []
    for policy in dict.fromkeys(each.policy for each in cells):
        for strategy in dict.fromkeys(each.strategy for each in cells):
            mine = [each for each in cells if (each.policy, each.strategy) == (policy, strategy)]
            at = {each.budget: each for each in mine}
            found = [(slot, at.get(budget) or at.get(0)) for slot, budget in enumerate(budgets)]
            points = tuple(
                Point(slot=slot, value=each.success, low=each.low, high=each.high) for slot, each in found if each
            )
            dashed = policy == "base"
            series.append(Series(name=f"{strategy}, {policy}", colour=COLOURS[strategy], points=points, dashed=dashed))
    return line_chart(series, [f"{budget:,}" for budget in budgets], "success")


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, help="a finished run of openhands-rl demo, for its adapter")
    parser.add_argument("--model", type=Path, help="the base model's directory (default: the demo's)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--goals", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--budgets", type=int, nargs="+", default=[8_000, 16_000, 32_000])
    parser.add_argument("--strategies", nargs="+", choices=list(COLOURS), default=list(COLOURS))
    parser.add_argument("--policies", nargs="+", choices=["base", "trained"], default=["base", "trained"])
    parser.add_argument("--concurrency", type=int, default=16)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with servers(args) as urls:
        cells = asyncio.run(measure(args, urls))
    (args.out / "curve.svg").write_text(svg_file(chart(cells, args.budgets)))
    console = Console(width=110)  # of the table, also where the output is a file
    console.print(table(cells))
    for line in differences(cells):
        console.print(line, highlight=False)


if __name__ == "__main__":
    main()
