"""The scripted oracle as a strategy. Its episodes run through the same code as a policy's and are demonstrations."""

from __future__ import annotations

import functools

from openhands_rl_plugin.contrib.webshop.engine import WebShop
from openhands_rl_plugin.contrib.webshop.oracle import oracle_actions
from openhands_rl_plugin.core.errors import BadEnvironmentError
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Completion, Frozen, Message, PolicyRef

ORACLE = PolicyRef(base_model="webshop-oracle")


class DemonstratorOptions(Frozen):
    """The options that the server was started with; the oracle rebuilds that world to compute its scripts."""

    products: int = 1000
    goals: int = 1500
    seed: int = 0
    results_per_page: int = 10
    separator: str = " [SEP] "


class WebShopDemonstrator:
    """Answers turn n with the n-th action of the oracle's script; the engine is never called."""

    Options = DemonstratorOptions

    def __init__(self, options: DemonstratorOptions | None = None) -> None:
        self.options = options or DemonstratorOptions()

    @functools.cached_property
    def _world(self) -> WebShop:
        chosen = self.options
        return WebShop(
            num_products=chosen.products,
            num_goals=chosen.goals,
            seed=chosen.seed,
            results_per_page=chosen.results_per_page,
            separator=chosen.separator,
        )

    @functools.cached_property
    def _goals(self) -> dict[str, int]:
        return {goal.instruction: goal.index for goal in self._world.goals}

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Propose the next scripted action. Raises ``BadEnvironmentError`` when the goal is not one of this world."""
        script = oracle_actions(self._world, self._goal(tree))
        if tree.turns >= len(script):
            raise BadEnvironmentError("the oracle's script is over but the episode is not: is it the same world?")
        message = Message(role="assistant", content=script[tree.turns])
        return tree.propose(Completion(message=message, finish_reason="stop", policy=ORACLE))

    def _goal(self, tree: EpisodeTree) -> int:
        for message in tree.messages():
            for part in (message.content or "").split(self.options.separator) if message.role == "user" else ():
                if part in self._goals:
                    return self._goals[part]
        raise BadEnvironmentError(
            "no goal of the oracle's world is on the page: start the server with the same options"
        )
