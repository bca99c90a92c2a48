"""A loop that plays with a search and reinforces what it proposed; tests/cli/test_loop_command.py imitates the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from shopping_loop import LIMITS, MODEL, ShopWorld, make_plan, write_talker
from small_shop import running_shop

from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.types import StrategySpec
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server
from openhands_rl_plugin.rollout.session import SessionRunner
from openhands_rl_plugin.rollout.strategies.base import BestOfNStrategy
from openhands_rl_plugin.rollout.strategies.search import Search
from openhands_rl_plugin.rollout.strategies.value import ValueEstimate
from openhands_rl_plugin.training.loop.loop import LoopParts, TrainingLoop

LORA = {"batch_size": 4, "num_epochs": 2, "dtype": "float32", "lora_rank": 4, "lora_alpha": 8, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talker(tmp_path_factory.mktemp("talker") / "model")


@pytest.fixture
def world(model: Path) -> Iterator[ShopWorld]:
    """A server a test: each loop leaves the versions that it published last in it, and eight is a server's limit."""
    server = ServerConfig(model=str(model), served_model_name=MODEL, port=0, dtype="float32", max_batch=8, adapters="/")
    with running_shop() as shop, running_server(server) as url:
        yield ShopWorld(shop, url, model)


def searching(world: ShopWorld, parts: LoopParts, make: Callable[[], Strategy], name: str) -> LoopParts:
    """Training tasks are played by a search, held-out ones as before."""
    search = SessionRunner(
        make_environment=world._environment,
        make_strategy=lambda request: make(),
        make_engine=world._engine,
        strategy_spec=StrategySpec(name=name),
        base_model=MODEL,
        limits=LIMITS,
        storage=parts.storage,
    )
    return replace(parts, runner=search, evaluator=parts.runner)


class Likelihood:
    """A value: the logprob of the last answer."""

    name = "likelihood"
    needs_world = False

    async def estimate(self, search: Search, state: int) -> ValueEstimate:
        path = [search.tree.nodes[at] for at in search.tree.path(state)]
        tokens = [node.tokens for node in path if node.sampled][-1]
        assert tokens is not None and tokens.logprobs is not None
        return ValueEstimate(sum(tokens.logprobs))

    async def estimate_end(self, search: Search, state: int) -> ValueEstimate:
        return await self.estimate(search, state)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_of_what_a_search_proposes_it_is_said_in_how_many_states_it_differs(
    world: ShopWorld, tmp_path: Path, kind: str
) -> None:
    parts = world.parts(tmp_path)
    parts = searching(world, parts, lambda: BestOfNStrategy(n=3, value=Likelihood(), act="sampled"), "BestOfN")
    training = {"algorithm": "grpo", "tree": "proposals", "correction": "none", **LORA}
    plan = make_plan(f"proposals-{kind}", training, iterations=1, demonstrations=0, kind=kind)
    state = await TrainingLoop(plan, parts).run()
    iterations = [record.metrics for record in state.records if record.name.startswith("iteration")]
    (each,) = iterations
    assert each["proposals"] == 3 * each["states"] > 0
    assert 0 < each["states_differing"] <= each["states"] and each["steps"] > 0
    await closed(parts)


async def closed(parts: LoopParts) -> None:
    for each in (parts.runner, parts.evaluator, parts.storage):
        assert each is not None
        await each.close()
    await parts.publisher.aclose()
