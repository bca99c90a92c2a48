"""One search below the head of an episode's tree: candidates, simulated steps, and what both cost.

The live environment is never stepped: a simulation walks in forks of it. A fork is kept at every state that was
reached, up to a limit, so that going on from there costs one fork and one step; a state whose fork was given up is
reached again by replaying the actions that lead to it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import Field

from openhands_rl_plugin.errors import BadEnvironmentError, CaughtFailure, boundary
from openhands_rl_plugin.messages import whole_observation
from openhands_rl_plugin.protocols import Environment, Forkable, LLMEngine
from openhands_rl_plugin.strategies.budget import SearchBudget, Spending
from openhands_rl_plugin.tree import DraftNode, EpisodeTree
from openhands_rl_plugin.types import (
    Completion,
    Failure,
    FailureKind,
    Frozen,
    JsonObject,
    Message,
    Observation,
    SamplingParams,
)

NOTES = "search"
"""The key of the strategies' own part of a node's metadata."""

_SEED_STEP = 7_919


class SearchOptions(Frozen):
    """What all searches have in common.

    ``temperature`` makes branches differ; ``seed`` makes a search repeatable (``None`` leaves seeds to the engine).
    ``turn_budget`` bounds the search for one turn, ``episode_budget`` that of all turns together; once the latter is
    spent every turn is one plain completion. ``step_timeout`` is in seconds, for one step of a fork; ``open_worlds``
    bounds the forks held at a time and ``max_nodes`` the tree. ``value`` names what judges a state.
    """

    value: str = "model"
    value_options: JsonObject = Field(default_factory=dict)
    sampling: SamplingParams = SamplingParams()
    temperature: float = Field(default=1.0, gt=0)
    seed: int | None = None
    turn_budget: SearchBudget = SearchBudget()
    episode_budget: SearchBudget = SearchBudget()
    step_timeout: float = Field(default=60.0, gt=0)
    open_worlds: int = Field(default=64, ge=1)
    max_nodes: int = Field(default=20_000, ge=1)


@dataclass
class SearchLog:
    """What happened in one search, for the decided node's metadata."""

    merged: int = 0
    dropped: int = 0
    last_failure: Failure | None = None
    cut_by: str | None = None
    extra: JsonObject = field(default_factory=dict)


