"""What the searching strategies share: one search a turn, its account, and its report."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

from openhands_rl_plugin.errors import CaughtFailure, ConfigError
from openhands_rl_plugin.protocols import Forkable, LLMEngine
from openhands_rl_plugin.strategies.budget import Spending
from openhands_rl_plugin.strategies.search import Search, SearchOptions, ended, note
from openhands_rl_plugin.strategies.value import Estimate, ValueFunction, built_in, value_of_end
from openhands_rl_plugin.tree import EpisodeTree
from openhands_rl_plugin.types import Failure


class SearchStrategy(ABC):
    """A strategy that looks at several actions before it decides. ``value`` says how good a state is."""

    Parts: ClassVar = {"value": "values"}
    name: ClassVar[str]

    def __init__(self, options: SearchOptions, value: ValueFunction | None) -> None:
        self._options = options
        self._value = value or built_in(options.value, options.value_options)
        self._accounts: WeakKeyDictionary[EpisodeTree, Spending] = WeakKeyDictionary()

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Search below ``tree.head`` and return the action to commit.

        Raises ``ConfigError`` when the search needs a world that can fork and there is none, and ``CaughtFailure`` when
        every branch died.
        """
        self.check_world(world)
        account = self._accounts.setdefault(tree, Spending(self._options.episode_budget))
        async with Search(tree, engine, world, self._options, account) as search:
            chosen = await self.choose(search) if not search.exhausted() else None
            if chosen is None:
                chosen = await self._without_search(search)
        report = {"strategy": self.name, "turn": search.turn.report(), "episode": search.episode.report()}
        counts = {"merged": search.log.merged, "dropped": search.log.dropped, "cut_by": search.log.cut_by}
        note(tree.nodes[chosen])["report"] = {**report, **counts, **search.log.extra}
        return chosen

    @abstractmethod
    async def choose(self, search: Search) -> int | None:
        """The best action that was found, ``None`` when the budget did not allow to look at any."""

    def favourite(self, search: Search) -> int | None:
        """The best of the actions that are known from earlier turns, without spending anything."""
        nodes = search.tree.nodes
        known = search.actions(search.root)
        return max(known, key=lambda at: (nodes[at].visits, nodes[at].value or 0.0), default=None)

    def check_world(self, world: Forkable | None) -> None:
        """Raise ``ConfigError`` when the strategy cannot do without what is missing."""
        if world is None and self._value.needs_world:
            raise ConfigError(
                f"{self.name} with value = {self._value.name!r} needs an environment that can fork, and this one "
                'cannot: use value = "model", or an environment with fork()'
            )

    async def evaluate(self, search: Search, action: int) -> Estimate | None:
        """The return from ``action`` on: its step in a fork, where the world can fork, and the value of what follows.

        The value stands on the node. ``None``: the branch died.
        """
        node = search.tree.nodes[action]
        reward, state = 0.0, action
        if search.world is not None:
            if not search.stepped(action) and not await search.simulate(action):
                return None
            reward, state = node.reward or 0.0, search.state(action)
        if ended(node):
            estimate = await value_of_end(self._value, search, state)
        else:
            estimate = await self._value.estimate(search, state)
        node.visits += 1
        node.value = reward + search.total(estimate.path) + estimate.value
        return estimate._replace(value=node.value)

    async def evaluate_all(self, search: Search, actions: Sequence[int]) -> list[int]:
        """Evaluate side by side; the actions that survived, best first."""
        await asyncio.gather(*(self.evaluate(search, action) for action in actions))
        return sorted(search.alive(actions), key=lambda at: -(search.tree.nodes[at].value or 0.0))

    async def _without_search(self, search: Search) -> int:
        """What is known already, or one plain completion."""
        known = self.favourite(search)
        if known is not None:
            return known
        if search.log.dropped:
            raise CaughtFailure(_all_dead(search))
        return await search.plain()


def _all_dead(search: Search) -> Failure:
    last = search.log.last_failure
    assert last is not None
    message = f"all {search.log.dropped} branches of the search died; the last: {last.message}"
    return Failure(kind=last.kind, message=message[:500], boundary="search")
