"""ReAct, best of n, Tree of Thoughts, and the base of all searches: budgets, values of actions, and a turn's report."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError
from openhands_rl_plugin.core.protocols import EnvInfo, Forkable, LLMEngine, info_of
from openhands_rl_plugin.core.tree import DraftNode, EpisodeTree
from openhands_rl_plugin.core.types import Failure, Frozen, JsonObject, SamplingParams
from openhands_rl_plugin.rollout.strategies.search import (
    Search,
    SearchOptions,
    call_seed,
    checked,
    ended,
    episode_seed,
    note,
    notes,
    times_merged,
    together,
)
from openhands_rl_plugin.rollout.strategies.value import NoValue, RolloutValue, ValueFunction, built_in, value_after


class SearchStrategy[O: SearchOptions](ABC):
    """A strategy that samples several actions and evaluates them before it decides.

    ``value`` estimates a state's return. If the environment refuses a fork, a strategy and a value that need none do
    without for that turn.

    Its options are given whole or one by one. Raises ``ConfigError`` for wrong ones.
    """

    Options: type[O]
    Parts: ClassVar = {"value": "values"}
    name: ClassVar[str]
    selects: ClassVar[bool] = True
    """Whether actions are chosen from several samples, so that they are not distributed as the policy's."""
    needs_forks: ClassVar[bool] = False

    def __init__(
        self, options: O | None = None, *, value: ValueFunction | str | None = None, **changes: object
    ) -> None:
        if isinstance(value, str):
            changes, value = {**changes, "value": value}, None
        self.options: O = options or checked(self.Options, changes)
        self._value = value or built_in(self.options.value, self.options.value_options)

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Search below ``tree.head`` and return the action to commit.

        Raises ``ConfigError`` when the search needs forks and there are none, ``CaughtFailure`` when every branch died.
        """
        self.check_world(None if world is None else info_of(world))
        async with Search(tree, engine, world, self.options) as search:
            chosen = await self._choose(search) if not search.exhausted() else None
            if chosen is None:
                chosen = await self._without_search(search)
        turn, episode = search.spent
        report: JsonObject = {"strategy": self.name, "turn": {**turn}, "episode": {**episode}}
        if search.last_failure is not None:
            report["last_failure"] = search.last_failure.message
        note(tree.nodes[chosen])["report"] = {**report, **search.log}
        return chosen

    @abstractmethod
    async def choose(self, search: Search) -> int | None:
        """The best action that was found, ``None`` when the budget did not allow to evaluate any."""

    def favourite(self, search: Search) -> int | None:
        """The best of the actions that are known from earlier turns, without spending anything."""
        nodes = search.tree.nodes
        known = search.actions(search.root)
        return max(known, key=lambda at: (nodes[at].visits, nodes[at].value or 0.0), default=None)

    def check_world(self, world: EnvInfo | None) -> None:
        """Raise ``ConfigError`` when the strategy cannot do without what is missing; ``None``: it cannot fork."""
        if world is None and (self._value.needs_world or isinstance(self._value, NoValue)):
            raise ConfigError(
                f"{self.name} with value = {self._value.name!r} needs an environment that can fork, and this one "
                'cannot: set value = "model" or "verifier", or act without a search (StandardReAct)'
            )
        if world is not None and not world.emits_rewards and isinstance(self._value, NoValue | RolloutValue):
            raise ConfigError(
                f"{self.name} with value = {self._value.name!r} adds up the rewards of steps, "
                'and a workspace gives none: set value = "model", "verifier" or "reward" in [rl.strategy]'
            )

    async def evaluate(self, search: Search, action: int) -> None:
        """The return from ``action`` on: its step in a fork, where the world can fork, and the value of what follows.

        It joins the mean on the node, unless the branch died or it has no estimate.
        """
        node = search.tree.nodes[action]
        reward, state = 0.0, action
        if search.world is not None:
            if not await search.simulate(action):
                return
            reward, state = node.reward or 0.0, search.state(action)
        estimate = await value_after(self._value, search, action, state)
        if estimate is None:
            search.log["unjudged"] += 1
        else:
            count_return(node, reward + search.total(estimate.path) + estimate.value)

    async def evaluate_all(self, search: Search, actions: Sequence[int]) -> list[int]:
        """Evaluate side by side; the actions that survived and that something is known about, best first."""
        await together(self.evaluate(search, action) for action in actions)
        known = [at for at in search.alive(actions) if search.tree.nodes[at].value is not None]
        return sorted(known, key=lambda at: -(search.tree.nodes[at].value or 0.0))

    async def _choose(self, search: Search) -> int | None:
        needs_forks = self.needs_forks or self._value.needs_world or isinstance(self._value, NoValue)
        if search.world is not None and not needs_forks:
            await search.without_forks()
        return await self.choose(search)

    async def _without_search(self, search: Search) -> int:
        """The best known candidate, or else one plain completion."""
        known = self.favourite(search)
        if known is not None:
            return known
        # The model refused the prompt behind an action, but the environment is alive: the episode can continue.
        if search.log["dropped"] and not search.refused:
            raise CaughtFailure(_all_dead(search))
        return await search.plain()


def count_return(node: DraftNode, value: float) -> None:
    """Add an observed return of an action to its mean."""
    node.visits += 1
    node.value = value if node.value is None else node.value + (value - node.value) / node.visits


def _all_dead(search: Search) -> Failure:
    last = search.last_failure
    assert last is not None
    message = f"all {search.log['dropped']} branches of the search died; the last: {last.message}"
    return Failure(kind=last.kind, message=message[:500], boundary="search")


class ReActOptions(Frozen):
    """How the completions are sampled."""

    sampling: SamplingParams = SamplingParams()


class StandardReActStrategy:
    """Samples once and commits the answer."""

    Options = ReActOptions

    def __init__(self, options: ReActOptions | None = None) -> None:
        self.options = options or ReActOptions()

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Propose one completion below ``tree.head`` and return its index."""
        completions = await engine.complete(tree.messages(), tools=tree.tools, sampling=self.options.sampling)
        return tree.propose(completions[0])


