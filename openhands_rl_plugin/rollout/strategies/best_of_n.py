"""Best-of-n: sample several actions, execute the one with the highest value."""

from __future__ import annotations

from pydantic import Field

from openhands_rl_plugin.rollout.strategies.base import SearchStrategy
from openhands_rl_plugin.rollout.strategies.budget import Least
from openhands_rl_plugin.rollout.strategies.options import SearchOptions, options_of
from openhands_rl_plugin.rollout.strategies.search import Search
from openhands_rl_plugin.rollout.strategies.value import ValueFunction


class BestOfNOptions(SearchOptions):
    """``n`` actions are sampled each turn."""

    n: int = Field(default=4, ge=1)


class BestOfNStrategy(SearchStrategy):
    """Judges every candidate once: after its step in a fork where the world can fork, else as it was said."""

    Options = BestOfNOptions
    name = "BestOfN"

    def __init__(
        self, options: BestOfNOptions | None = None, *, value: ValueFunction | str | None = None, **changes: object
    ) -> None:
        self.options = options_of(BestOfNOptions, options, changes, value)
        super().__init__(self.options, value)

    def least_of_a_move(self, judgement: Least) -> Least:
        """Every sample, its step and its judgement."""
        return judgement.after(Least(1, 1)).times(self.options.n)

    async def choose(self, search: Search) -> int | None:
        """Sample, evaluate side by side, take the best."""
        candidates = await search.candidates(search.root, self.options.n)
        ranked = await self.evaluate_all(search, candidates)
        return ranked[0] if ranked else None
