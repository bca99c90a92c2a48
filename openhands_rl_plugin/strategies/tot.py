"""Tree of Thoughts with breadth-first search (Yao et al. 2023, arXiv 2305.10601, algorithm 1).

A thought is an action here. Where the world can fork, the tree grows over what the environment really answers; where
it cannot, nobody knows what would follow an action, so that the tree is one level deep, which the report says.
"""

from __future__ import annotations

import asyncio

from pydantic import Field

from openhands_rl_plugin.strategies.base import SearchStrategy
from openhands_rl_plugin.strategies.search import Search, SearchOptions, ended
from openhands_rl_plugin.strategies.value import ValueFunction


class ToTOptions(SearchOptions):
    """``num_branches`` proposals from each state, ``depth`` levels, the best ``beam`` states of each level go on."""

    num_branches: int = Field(default=3, ge=1)
    depth: int = Field(default=2, ge=1)
    beam: int = Field(default=2, ge=1)


class ToTStrategy(SearchStrategy):
    """Proposes, values, keeps a beam; executes the first action on the way to the best leaf."""

    Options = ToTOptions
    name = "ToT"

    def __init__(
        self, options: ToTOptions | None = None, *, value: ValueFunction | None = None, **changes: object
    ) -> None:
        self.options = options or ToTOptions.model_validate(changes)
        super().__init__(self.options, value)

    async def choose(self, search: Search) -> int | None:
        """Grow level by level; a branch that ended stays in the race with what it has earned."""
        beam: list[tuple[int, ...]] = [()]
        reached = 0
        while reached < self._levels(search) and not search.exhausted():
            live = [path for path in beam if not path or not ended(search.tree.nodes[path[-1]])]
            grown = await self._grow(search, live)
            if not grown:
                break
            reached += 1
            finished = [path for path in beam if path and path not in live]
            beam = sorted([*finished, *grown], key=lambda path: -self._worth(search, path))[: self.options.beam]
        search.log.extra["depth"] = reached
        if not beam or not beam[0]:
            return None
        self._back_up(search, beam[0])
        return beam[0][0]

    def _levels(self, search: Search) -> int:
        return self.options.depth if search.world is not None else 1

    async def _grow(self, search: Search, paths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        states = [search.state(path[-1]) if path else search.root for path in paths]
        proposed = await asyncio.gather(*(search.candidates(state, self.options.num_branches) for state in states))
        alive = await asyncio.gather(*(self.evaluate_all(search, actions) for actions in proposed))
        return [(*path, action) for path, actions in zip(paths, alive, strict=True) for action in actions]

    def _worth(self, search: Search, path: tuple[int, ...]) -> float:
        return search.total(path[:-1]) + (search.tree.nodes[path[-1]].value or 0.0)

    def _back_up(self, search: Search, path: tuple[int, ...]) -> None:
        """The best leaf's worth becomes that of the actions that lead to it."""
        for at in range(len(path) - 2, -1, -1):
            node, below = search.tree.nodes[path[at]], search.tree.nodes[path[at + 1]]
            node.value = (node.reward or 0.0) + (below.value or 0.0)
            node.visits += below.visits