class Search:
    """The working state of one decision. Use it as an async context manager; leaving it closes every fork."""

    def __init__(
        self,
        tree: EpisodeTree,
        engine: LLMEngine,
        world: Forkable | None,
        options: SearchOptions,
        episode: Spending,
    ) -> None:
        self.tree = tree
        self.engine = engine
        self.world = world
        self.options = options
        self.turn = Spending(options.turn_budget)
        self.episode = episode
        self.log = SearchLog()
        self.root = tree.head
        self._worlds: OrderedDict[int | None, Environment] = OrderedDict()

    async def __aenter__(self) -> Search:
        return self

    async def __aexit__(self, *_: object) -> None:
        worlds, self._worlds = list(self._worlds.values()), OrderedDict()
        await asyncio.gather(*(_close(world) for world in worlds))

    def exhausted(self) -> bool:
        """Whether a budget or the limit of the tree's size is reached; the log says which."""
        reached = self.turn.exhausted() or (self.episode.exhausted() and f"episode {self.episode.exhausted()}")
        if reached is None and len(self.tree.nodes) >= self.options.max_nodes:
            reached = "max_nodes"
        self.log.cut_by = reached or self.log.cut_by
        return reached is not None

    async def candidates(self, parent: int | None, count: int) -> list[int]:
        """Sample ``count`` actions below ``parent``; equal ones are merged into one node, and both are paid for.

        Returns the nodes of the sampled actions without repetition, known ones among them.
        """
        count = self.episode.calls_left(self.turn.calls_left(count))
        if count < 1:
            return []
        completions = await self.engine.complete(
            self.tree.messages(parent), tools=self.tree.tools, n=count, sampling=self._sampling()
        )
        return list(dict.fromkeys(self._add(parent, completion) for completion in completions))

    async def plain(self) -> int:
        """One completion as without search; a budget does not stop it, because every turn needs an action."""
        completion = (
            await self.engine.complete(self.tree.messages(), tools=self.tree.tools, sampling=self._sampling())
        )[0]
        return self._add(self.root, completion)

    def total(self, path: Sequence[int]) -> float:
        """The sum of the rewards of actions that were stepped."""
        return sum(self.tree.nodes[at].reward or 0.0 for at in path)

    async def ask(self, messages: Sequence[Message], *, max_tokens: int) -> Completion | None:
        """One greedy completion that is no candidate, ``None`` when the budget does not allow it."""
        if self.exhausted():
            return None
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        completion = (await self.engine.complete(messages, sampling=sampling))[0]
        self._charge(completion)
        self.tree.usage += completion.usage
        return completion

    async def simulate(self, action: int) -> bool:
        """Take ``action`` in a fork of the world at its parent; its observation's nodes come below it.

        False when the step failed: the action is dropped from the search, with the failure noted on it.
        """
        assert self.world is not None
        try:
            with boundary(FailureKind.ENVIRONMENT, "search.simulate"):
                async with asyncio.timeout(self.options.step_timeout):
                    environment, observation = await self._step(action)
        except CaughtFailure as caught:
            self.drop(action, caught.failure)
            return False
        self._observe(action, observation)
        if ended(self.tree.nodes[action]):
            await _close(environment)
        else:
            await self._keep(self.state(action), environment)
        return True

    def drop(self, action: int, failure: Failure) -> None:
        """Take a branch out of the search for good."""
        self.log.dropped += 1
        self.log.last_failure = failure
        note(self.tree.nodes[action])["dropped"] = failure.message

    def alive(self, actions: Sequence[int]) -> list[int]:
        """``actions`` without the dropped ones."""
        return [action for action in actions if "dropped" not in notes(self.tree.nodes[action])]

    def actions(self, state: int | None) -> list[int]:
        """The sampled nodes below a state that are still in the search."""
        return self.alive([at for at in self.tree.children(state) if self.tree.nodes[at].sampled])

    def stepped(self, action: int) -> bool:
        """Whether an environment has answered ``action`` in a simulation that still counts."""
        return "state" in notes(self.tree.nodes[action])

    def state(self, action: int) -> int:
        """The last node of what the environment answered to ``action``, which was ``stepped``."""
        state = notes(self.tree.nodes[action])["state"]
        assert isinstance(state, int)
        return state

    async def world_at(self, state: int | None) -> Environment:
        """A fork that stands at ``state`` and belongs to the caller. Raises what forking and stepping raise."""
        assert self.world is not None
        if state == self.root:
            return await self.world.fork()
        if (kept := self._worlds.get(state)) is not None:
            self._worlds.move_to_end(state)
            if not isinstance(kept, Forkable):
                return self._worlds.pop(state)
            return await kept.fork()
        return await self._replayed(state)

    async def _step(self, action: int) -> tuple[Environment, Observation]:
        environment = await self.world_at(self.tree.nodes[action].parent)
        try:
            self._charge_step()
            return environment, whole_observation(await environment.step(self.tree.nodes[action].message))
        except BaseException:
            await _close(environment)
            raise

    async def _replayed(self, state: int | None) -> Environment:
        """Walk there from the root again; the answers must be those that the tree holds."""
        assert self.world is not None
        below_root = self.tree.path(state)[len(self.tree.path(self.root)) if self.root is not None else 0 :]
        environment = await self.world.fork()
        try:
            for action in (at for at in below_root if self.tree.nodes[at].sampled):
                self._charge_step()
                answer = whole_observation(await environment.step(self.tree.nodes[action].message))
                path = self.tree.path(self.state(action))
                if answer.messages != tuple(self.tree.nodes[at].message for at in path[path.index(action) + 1 :]):
                    raise BadEnvironmentError("the environment answered a replayed action otherwise than before")
        except BaseException:
            await _close(environment)
            raise
        return environment

    def _observe(self, action: int, observation: Observation) -> None:
        node = self.tree.nodes[action]
        node.reward, node.simulated = observation.reward, True
        at = action
        for message in observation.messages:
            at = self.tree.append(message, parent=at)
        note(node)["state"] = at
        if observation.terminated or observation.truncated:
            note(node)["ended"] = "terminated" if observation.terminated else "truncated"

    async def _keep(self, state: int | None, environment: Environment) -> None:
        self._worlds[state] = environment
        if len(self._worlds) > self.options.open_worlds:
            _, oldest = self._worlds.popitem(last=False)
            await _close(oldest)

    def _add(self, parent: int | None, completion: Completion) -> int:
        self._charge(completion)
        same = next((at for at in self.tree.children(parent) if self._says(at, completion.message)), None)
        if same is None:
            return self.tree.propose(completion, parent=parent)
        self.tree.usage += completion.usage
        self.log.merged += 1
        seen = note(self.tree.nodes[same])
        merged = seen.get("merged", 0)
        seen["merged"] = (merged if isinstance(merged, int) else 0) + 1
        return same

    def _says(self, index: int, message: Message) -> bool:
        node = self.tree.nodes[index]
        return node.sampled and action_key(node.message) == action_key(message)

    def _sampling(self) -> SamplingParams:
        update: dict[str, object] = {"temperature": self.options.temperature}
        if self.options.seed is not None:
            update["seed"] = (self.options.seed + _SEED_STEP * self.episode.calls) % 2**31
        return self.options.sampling.model_copy(update=update)

    def _charge(self, completion: Completion) -> None:
        self.turn.charge(completion)
        self.episode.charge(completion)

    def _charge_step(self) -> None:
        self.turn.steps += 1
        self.episode.steps += 1


def action_key(message: Message) -> tuple[object, ...]:
    """Equal for actions that do the same: the text without white space around it, and the calls without their ids."""
    return (message.content or "").strip(), tuple((call.name, call.arguments) for call in message.tool_calls)


def notes(node: DraftNode) -> JsonObject:
    """The strategies' part of a node's metadata, to be read."""
    found = node.metadata.get(NOTES)
    return found if isinstance(found, dict) else {}


def note(node: DraftNode) -> JsonObject:
    """The strategies' part of a node's metadata, to be written."""
    found = node.metadata.setdefault(NOTES, {})
    assert isinstance(found, dict)
    return found


def ended(node: DraftNode) -> bool:
    """Whether the episode ended, in a simulation, with this action."""
    return "ended" in notes(node)


async def _close(environment: Environment) -> None:
    """A failed close leaks a fork but does not spoil the search."""
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "search.close"):
            await environment.close()
    except CaughtFailure:
        return
