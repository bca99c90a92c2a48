"""Monte Carlo tree search over actions that the policy proposes, in forks of the environment."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import Field

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.tree import DraftNode
from openhands_rl_plugin.rollout.strategies.base import SearchStrategy, count_return
from openhands_rl_plugin.rollout.strategies.search import Search, SearchOptions, ended, note, notes, together
from openhands_rl_plugin.rollout.strategies.value import ValueEstimate, ValueFunction, value_after


class Arm(NamedTuple):
    """An action as selection sees it: how often it was taken, its mean return, and the policy's prior for it."""

    visits: int
    value: float
    prior: float | None = None


def uct(arm: Arm, total: int, weight: float) -> float:
    """UCB1 for trees (Kocsis and Szepesvari 2006): ``Q + c sqrt(ln N / n)``; an action never taken comes first."""
    if arm.visits == 0:
        return math.inf
    return arm.value + weight * math.sqrt(math.log(total) / arm.visits)


def puct(arm: Arm, total: int, weight: float, first: float) -> float:
    """PUCT (Silver et al. 2017, AlphaGo Zero): ``Q + c P sqrt(N) / (1 + n)``; ``first`` is Q before the first visit."""
    assert arm.prior is not None
    value = arm.value if arm.visits else first
    return value + weight * arm.prior * math.sqrt(max(total, 1)) / (1 + arm.visits)


def best_arm(arms: Sequence[Arm], weight: float) -> int:
    """The index to select: by PUCT when every arm has a prior, else by UCT; the first of equals."""
    total = sum(arm.visits for arm in arms)
    if all(arm.prior is not None for arm in arms):
        first = sum(arm.visits * arm.value for arm in arms) / total if total else 0.0
        return max(range(len(arms)), key=lambda at: puct(arms[at], total, weight, first))
    return max(range(len(arms)), key=lambda at: uct(arms[at], total, weight))


def priors(logprobs: Sequence[float]) -> list[float]:
    """Softmax over the actions' mean logprobs a token: the policy's preference among those that were sampled."""
    highest = max(logprobs)
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


def width(visits: int, first: float, exponent: float, most: int) -> int:
    """Progressive widening (Couetoux et al. 2011): how many actions a state with so many visits may have."""
    return min(most, max(1, math.ceil(first * max(visits, 1) ** exponent)))


