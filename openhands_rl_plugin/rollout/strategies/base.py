"""The base of the search strategies: the budgets' account, what sampled actions are worth, and the turn's report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError
from openhands_rl_plugin.core.protocols import EnvInfo, Forkable, LLMEngine, info_of
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.tree import DraftNode, EpisodeTree
from openhands_rl_plugin.core.types import Failure, Frozen, SamplingParams
from openhands_rl_plugin.rollout.strategies.options import Least, SearchOptions, Spending, note, notes, options_of
from openhands_rl_plugin.rollout.strategies.search import Search, together
from openhands_rl_plugin.rollout.strategies.value import (
    NoValue,
    RolloutValue,
    ValueFunction,
    built_in,
    least_of,
    value_after,
)

_LOG = redacting_logger(__name__)


class SearchStrategy[O: SearchOptions](ABC):
    """A strategy that samples several actions and evaluates them before it decides.

    ``value`` estimates a state's return. If the environment refuses a fork, a strategy and a value that need none do
    without for that turn.

    Its options are given whole or one by one. Raises ``ConfigError`` for wrong ones, and for a budget that is too small
    for one move.
    """

    Options: type[O]
    Parts: ClassVar = {"value": "values"}
    name: ClassVar[str]
    selects: ClassVar[bool] = True
    """What is acted on was chosen from several samples of the policy, and so is no sample of it."""
    needs_forks: ClassVar[bool] = False

    def __init__(
        self, options: O | None = None, *, value: ValueFunction | str | None = None, **changes: object
    ) -> None:
        self.options = options = options_of(self.Options, options, changes, value)
        given = None if isinstance(value, str) else value
        self._value: ValueFunction = given or built_in(options.value, options.value_options)
        self._told = False
        self._accounts: WeakKeyDictionary[EpisodeTree, Spending] = WeakKeyDictionary()
        least = self.least_of_a_move(least_of(self._value))
        for name, budget in (("turn_budget", options.turn_budget), ("episode_budget", options.episode_budget)):
            for what, needed in least._asdict().items():
                bound = getattr(budget, what)
                if bound is not None and bound < needed:
                    raise ConfigError(
                        f"{name}.{what}: {bound} is too small for one move of {self.name}, which takes {needed}: "
                        "raise it, or use fewer branches"
                    )

    def least_of_a_move(self, judgement: Least) -> Least:
        """The fewest calls and steps of one turn's search, including those of each judgement."""
        return judgement.after(Least(1, 1))

    @property
    def forks(self) -> int:
        """The forks that a search holds at a time; 0 where it can do without."""
        return self.options.open_worlds if self._needs_forks() else 0

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Search below ``tree.head`` and return the action to commit.

        Raises ``ConfigError`` when the search needs forks and there are none, ``CaughtFailure`` when every branch died.
        """
        self.check_world(None if world is None else info_of(world))
        async with Search(tree, engine, world, self.options, self._account(tree)) as search:
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
            self._accounts[tree] = Spending.resumed(self.options.episode_budget, last)
        return self._accounts[tree]

    def check_world(self, world: EnvInfo | None) -> None:
        """Raise ``ConfigError`` when the strategy cannot do without what is missing; ``None``: it cannot fork."""
        if world is None and self._value.needs_world:
            raise ConfigError(
                f"{self.name} with value = {self._value.name!r} needs an environment that can fork, and this one "
                'cannot: use value = "model", or an environment with fork()'
            )
        if world is None and isinstance(self._value, NoValue):
            raise ConfigError(
                f"{self.name} with value = 'none' compares the rewards of steps in forks, and this environment cannot "
                'fork: set value = "model" or "verifier", or act without a search (StandardReAct)'
            )
        if world is not None and not world.emits_rewards and isinstance(self._value, NoValue | RolloutValue):
            raise ConfigError(
                f"{self.name} with value = {self._value.name!r} adds up the rewards of steps, "
                'and a workspace pays none: set value = "model", "verifier" or "reward" in [rl.strategy]'
            )

    async def evaluate(self, search: Search, action: int) -> None:
        """The return from ``action`` on: its step in a fork, where the world can fork, and the value of what follows.

        It joins the mean on the node, unless the branch died or nothing can be said about it.
        """
        node = search.tree.nodes[action]
        reward, state = 0.0, action
        if search.world is not None:
            if not await search.simulate(action):
                return
            reward, state = node.reward or 0.0, search.state(action)
        estimate = await value_after(self._value, search, action, state)
        if estimate is None:
            search.log.unjudged += 1
        else:
            count_return(node, reward + search.total(estimate.path) + estimate.value)

    async def evaluate_all(self, search: Search, actions: Sequence[int]) -> list[int]:
        """Evaluate side by side; the actions that survived and that something is known about, best first."""
        await together(self.evaluate(search, action) for action in actions)
        known = [at for at in search.alive(actions) if search.tree.nodes[at].value is not None]
        return sorted(known, key=lambda at: -(search.tree.nodes[at].value or 0.0))

    async def _choose(self, search: Search) -> int | None:
        if search.world is not None and not self._needs_forks():
            refused = await search.without_forks()
            if refused is not None and not self._told:
                self._told = True
                _LOG.warning("%s judges without forks, as the environment refuses them now: %s", self.name, refused)
        return await self.choose(search)

    def _needs_forks(self) -> bool:
        return self.needs_forks or self._value.needs_world or isinstance(self._value, NoValue)

    async def _without_search(self, search: Search) -> int:
        """What is known already, or one plain completion."""
        known = self.favourite(search)
        if known is not None:
            return known
        # The model refused the prompt behind an action, but the environment is alive: the episode can continue.
        if search.log.dropped and not search.log.refused:
            raise CaughtFailure(_all_dead(search))
        return await search.plain()


def count_return(node: DraftNode, value: float) -> None:
    """Add an observed return of an action to its mean."""
    node.visits += 1
    node.value = value if node.value is None else node.value + (value - node.value) / node.visits


def _all_dead(search: Search) -> Failure:
    last = search.log.last_failure
    assert last is not None
    message = f"all {search.log.dropped} branches of the search died; the last: {last.message}"
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
