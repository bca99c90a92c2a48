"""The base of all strategies that sample several answers a turn: the budgets' account, and the turn's report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar
from weakref import WeakKeyDictionary

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Failure
from openhands_rl_plugin.rollout.strategies.annotations import note, notes
from openhands_rl_plugin.rollout.strategies.budget import Least, Spending
from openhands_rl_plugin.rollout.strategies.options import SearchOptions
from openhands_rl_plugin.rollout.strategies.search import Search


class BranchingStrategy(ABC):
    """A strategy that samples several answers before it decides.

    Raises ``ConfigError`` for a budget that is too small for ``least``, the fewest calls and steps of one move.
    """

    name: ClassVar[str]
    selects: ClassVar[bool] = True
    """What is acted on was chosen from several samples of the policy, and so is no sample of it."""

    def __init__(self, options: SearchOptions, least: Least) -> None:
        self._options = options
        self._accounts: WeakKeyDictionary[EpisodeTree, Spending] = WeakKeyDictionary()
        for name, budget in (("turn_budget", options.turn_budget), ("episode_budget", options.episode_budget)):
            for what, needed in least._asdict().items():
                bound = getattr(budget, what)
                if bound is not None and bound < needed:
                    raise ConfigError(
                        f"{name}.{what}: {bound} is too small for one move of {self.name}, which takes {needed}: "
                        "raise it, or use fewer branches"
                    )

    @property
    def forks(self) -> int:
        """The forks that a search holds at a time; 0 where it can do without."""
        return 0

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Search below ``tree.head`` and return the action to commit.

        Raises ``CaughtFailure`` when every branch died.
        """
        async with Search(tree, engine, world, self._options, self._account(tree)) as search:
            chosen = await self._choose(search) if not search.exhausted() else None
            if chosen is None:
                chosen = await self._without_search(search)
        report = {"strategy": self.name, "turn": search.turn.report(), "episode": search.episode.report()}
        note(tree.nodes[chosen])["report"] = {**report, **search.log.report()}
        return chosen

    @abstractmethod
    async def choose(self, search: Search) -> int | None:
        """The best action that was found, ``None`` when the budget did not allow to evaluate any."""

    def favourite(self, search: Search) -> int | None:
        """The best of the actions that are known from earlier turns, without spending anything."""
        nodes = search.tree.nodes
        known = search.actions(search.root)
        return max(known, key=lambda at: (nodes[at].visits, nodes[at].value or 0.0), default=None)

    def _account(self, tree: EpisodeTree) -> Spending:
        """The episode's, which continues from what the last turn reported where the episode is resumed."""
        if tree not in self._accounts:
            reports = [notes(tree.nodes[at]).get("report") for at in tree.path()]
            last = next((each["episode"] for each in reversed(reports) if isinstance(each, dict)), {})
            self._accounts[tree] = Spending.resumed(self._options.episode_budget, last)
        return self._accounts[tree]

    async def _choose(self, search: Search) -> int | None:
        return await self.choose(search)

    async def _without_search(self, search: Search) -> int:
        """What is known already, or one plain completion."""
        known = self.favourite(search)
        if known is not None:
            return known
        # The model refused the prompt behind an action, but the environment is alive: the episode can continue.
        if search.log.dropped and not search.log.refused:
            raise CaughtFailure(_all_dead(search))
        return await search.plain()


def _all_dead(search: Search) -> Failure:
    last = search.log.last_failure
    assert last is not None
    message = f"all {search.log.dropped} branches of the search died; the last: {last.message}"
    return Failure(kind=last.kind, message=message[:500], boundary="search")
