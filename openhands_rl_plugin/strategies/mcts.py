"""Monte Carlo tree search over actions that the policy proposes, in forks of the environment."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Literal

from pydantic import Field

from openhands_rl_plugin.errors import ConfigError
from openhands_rl_plugin.protocols import Forkable
from openhands_rl_plugin.strategies.base import SearchStrategy
from openhands_rl_plugin.strategies.search import Search, SearchOptions, ended, note, notes
from openhands_rl_plugin.strategies.uct import Arm, best_arm, priors, width
from openhands_rl_plugin.strategies.value import Estimate, ValueFunction, value_of_end
from openhands_rl_plugin.tree import DraftNode


class MCTSOptions(SearchOptions):
    """``num_simulations`` a turn. ``exploration_weight`` is c of UCT and PUCT, for returns of about 0 to 1.

    ``use_priors``: PUCT where the server gave logprobs, else UCT. A state starts with ``first_branches`` actions and
    gets more with its visits, as ``first_branches * visits ** widening``, up to ``num_branches``. ``depth`` bounds the
    actions below the head, ``parallel`` the simulations at a time (they avoid each other by virtual losses).
    ``decide_by``: the most ``visits``, the highest mean ``value``, or the ``best`` return that a simulation reached,
    which suits worlds where the same actions always do the same: what was found once is then played again.
    """

    num_simulations: int = Field(default=50, ge=1)
    exploration_weight: float = Field(default=1.0, ge=0)
    use_priors: bool = True
    first_branches: int = Field(default=2, ge=1)
    num_branches: int = Field(default=8, ge=1)
    widening: float = Field(default=0.5, ge=0, le=1)
    discount: float = Field(default=1.0, gt=0, le=1)
    depth: int = Field(default=20, ge=1)
    parallel: int = Field(default=1, ge=1)
    decide_by: Literal["visits", "value", "best"] = "visits"
    value: str = "rollout"


class MCTSStrategy(SearchStrategy):
    """Selects, expands, evaluates, backs up; executes the most visited action and keeps what is known below it."""

    Options = MCTSOptions
    name = "MCTS"

    def __init__(
        self, options: MCTSOptions | None = None, *, value: ValueFunction | None = None, **changes: object
    ) -> None:
        self.options = options or MCTSOptions.model_validate(changes)
        super().__init__(self.options, value)

    def check_world(self, world: Forkable | None) -> None:
        """MCTS looks ahead, so it always needs forks."""
        if world is None:
            raise ConfigError(
                "MCTS needs an environment that can fork, and this one cannot: use ToT or BestOfN, or an environment "
                "with fork() (the embedded webshop, any repeatable HTTP environment, a workspace)"
            )

    async def choose(self, search: Search) -> int | None:
        """Simulate until the number or a budget is reached."""
        walk = _Walk(search, self.options, self._value)
        done = 0
        while done < self.options.num_simulations and not search.exhausted():
            at_once = min(self.options.parallel, self.options.num_simulations - done)
            fruitful = await asyncio.gather(*(walk.simulate() for _ in range(at_once)))
            done += at_once
            if not any(fruitful):
                break
        search.log.extra["simulations"] = done
        return self.favourite(search)

    def favourite(self, search: Search) -> int | None:
        """The best of the actions that were visited; equals are told apart by their visits."""
        known = [at for at in search.actions(search.root) if search.tree.nodes[at].visits]
        return max(known, key=lambda at: self._merit(search.tree.nodes[at]), default=None)

    def _merit(self, node: DraftNode) -> tuple[float, float, float]:
        value = node.value or 0.0
        match self.options.decide_by:
            case "visits":
                return node.visits, value, 0.0
            case "value":
                return value, node.visits, 0.0
            case "best":
                return best_return(node), node.visits, value


class _Walk:
    """The simulations of one turn."""

    def __init__(self, search: Search, options: MCTSOptions, value: ValueFunction) -> None:
        self._search = search
        self._tree = search.tree
        self._options = options
        self._value = value
        self._under_way: Counter[int] = Counter()
        self._barren: set[int | None] = set()
        self._expanding: dict[int | None, asyncio.Lock] = {}

    async def simulate(self) -> bool:
        """One simulation; false when nothing was learnt, because a branch died or there is nowhere to go."""
        path: list[int] = []
        try:
            estimate = await self._descend(path)
        finally:
            self._under_way.subtract(path)
        if estimate is None:
            # A dropped branch leaves others to try, so that only a dead end is the end.
            return bool(path)
        self._back_up([*path, *estimate.path], estimate.value)
        return True

    async def _descend(self, path: list[int]) -> Estimate | None:
        state = self._search.root
        while True:
            action = await self._select(state)
            if action is None:
                return Estimate(0.0) if path else None
            path.append(action)
            self._under_way[action] += 1
            fresh = not self._search.stepped(action)
            if fresh and not await self._search.simulate(action):
                return None
            state = self._search.state(action)
            if ended(self._tree.nodes[action]):
                return await value_of_end(self._value, self._search, state)
            if fresh or len(path) >= self._options.depth:
                return await self._value.estimate(self._search, state)

    async def _select(self, state: int | None) -> int | None:
        # Simulations that meet at a state expand it one after the other, or each would sample the same again.
        async with self._expanding.setdefault(state, asyncio.Lock()):
            actions = await self._expand(state)
        if not actions:
            return None
        return actions[best_arm(self._arms(actions), self._options.exploration_weight)]

    async def _expand(self, state: int | None) -> list[int]:
        search, options = self._search, self._options
        actions = search.actions(state)
        visits = sum(self._tree.nodes[at].visits + self._under_way[at] for at in actions)
        allowed = width(visits, options.first_branches, options.widening, options.num_branches)
        if len(actions) >= allowed or state in self._barren or search.exhausted():
            return actions
        await search.candidates(state, allowed - len(actions))
        grown = search.actions(state)
        if len(grown) == len(actions):
            self._barren.add(state)
        return grown

    def _arms(self, actions: list[int]) -> list[Arm]:
        nodes = [self._tree.nodes[at] for at in actions]
        logprobs = [mean_logprob(node) for node in nodes] if self._options.use_priors else [None]
        known = [logprob for logprob in logprobs if logprob is not None]
        prior = priors(known) if len(known) == len(nodes) else [None] * len(nodes)
        return [
            self._arm(node, self._under_way[at], preference)
            for at, node, preference in zip(actions, nodes, prior, strict=True)
        ]

    def _arm(self, node: DraftNode, under_way: int, prior: float | None) -> Arm:
        visits = node.visits + under_way
        value = (node.value or 0.0) * node.visits / visits if visits else 0.0
        return Arm(visits, value, prior)

    def _back_up(self, path: list[int], value: float) -> None:
        for at in reversed(path):
            node = self._tree.nodes[at]
            value = (node.reward or 0.0) + self._options.discount * value
            note(node)["best"] = max(value, best_return(node)) if node.visits else value
            node.visits += 1
            node.value = (node.value or 0.0) + (value - (node.value or 0.0)) / node.visits


def best_return(node: DraftNode) -> float:
    """The highest return that a simulation through this action has reached."""
    best = notes(node).get("best", 0.0)
    assert isinstance(best, float)
    return best


def mean_logprob(node: DraftNode) -> float | None:
    """Mean logprob a token of a sampled action, ``None`` where the server gave none."""
    logprobs = node.tokens.logprobs if node.tokens is not None else ()
    return sum(logprobs) / len(logprobs) if logprobs else None
