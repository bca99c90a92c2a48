"""Overhead of search when the model answers at once: ``python -m evaluation.performance.search.overhead``.

Prints milliseconds a simulation (selection, fork, step, back-propagation; value ``none``) for a world in memory and for
the embedded webshop behind HTTP, and milliseconds a fork of the latter. Medians of repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Awaitable, Callable

from evaluation.performance.search.planning import PlanningEnvironment, PlanningOptions
from openhands_rl_plugin.contrib.webshop import WebShop, running_webshop
from openhands_rl_plugin.core.protocols import Environment, Forkable
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Task
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, WebEnvClient
from openhands_rl_plugin.rollout.strategies.mcts import MCTSOptions, MCTSStrategy
from openhands_rl_plugin.testing import ScriptedEngine

BOUND_MS = 1.0
GOAL = 3


async def per_simulation(environment: Environment, task: Task, words: list[str], simulations: int) -> float:
    """Milliseconds a simulation of one decision with so many."""
    assert isinstance(environment, Forkable)
    turns = itertools.cycle(words)
    tree = EpisodeTree()
    tree.observe(await environment.reset(task))
    options = MCTSOptions(
        num_simulations=simulations,
        value="none",
        first_branches=4,
        num_branches=4,
        widening=0.0,
        exploration_weight=0.3,
    )
    engine = ScriptedEngine(lambda messages: next(turns))
    started = time.perf_counter()
    await MCTSStrategy(options).decide(tree, engine, environment)
    elapsed = time.perf_counter() - started
    await environment.close()
    return 1000 * elapsed / simulations


async def per_fork(url: str, forks: int) -> float:
    """Milliseconds a fork of a shop's episode."""
    client = WebEnvClient(HttpEnvironmentOptions(base_url=url, react_format=False))
    await client.reset(Task(id="shop", environment="webshop", data={"idx": GOAL}))
    started = time.perf_counter()
    twins = [await client.fork() for _ in range(forks)]
    elapsed = time.perf_counter() - started
    for twin in twins:
        await twin.close()
    await client.close()
    return 1000 * elapsed / forks


async def medians(url: str, repeats: int, simulations: int) -> dict[str, float]:
    """Every measurement, interleaved, as the median of ``repeats``."""
    plan = Task(id="plan", environment="planning")
    shop = Task(id="shop", environment="webshop", data={"idx": GOAL})
    pages = ["search[soft cotton socks]", "click[Next >]", "click[Back to Search]", "search[red lamp]"]
    options = HttpEnvironmentOptions(base_url=url, react_format=False)

    def planning() -> Awaitable[float]:
        world = PlanningEnvironment(PlanningOptions(depth=8, branching=4))
        return per_simulation(world, plan, ["0", "1", "2", "3"], simulations)

    measures: dict[str, Callable[[], Awaitable[float]]] = {
        "simulation, world in memory": planning,
        "simulation, webshop over HTTP": lambda: per_simulation(WebEnvClient(options), shop, pages, simulations),
        "fork of a webshop episode": lambda: per_fork(url, simulations),
    }
    taken: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name, measure in measures.items():
            taken[name].append(await measure())
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--simulations", type=int, default=200)
    args = parser.parse_args()
    with running_webshop(WebShop()) as url:
        figures = asyncio.run(medians(url, args.repeats, args.simulations))
    for name, value in figures.items():
        bound = f"(bound {BOUND_MS:g})" if name == "simulation, world in memory" else ""
        print(f"{name:<34}{value:8.3f} ms {bound}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