class MCTSOptions(SearchOptions):
    """``num_simulations`` a turn. ``exploration_weight`` is c of UCT and PUCT, for returns of about 0 to 1.

    ``use_priors``: PUCT where the server gave logprobs, else UCT. A state starts with ``first_branches`` actions and
    gets more with its visits, as ``first_branches * visits ** widening``, up to ``num_branches``. ``depth`` bounds the
    actions below the head, ``parallel`` the simulations at a time (they avoid each other by virtual losses).
    ``decide_by``: the most ``visits``, the highest mean ``value``, or the ``best`` return that a simulation reached,
    which suits deterministic environments: the best path can then be repeated.
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


class MCTSStrategy(SearchStrategy[MCTSOptions]):
    """Selects, expands, evaluates, backs up; executes the most visited action and keeps what is known below it."""

    Options = MCTSOptions
    name = "MCTS"
    needs_forks = True

    def check_world(self, world: EnvInfo | None) -> None:
        """MCTS looks ahead, so it always needs forks."""
        if world is None:
            raise ConfigError(
                "MCTS needs an environment that can fork, and this one cannot: use ToT or BestOfN, or an environment "
                "with fork() (the embedded webshop, any repeatable HTTP environment, a workspace in bubblewrap)"
            )
        super().check_world(world)

    async def choose(self, search: Search) -> int | None:
        """Simulate until the number or a budget is reached."""
        walk = _Walk(search, self.options, self._value)
        done = 0
        while done < self.options.num_simulations and not search.exhausted():
            at_once = min(self.options.parallel, self.options.num_simulations - done)
            done += at_once
            if not await walk.simulate(at_once):
                break
        search.log["simulations"] = done
        return self.favourite(search)

    def favourite(self, search: Search) -> int | None:
        """The best of the actions that were visited, or else of those that are known; ties are broken by
        visits."""
        known = search.actions(search.root)
        visited = [at for at in known if search.tree.nodes[at].visits]
        return max(visited or known, key=lambda at: self._merit(search.tree.nodes[at]), default=None)

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
        self._unjudged: Counter[int] = Counter()
        self._fresh: set[int] = set()
        self._barren: dict[int | None, int] = {}
        self._closed: set[int] = set()
        self._expanding: defaultdict[int | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._judging: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def simulate(self, count: int) -> bool:
        """Run so many simulations concurrently; false when no action is left to simulate.

        Which one is answered first makes no difference: they choose their ways in their order, and what they found is
        backed up in their order when all are done.
        """
        self._fresh.clear()
        paths: list[list[int]] = [[] for _ in range(count)]
        estimates = await together(self._descend(path) for path in paths)
        self._under_way.clear()
        for path, estimate in zip(paths, estimates, strict=True):
            if estimate is None:
                self._unjudged.update(path)
            else:
                self._back_up([*path, *estimate.path], estimate.value)
        # A branch that died leaves others to try, so that only a dead end is the end.
        return any(paths)

    async def _descend(self, path: list[int]) -> ValueEstimate | None:
        search, state = self._search, self._search.root
        while True:
            action = await self._select(state)
            if action is None:
                # Every action there died, so that there is nothing to come again for.
                self._closed.update(path[-1:])
                return None
            path.append(action)
            self._under_way[action] += 1
            fresh = action in self._fresh or not search.stepped(action)
            if fresh:
                self._fresh.add(action)
                if not await search.simulate(action):
                    return None
            state = search.state(action)
            at_end = ended(self._tree.nodes[action]) or not search.goes_on(state)
            if fresh or at_end or len(path) >= self._options.depth:
                return await self._judge(action, state)

    async def _judge(self, action: int, state: int) -> ValueEstimate | None:
        # Simulations that meet at a state judge it one after the other, because a rollout continues from
        # the nodes of the one before.
        async with self._judging[state]:
            estimate = await value_after(self._value, self._search, action, state)
        self._search.log["unjudged"] += estimate is None
        return estimate

    async def _select(self, state: int | None) -> int | None:
        # Simulations that meet at a state expand it one after the other, or each would sample the same again.
        async with self._expanding[state]:
            actions = [at for at in await self._expand(state) if at not in self._closed]
        if not actions:
            return None
        return actions[best_arm(self._arms(actions), self._options.exploration_weight)]

    async def _expand(self, state: int | None) -> list[int]:
        search, options = self._search, self._options
        actions = search.actions(state)
        visits = sum(self._tree.nodes[at].visits + self._under_way[at] for at in actions)
        allowed = width(visits, options.first_branches, options.widening, options.num_branches)
        if len(actions) >= allowed or self._is_barren(state, allowed) or search.exhausted():
            return actions
        await search.candidates(state, allowed - len(actions))
        grown = search.actions(state)
        if len(grown) == len(actions):
            self._barren[state] = allowed
        return grown

    def _is_barren(self, state: int | None, allowed: int) -> bool:
        """Whether the last request for another action there gave no new one.

        A peaked policy repeats itself, so at the root every further action that the visits allow is requested again.
        Below it each such call costs a prompt, and there are many states.
        """
        if state == self._search.root:
            return self._barren.get(state, 0) >= allowed
        return state in self._barren

    def _arms(self, actions: list[int]) -> list[Arm]:
        nodes = [self._tree.nodes[at] for at in actions]
        logprobs = [mean_logprob(node) for node in nodes] if self._options.use_priors else [None]
        known = [logprob for logprob in logprobs if logprob is not None]
        prior = priors(known) if len(known) == len(nodes) else [None] * len(nodes)
        return [self._arm(at, preference) for at, preference in zip(actions, prior, strict=True)]

    def _arm(self, at: int, prior: float | None) -> Arm:
        """Simulations that are under way count as visits that earn nothing, which keeps others away from them; those
        without an estimate count as visits, too, and leave the mean return as it is."""
        node, under_way = self._tree.nodes[at], self._under_way[at]
        visits = node.visits + self._unjudged[at]
        value = (node.value or 0.0) * visits / (visits + under_way) if visits else 0.0
        return Arm(visits + under_way, value, prior)

    def _back_up(self, path: list[int], value: float) -> None:
        for at in reversed(path):
            node = self._tree.nodes[at]
            value = (node.reward or 0.0) + self._options.discount * value
            note(node)["best"] = max(value, best_return(node)) if node.visits else value
            count_return(node, value)


def best_return(node: DraftNode) -> float:
    """The highest return that a simulation through this action has reached."""
    best = notes(node).get("best", 0.0)
    assert isinstance(best, float)
    return best


def mean_logprob(node: DraftNode) -> float | None:
    """Mean logprob a token of a sampled action, ``None`` where the server gave none."""
    logprobs = node.tokens.logprobs if node.tokens is not None else ()
    return sum(logprobs) / len(logprobs) if logprobs else None
