"""Tree of Thoughts with breadth-first search (Yao et al. 2023, arXiv 2305.10601, algorithm 1).

A thought is an action here. Where the world can fork, the tree grows over real observations; where it
cannot, observations are unknown, so the tree is one level deep, which the report says.
"""

from __future__ import annotations

from pydantic import Field

from openhands_rl_plugin.rollout.strategies.base import SearchStrategy, count_return
from openhands_rl_plugin.rollout.strategies.options import Least, SearchOptions, ended
from openhands_rl_plugin.rollout.strategies.search import Search, together


class ToTOptions(SearchOptions):
    """``num_branches`` proposals from each state, ``depth`` levels, or as many as the episode has turns left; the best
    ``beam`` states of each level are expanded.
    """

    num_branches: int = Field(default=3, ge=1)
    depth: int = Field(default=2, ge=1)
    beam: int = Field(default=2, ge=1)


class ToTStrategy(SearchStrategy[ToTOptions]):
    """Proposes, values, keeps a beam; executes the first action on the way to the best leaf."""

    Options = ToTOptions
    name = "ToT"

    def least_of_a_move(self, judgement: Least) -> Least:
        """Every proposal of the first level, its step and its judgement."""
        return judgement.after(Least(1, 1)).times(self.options.num_branches)

    async def choose(self, search: Search) -> int | None:
        """Grow level by level; a branch that ended, or that the budget did not allow to expand, remains a candidate
        with its current value."""
        beam: list[tuple[int, ...]] = [()]
        reached = 0
        while reached < self._levels(search) and not search.exhausted():
            live = [path for path in beam if self._goes_on(search, path)]
            grown = await self._grow(search, live)
            if not any(path not in beam for path in grown):
                break
            reached += 1
            finished = [path for path in beam if path and path not in live]
            beam = sorted([*finished, *grown], key=lambda path: -self._worth(search, path))[: self.options.beam]
        search.log.extra["depth"] = reached
        best = next((path for path in beam if path and len(search.alive(path)) == len(path)), None)
        if best is None:
            return None
        self._back_up(search, best)
        return best[0]

    def _goes_on(self, search: Search, path: tuple[int, ...]) -> bool:
        return not path or (not ended(search.tree.nodes[path[-1]]) and search.goes_on(search.state(path[-1])))

    def _levels(self, search: Search) -> int:
        return self.options.depth if search.world is not None else 1

    async def _grow(self, search: Search, paths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        states = [search.state(path[-1]) if path else search.root for path in paths]
        proposed = await together(search.candidates(state, self.options.num_branches) for state in states)
        judged = await together(self.evaluate_all(search, actions) for actions in proposed)
        grown: list[tuple[int, ...]] = []
        for path, actions, known in zip(paths, proposed, judged, strict=True):
            grown += [(*path, action) for action in known]
            if path and not known and (not actions or search.alive(actions)):
                grown.append(path)
        return grown

    def _worth(self, search: Search, path: tuple[int, ...]) -> float:
        return search.total(path[:-1]) + (search.tree.nodes[path[-1]].value or 0.0)

    def _back_up(self, search: Search, path: tuple[int, ...]) -> None:
        """The best leaf's worth is a return that was seen from the actions on that lead to it."""
        nodes = [search.tree.nodes[at] for at in path]
        worth = nodes[-1].value or 0.0
        for node in reversed(nodes[:-1]):
            worth += node.reward or 0.0
            count_return(node, worth)
