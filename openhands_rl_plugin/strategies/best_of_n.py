"""Best-of-n: sample several actions, execute the one that is worth most."""

from __future__ import annotations

from pydantic import Field

from openhands_rl_plugin.strategies.base import SearchStrategy
from openhands_rl_plugin.strategies.options import SearchOptions
from openhands_rl_plugin.strategies.search import Search
from openhands_rl_plugin.strategies.value import ValueFunction


class BestOfNOptions(SearchOptions):
    """``n`` actions are sampled each turn."""

    n: int = Field(default=4, ge=1)


class BestOfNStrategy(SearchStrategy):
    """Judges every candidate once: after its step in a fork where the world can fork, else as it was said."""

    Options = BestOfNOptions
    name = "BestOfN"

    def __init__(
        self, options: BestOfNOptions | None = None, *, value: ValueFunction | None = None, **changes: object
    ) -> None:
        self.options = options or BestOfNOptions.model_validate(changes)
        super().__init__(self.options, value)

    def calls_of_a_move(self, *, asks: bool) -> int:
        """Every sample, and its judgement."""
        return self.options.n * (1 + asks)

    async def choose(self, search: Search) -> int | None:
        """Sample, evaluate side by side, take the best."""
        candidates = await search.candidates(search.root, self.options.n)
        ranked = await self.evaluate_all(search, candidates)
        return ranked[0] if ranked else None
