"""The scripted oracle as a strategy: it plays through the same path as a policy, so its episodes are demonstrations."""

from __future__ import annotations

import functools

from openhands_rl_plugin.errors import BadEnvironmentError
from openhands_rl_plugin.protocols import Forkable, LLMEngine
from openhands_rl_plugin.tree import EpisodeTree
from openhands_rl_plugin.types import Completion, Frozen, Message, PolicyRef

from .engine import WebShop
from .oracle import oracle_actions

ORACLE = PolicyRef(base_model="webshop-oracle")


class DemonstratorOptions(Frozen):
    """The world that the server was started with; the oracle rebuilds it to know where a script leads."""

    products: int = 1000
    seed: int = 0
    results_per_page: int = 10


@functools.lru_cache(maxsize=4)
def _world(options: DemonstratorOptions) -> WebShop:
    return WebShop(num_products=options.products, seed=options.seed, results_per_page=options.results_per_page)


@functools.lru_cache(maxsize=4)
def _goal_of_instruction(options: DemonstratorOptions) -> dict[str, int]:
    return {goal.instruction: goal.index for goal in _world(options).goals}


class WebShopDemonstrator:
    """Answers turn n with the n-th action of the oracle's script; the engine is never asked."""

    Options = DemonstratorOptions

    def __init__(self, options: DemonstratorOptions | None = None) -> None:
        self.options = options or DemonstratorOptions()

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Propose the next scripted action. Raises ``BadEnvironmentError`` when the goal is not one of this world."""
        script = oracle_actions(_world(self.options), self._goal(tree))
        if tree.turns >= len(script):
            raise BadEnvironmentError("the oracle's script is over but the episode goes on: is it the same world?")
        message = Message(role="assistant", content=script[tree.turns])
        return tree.propose(Completion(message=message, finish_reason="stop", policy=ORACLE))

    def _goal(self, tree: EpisodeTree) -> int:
        separator = _world(self.options).separator
        goals = _goal_of_instruction(self.options)
        for message in tree.messages():
            for part in (message.content or "").split(separator) if message.role == "user" else ():
                if part in goals:
                    return goals[part]
        raise BadEnvironmentError(
            "no goal of the oracle's world is on the page: start the server with the same options"
        )
