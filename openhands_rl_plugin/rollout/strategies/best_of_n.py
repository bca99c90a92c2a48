"""Best-of-n: sample several actions, execute the one with the highest value."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from openhands_rl_plugin.rollout.strategies.base import SearchStrategy
from openhands_rl_plugin.rollout.strategies.options import Least, SearchOptions, notes, times_merged
from openhands_rl_plugin.rollout.strategies.search import Search, call_seed, episode_seed


class BestOfNOptions(SearchOptions):
    """``n`` actions are sampled each turn, and the best is executed. With ``act = "sampled"`` one of them is, as the
    policy would act: so that what is trained on (``tree = "proposals"``) are the states that the policy comes to, and
    also shows what helps after a mistake.
    """

    n: int = Field(default=4, ge=1)
    act: Literal["best", "sampled"] = "best"


class BestOfNStrategy(SearchStrategy[BestOfNOptions]):
    """Judges every candidate once: after its step in a fork where the world can fork, else as it was said."""

    Options = BestOfNOptions
    name = "BestOfN"

    def least_of_a_move(self, judgement: Least) -> Least:
        """Every sample, its step and its judgement."""
        return judgement.after(Least(1, 1)).times(self.options.n)

    async def choose(self, search: Search) -> int | None:
        """Sample, evaluate side by side, take the best, or any."""
        candidates = await search.candidates(search.root, self.options.n)
        source = self._source(search)
        ranked = await self.evaluate_all(search, candidates)
        if not ranked:
            return None
        return _drawn(search, ranked, source) if self.options.act == "sampled" else ranked[0]

    def _source(self, search: Search) -> random.Random:
        """Repeatable where the calls are: by the search's seed or the episode's."""
        seed = self.options.seed
        if seed is None and episode_seed(search.engine) is not None:
            seed = 0  # the episode's is added
        return random.Random(None if seed is None else call_seed(seed, search.engine, search.tree, search.root, 0))


def _drawn(search: Search, candidates: Sequence[int], source: random.Random) -> int:
    """One of them, each as likely as it was sampled often."""
    nodes = search.tree.nodes
    times = [1 + times_merged(notes(nodes[at])) for at in candidates]
    return source.choices(candidates, times)[0]
