"""The base of the search strategies: what the actions that were sampled are worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.tree import DraftNode, EpisodeTree
from openhands_rl_plugin.rollout.strategies.branching import BranchingStrategy
from openhands_rl_plugin.rollout.strategies.budget import Least
from openhands_rl_plugin.rollout.strategies.forks import pays_rewards
from openhands_rl_plugin.rollout.strategies.options import SearchOptions
from openhands_rl_plugin.rollout.strategies.search import Search
from openhands_rl_plugin.rollout.strategies.together import together
from openhands_rl_plugin.rollout.strategies.value import (
    NoValue,
    RolloutValue,
    ValueFunction,
    built_in,
    least_of,
    value_after,
)

_LOG = redacting_logger(__name__)


class SearchStrategy(BranchingStrategy):
    """A strategy that evaluates several actions before it decides. ``value`` estimates a state's return.

    If the environment refuses a fork, a strategy and a value that need none do without for that turn.

    Raises ``ConfigError`` for a budget that is too small for one move.
    """

    Parts: ClassVar = {"value": "values"}
    needs_forks: ClassVar[bool] = False

    def __init__(self, options: SearchOptions, value: ValueFunction | str | None) -> None:
        given = None if isinstance(value, str) else value
        self._value: ValueFunction = given or built_in(options.value, options.value_options)
        self._told = False
        super().__init__(options, self.least_of_a_move(least_of(self._value)))

    def least_of_a_move(self, judgement: Least) -> Least:
        """The fewest calls and steps of one turn's search, including those of each judgement."""
        return judgement.after(Least(1, 1))

    @property
    def forks(self) -> int:
        """The forks that a search holds at a time; 0 where it can do without."""
        return self._options.open_worlds if self._needs_forks() else 0

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """As in ``BranchingStrategy``; raises ``ConfigError`` when the search needs forks and there are none."""
        self.check_world(world)
        return await super().decide(tree, engine, world)

    def check_world(self, world: Forkable | None) -> None:
        """Raise ``ConfigError`` when the strategy cannot do without what is missing."""
        if world is None and self._value.needs_world:
            raise ConfigError(
                f"{self.name} with value = {self._value.name!r} needs an environment that can fork, and this one "
                'cannot: use value = "model", or an environment with fork()'
            )
        if world is None and isinstance(self._value, NoValue):
            raise ConfigError(
                f"{self.name} with value = 'none' compares the rewards of steps in forks, and this environment cannot "
                'fork: set value = "model" or "verifier", or act without a search (StandardReAct)'
            )
        if not pays_rewards(world) and isinstance(self._value, NoValue | RolloutValue):
            raise ConfigError(
                f"{self.name} with value = {self._value.name!r} adds up the rewards of steps, "
                'and a workspace pays none: set value = "model", "verifier" or "reward" in [rl.strategy]'
            )

    async def evaluate(self, search: Search, action: int) -> None:
        """The return from ``action`` on: its step in a fork, where the world can fork, and the value of what follows.

        It joins the mean on the node, unless the branch died or nothing can be said about it.
        """
        node = search.tree.nodes[action]
        reward, state = 0.0, action
        if search.world is not None:
            if not await search.simulate(action):
                return
            reward, state = node.reward or 0.0, search.state(action)
        estimate = await value_after(self._value, search, action, state)
        if estimate is None:
            search.log.unjudged += 1
        else:
            count_return(node, reward + search.total(estimate.path) + estimate.value)

    async def evaluate_all(self, search: Search, actions: Sequence[int]) -> list[int]:
        """Evaluate side by side; the actions that survived and that something is known about, best first."""
        await together(self.evaluate(search, action) for action in actions)
        known = [at for at in search.alive(actions) if search.tree.nodes[at].value is not None]
        return sorted(known, key=lambda at: -(search.tree.nodes[at].value or 0.0))

    async def _choose(self, search: Search) -> int | None:
        if search.world is not None and not self._needs_forks():
            refused = await search.without_forks()
            if refused is not None and not self._told:
                self._told = True
                _LOG.warning("%s judges without forks, as the environment refuses them now: %s", self.name, refused)
        return await self.choose(search)

    def _needs_forks(self) -> bool:
        return self.needs_forks or self._value.needs_world or isinstance(self._value, NoValue)


def count_return(node: DraftNode, value: float) -> None:
    """Add an observed return of an action to its mean."""
    node.visits += 1
    node.value = value if node.value is None else node.value + (value - node.value) / node.visits