class BestOfNOptions(SearchOptions):
    """``n`` actions are sampled each turn, and the best is executed. With ``act = "sampled"`` one of them is, as the
    policy would act: so that what is trained on (``tree = "proposals"``) are the states that the policy comes to, and
    also shows what helps after a mistake.
    """

    n: int = Field(default=4, ge=1)
    act: Literal["best", "sampled"] = "best"


class BestOfNStrategy(SearchStrategy[BestOfNOptions]):
    """Judges every candidate once: after its step in a fork where the world can fork, else as it was sampled."""

    Options = BestOfNOptions
    name = "BestOfN"

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
    """Draw a candidate with a probability proportional to how often it was sampled."""
    nodes = search.tree.nodes
    times = [1 + times_merged(notes(nodes[at])) for at in candidates]
    return source.choices(candidates, times)[0]


class ToTOptions(SearchOptions):
    """Tree of Thoughts with breadth-first search (Yao et al. 2023, arXiv 2305.10601, algorithm 1), of actions.

    ``num_branches`` proposals from each state, ``depth`` levels, or as many as the episode has turns left; the best
    ``beam`` states of each level are expanded.
    """

    num_branches: int = Field(default=3, ge=1)
    depth: int = Field(default=2, ge=1)
    beam: int = Field(default=2, ge=1)


class ToTStrategy(SearchStrategy[ToTOptions]):
    """Proposes, values, keeps a beam; executes the first action on the way to the best leaf.

    Where the world can fork, the tree grows over real observations; where it cannot, observations are unknown, so the
    tree is one level deep, which the report says.
    """

    Options = ToTOptions
    name = "ToT"

    async def choose(self, search: Search) -> int | None:
        """Grow level by level; a branch that ended, or that the budget did not allow to expand, remains a candidate
        with its current value."""
        beam: list[tuple[int, ...]] = [()]
        reached = 0
        while reached < (self.options.depth if search.world is not None else 1) and not search.exhausted():
            live = [path for path in beam if self._goes_on(search, path)]
            grown = await self._grow(search, live)
            if not any(path not in beam for path in grown):
                break
            reached += 1
            finished = [path for path in beam if path and path not in live]
            beam = sorted([*finished, *grown], key=lambda path: -self._worth(search, path))[: self.options.beam]
        search.log["depth"] = reached
        best = next((path for path in beam if path and len(search.alive(path)) == len(path)), None)
        if best is None:
            return None
        self._back_up(search, best)
        return best[0]

    def _goes_on(self, search: Search, path: tuple[int, ...]) -> bool:
        return not path or (not ended(search.tree.nodes[path[-1]]) and search.goes_on(search.state(path[-1])))

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
