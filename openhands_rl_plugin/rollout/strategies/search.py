"""A search below one state: its options, its budget with the account, its log, its pool of forks, and its moves."""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openhands_rl_plugin.core.concurrency import shielded
from openhands_rl_plugin.core.errors import (
    BadEnvironmentError,
    CaughtFailure,
    ConfigError,
    ModelError,
    RLError,
    boundary,
    describe,
    problems,
)
from openhands_rl_plugin.core.messages import json_object, whole_observation
from openhands_rl_plugin.core.protocols import Environment, Forkable, LLMEngine, info_of
from openhands_rl_plugin.core.tree import DraftNode, EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    Failure,
    FailureKind,
    Frozen,
    JsonObject,
    Message,
    Node,
    Observation,
    SamplingParams,
)


class StrictOptions(Frozen):
    """Options with the strict types of a configuration file: no boolean or text for a number, and finite numbers."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class SearchBudget(StrictOptions):
    """Bounds of a search; ``None``: no bound.

    ``calls``: requested completions. ``steps``: of forked environments, including replays to reach a state. Both are
    counted before the request, so that concurrent branches share the bound. ``tokens``: prompt and sampled tokens, as
    the server bills them. They are known after a call, so running calls may exceed the bound. ``seconds``: wall time of
    searching turns, not between turns. At this bound running work is cancelled, and its tokens stay unknown. Only
    ``seconds`` bounds the work of a verifier or reward that judges a state.
    """

    calls: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    seconds: float | None = Field(default=None, ge=0.001)


class SpentError(RLError):
    """Raised if a budget does not allow a request."""


class SearchOptions(StrictOptions):
    """The options of all strategies that sample several answers and judge them.

    ``temperature`` makes branches differ. ``seed`` makes a search repeatable unless a budget cuts it or a branch dies.
    A call's seed depends on it, on the engine's episode seed if there is one, and on the actions before the call, not
    on concurrent calls (``None``: the engine chooses seeds). ``turn_budget`` bounds the search for one turn,
    ``episode_budget`` that of all turns; once it is spent, every turn is one plain completion. ``value`` names the
    value function. ``step_timeout``: seconds for one step of a fork and for making it; longer than any command may
    take. ``open_worlds``: the most open forks.
    """

    temperature: float = Field(default=1.0, gt=0)
    seed: int | None = None
    turn_budget: SearchBudget = SearchBudget()
    episode_budget: SearchBudget = SearchBudget()
    value: str = "model"
    value_options: JsonObject = Field(default_factory=dict)
    step_timeout: float = Field(default=600.0, gt=0)
    open_worlds: int = Field(default=64, ge=1)


def checked[M: BaseModel](kind: type[M], options: Mapping[str, object]) -> M:
    """Validate ``options``. Raises ``ConfigError`` with a line for each invalid one."""
    try:
        return kind.model_validate(options)
    except ValidationError as error:
        lines = (f"{kind.__name__}: {'.'.join(at)}: {what}" for at, what in problems(error, kind))
        raise ConfigError("\n".join(lines)) from error


NOTES = "search"
"""The key of the strategies' part of a node's metadata."""


def notes(node: Node) -> JsonObject:
    """The strategies' part of a node's metadata, for reading."""
    return json_object(node.metadata.get(NOTES))


def note(node: DraftNode) -> JsonObject:
    """The strategies' part of a node's metadata, for writing."""
    found = node.metadata.setdefault(NOTES, {})
    assert isinstance(found, dict)
    return found


def ended(node: DraftNode) -> bool:
    """Whether the episode ended, in a simulation, with this action."""
    return "ended" in notes(node)


def times_merged(noted: JsonObject) -> int:
    """How often an equal action was sampled again."""
    merged = noted.get("merged", 0)
    return merged if isinstance(merged, int) else 0


def action_key(message: Message) -> tuple[object, ...]:
    """A key that is equal for equal answers: the text without white space around it, and the calls without their ids.

    The whole text counts: two thoughts that end in the same ``Action:`` are two actions, because only the
    environment knows how it reads an answer.
    """
    calls = tuple((call.name, call.arguments.strip()) for call in message.tool_calls)
    return (message.content or "").strip(), calls


@asynccontextmanager
async def within(seconds: float | None, late: Callable[[], Exception]) -> AsyncIterator[None]:
    """Raise ``late`` if the block takes longer."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise late() from error


# Seconds for a fork to close.
_CLOSE_TIMEOUT = 60.0


class ForkPool:
    """Forks by their states, at most ``most`` at a time. It closes every fork that it keeps.

    A fork has a place from before it is made until it is closed. If all places are taken, the least recently used fork
    is closed, unless it is being copied. No task waits for a place while it copies a fork, so there is no deadlock.

    A started close continues if its caller is cancelled, because no other task would close the fork. It is abandoned
    after ``patience`` seconds.
    """

    def __init__(self, most: int, patience: float) -> None:
        self._free = most
        self._patience = patience
        self._closing: set[asyncio.Task[None]] = set()
        self._kept: OrderedDict[int | None, Environment] = OrderedDict()
        self._copied: Counter[int | None] = Counter()
        self._changed = asyncio.Event()

    async def enter(self) -> None:
        """Take a place, as soon as there is one."""
        while self._free < 1:
            idle = [state for state in self._kept if not self._copied[state]]
            if idle:
                await self.end(self._kept.pop(idle[0]))
            else:
                self._changed.clear()
                await self._changed.wait()
        self._free -= 1

    def leave(self) -> None:
        """Release a place."""
        self._free += 1
        self._changed.set()

    def end(self, environment: Environment | asyncio.Future[Environment]) -> asyncio.Future[None]:
        """Close a fork that is not kept, or is still being made, and release its place."""
        closing = asyncio.create_task(self._end(environment))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return asyncio.shield(closing)

    def get(self, state: int | None) -> Environment | None:
        """The fork kept at ``state``; it becomes the most recently used."""
        if state in self._kept:
            self._kept.move_to_end(state)
        return self._kept.get(state)

    async def copy(self, state: int | None, origin: Forkable) -> Environment:
        """Copy ``origin``; the caller holds a place for the copy. The fork at ``state`` stays open meanwhile.

        If the caller is cancelled, the copy is closed as soon as it is made.
        """
        self._copied[state] += 1
        making = asyncio.Task(origin.fork(), loop=asyncio.get_running_loop(), eager_start=True)
        try:
            return await asyncio.shield(making)
        except BaseException:
            self.end(making)
            raise
        finally:
            self._copied[state] -= 1
            self._changed.set()

    def keep(self, state: int | None, environment: Environment) -> None:
        """Keep a fork, with its place, until another fork needs the place."""
        self._kept[state] = environment
        self._changed.set()

    def take(self, state: int | None) -> Environment:
        """Remove and return the environment at ``state``. The caller gives it to ``end``."""
        return self._kept.pop(state)

    async def close(self) -> None:
        """Close all kept environments; returns when every close has ended."""
        while self._kept:
            self.end(self._kept.popitem(last=False)[1])
        await shielded(asyncio.gather(*self._closing))

    async def _end(self, environment: Environment | asyncio.Future[Environment]) -> None:
        """A failed close leaks a fork but does not spoil the search."""
        try:
            with suppress(RLError), boundary(FailureKind.INFRASTRUCTURE, "search.close"):
                async with asyncio.timeout(self._patience):
                    await (await environment if isinstance(environment, asyncio.Future) else environment).close()
        finally:
            self.leave()


async def together[T](work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run concurrently and return the results in order. If one raises, the others are cancelled and awaited, so that
    no task outlives a search; then the exception is raised."""
    tasks: list[asyncio.Task[T]] = []
    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(each) for each in work)
    except BaseExceptionGroup as several:
        first = several.exceptions[0]
    if first is not None:
        raise first
    return [task.result() for task in tasks]


# Larger than any number of completions of one call, whose seeds are consecutive.
_SEED_STEP = 7_919
_SEEDS = 2**31


def episode_seed(engine: LLMEngine) -> int | None:
    """The episode seed of an engine, or ``None``."""
    return getattr(engine, "episode_seed", None)


def call_seed(seed: int, engine: LLMEngine, tree: EpisodeTree, parent: int | None, asking: int) -> int:
    """The seed of a search for its next call at ``parent``, with ``asking`` completions in flight.

    Episodes of one task differ by their own seeds, or all samples of a group would be the same.
    """
    own, place = episode_seed(engine), 0
    # By the place in the tree and the count there, not by time.
    for at in tree.path(parent) if parent is not None else ():
        if tree.nodes[at].sampled:
            place = zlib.crc32(repr(action_key(tree.nodes[at].message)).encode("utf-8", "surrogatepass"), place)
    below = [tree.nodes[at] for at in tree.children(parent)]
    drawn = sum(1 + times_merged(notes(node)) for node in below if node.sampled)
    episode = 0 if own is None else zlib.crc32(str(own).encode())
    return (seed + episode + place + _SEED_STEP * (drawn + asking)) % _SEEDS


class Search:
    """The working state of one decision. Use it as an async context manager; leaving it closes every fork."""

    def __init__(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None, options: SearchOptions) -> None:
        self.tree = tree
        self.engine = engine
        self.world = world
        self.options = options
        # For the decided node's metadata: branches that died or were refused by the model (``dropped``), states without
        # an estimate, states without yes or no of the model, and the bound that was reached (``cut_by``).
        self.log: dict[str, Any] = {"merged": 0, "dropped": 0, "cut_by": None, "unjudged": 0, "undecided": 0}
        # Whether the model refused a branch's prompt; it may still accept that of the episode.
        self.refused = False
        self.last_failure: Failure | None = None
        # Spending of this turn, and of earlier turns, from the last one's report.
        self._counts, self._began = {"calls": 0, "tokens": 0, "steps": 0}, time.monotonic()
        reports = (notes(node).get("report") for node in reversed(tree.nodes))
        last: Any = next(filter(None, reports), {"episode": {}})
        self._before: dict[str, float] = last["episode"]
        self.root = tree.head
        self._worlds = ForkPool(options.open_worlds, min(options.step_timeout, _CLOSE_TIMEOUT))
        self._asking: Counter[int | None] = Counter()
        self._stepping: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def __aenter__(self) -> Search:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._worlds.close()

    @property
    def gives_rewards(self) -> bool:
        """Whether the environment's steps emit rewards."""
        return info_of(self.world).emits_rewards

    @property
    def spent(self) -> tuple[dict[str, float], dict[str, float]]:
        """Spending of this turn, and of all turns of the episode, by the names of a budget's bounds."""
        turn = {**self._counts, "seconds": round(time.monotonic() - self._began, 6)}
        return turn, {what: count + self._before.get(what, 0) for what, count in turn.items()}

    def _left(self, *wanted: str) -> Iterator[tuple[str, str, float]]:
        """Yield for each bound ``wanted`` of both budgets: its name in reports, its key, and the remainder."""
        budgets = ("", self.options.turn_budget), ("episode ", self.options.episode_budget)
        for (prefix, budget), spent in zip(budgets, self.spent, strict=True):
            for what in wanted:
                if (bound := getattr(budget, what)) is not None:
                    yield prefix + what, what, bound - spent[what]

    def exhausted(self) -> bool:
        """Whether a budget is spent; the log says which."""
        reached = next((name for name, _, left in self._left(*SearchBudget.model_fields) if left <= 0), None)
        self.log["cut_by"] = reached or self.log["cut_by"]
        return reached is not None

    def goes_on(self, state: int | None) -> bool:
        """Whether the episode would continue at ``state``: it has turns left there, and its prompt is not too long."""
        tree = self.tree
        if tree.turns_left is not None and len(self._actions_to(state)) >= tree.turns_left:
            return False
        return tree.longest_prompt is None or tree.prompt_length(state) <= tree.longest_prompt

    async def candidates(self, parent: int | None, count: int) -> list[int]:
        """Sample ``count`` actions below ``parent``, or as many as the budgets allow.

        Equal actions are merged into one node, which counts them. Returns the nodes of the sampled actions, each once,
        also known ones. If the model refuses the prompt of a branch, the branch is dropped. Raises ``ModelError`` if it
        refuses that of the episode itself.
        """
        if self.exhausted() or count < 1:
            return []
        count = min([count, *(int(left) for *_, left in self._left("calls"))])
        self._counts["calls"] += count
        sampling = self._sampling(parent)
        self._asking[parent] += count
        try:
            completions = await self.in_time(
                self.engine.complete(self.tree.messages(parent), tools=self.tree.tools, n=count, sampling=sampling)
            )
        except SpentError:
            return []
        except ModelError as error:
            if not (way := self._actions_to(parent)):
                raise
            self.refused = True
            self.drop(way[-1], _refusal(error))
            return []
        finally:
            self._asking[parent] -= count
        return list(dict.fromkeys(self._add(parent, completion) for completion in completions))

    async def plain(self) -> int:
        """One plain completion, regardless of budgets, because every turn needs an action."""
        self._counts["calls"] += 1
        sampling = self._sampling(self.root)
        completion = (await self.engine.complete(self.tree.messages(), tools=self.tree.tools, sampling=sampling))[0]
        return self._add(self.root, completion)

    def total(self, path: Sequence[int]) -> float:
        """The sum of the rewards of executed actions."""
        return sum(self.tree.nodes[at].reward or 0.0 for at in path)

    async def ask(self, messages: Sequence[Message], *, max_tokens: int) -> Completion | None:
        """One greedy completion that is no candidate; ``None`` if the budgets or the model do not allow it."""
        if self.exhausted():
            return None
        self._counts["calls"] += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        try:
            completion = (await self.in_time(self.engine.complete(messages, sampling=sampling)))[0]
        except SpentError:
            return None
        except ModelError as error:
            self.last_failure = _refusal(error)
            return None
        self._charge(completion)
        self.tree.usage += completion.usage
        return completion

    async def in_time[T](self, work: Coroutine[Any, Any, T]) -> T:
        """Cancel the block with ``SpentError`` when the seconds of a budget are over."""
        left, name = min(((left, name) for name, _, left in self._left("seconds")), default=(None, ""))
        async with within(left, lambda: self._spent(name)):
            return await work

    async def simulate(self, action: int) -> bool:
        """Execute ``action`` in a fork at its parent, once; the observation becomes its child.

        Returns false if no budget allows it, or if the step failed. A failed action is dropped from the search, and its
        metadata has the failure.
        """
        assert self.world is not None
        # Concurrent simulations of one action share one step of it.
        async with self._stepping[action]:
            if self.stepped(action) or not self.alive((action,)):
                return bool(self.alive((action,)))
            try:
                environment, observation = await self.in_time(self._step(action))
            except SpentError:
                return False
            except CaughtFailure as caught:
                self.drop(action, caught.failure)
                return False
            self._observe(action, observation)
            self._worlds.keep(self.state(action), environment)
            return True

    async def give_up(self, state: int) -> None:
        """Close the fork kept at ``state``, which is no longer needed."""
        if self._worlds.get(state) is not None:
            await self._worlds.end(self._worlds.take(state))

    async def without_forks(self) -> None:
        """Search without forks for the rest of the turn if the environment refuses them; the log has the reason.

        A fork that was made for this is used for the first step.
        """
        try:
            with boundary(FailureKind.ENVIRONMENT, "search.fork"):
                environment = await self.in_time(self._fork_at(self.root, 0))
        except CaughtFailure as caught:
            if isinstance(caught.__cause__, BadEnvironmentError):
                self.world = None
                self.log["without_forks"] = caught.failure.message
            return
        self._worlds.keep(self.root, environment)

    def drop(self, action: int, failure: Failure) -> None:
        """Drop a branch from the search."""
        if not self.alive((action,)):
            return
        self.log["dropped"] += 1
        self.last_failure = failure
        note(self.tree.nodes[action])["dropped"] = failure.message

    def alive(self, actions: Sequence[int]) -> list[int]:
        """``actions`` without the dropped ones."""
        return [action for action in actions if "dropped" not in notes(self.tree.nodes[action])]

    def actions(self, state: int | None) -> list[int]:
        """The sampled nodes below a state that are still in the search."""
        return self.alive([at for at in self.tree.children(state) if self.tree.nodes[at].sampled])

    def stepped(self, action: int) -> bool:
        """Whether ``action`` was executed in a simulation that is still valid."""
        return "state" in notes(self.tree.nodes[action])

    def state(self, action: int) -> int:
        """The last node of the observation of ``action``, which was ``stepped``."""
        state = notes(self.tree.nodes[action])["state"]
        assert isinstance(state, int)
        return state

    @asynccontextmanager
    async def world_at(self, state: int | None) -> AsyncIterator[Environment]:
        """A fork at ``state``, only for reading; if the episode has ended, the fork that reached the end.

        Raises the errors of forking and stepping, and ``SpentError`` if the budgets do not allow a replay to the state.
        """
        environment = await self._fork_at(state, 0)
        try:
            yield environment
        finally:
            await self._worlds.end(environment)

    async def _fork_at(self, state: int | None, steps: int) -> Environment:
        """A fork at ``state``, with a place. Also counts ``steps`` for the caller. Raises ``SpentError``."""
        way = self._actions_to(state)
        kept = self._worlds.get(state)
        if kept is not None and (not way or not isinstance(kept, Forkable) or ended(self.tree.nodes[way[-1]])):
            # No copy is needed, or none is possible.
            self._enter_steps(steps)
            return self._worlds.take(state)
        await self._worlds.enter()
        if isinstance(kept := self._worlds.get(state), Forkable):
            way = []
        origin = kept if isinstance(kept, Forkable) else self.world
        assert origin is not None
        known = info_of(origin).fork_steps
        try:
            self._enter_steps(steps + len(way) + known)
        except SpentError:
            self._worlds.leave()
            raise
        async with self._step_time():
            environment = await self._worlds.copy(state, origin)
            # A server reports only on the first request that it cannot copy.
            self._counts["steps"] += max(0, info_of(origin).fork_steps - known)
            try:
                await self._replay(environment, way)
            except BaseException:
                await self._worlds.end(environment)
                raise
        return environment

    def _step_time(self) -> AbstractAsyncContextManager[None]:
        limit = f"step_timeout = {self.options.step_timeout:g} s: raise it in [rl.strategy]"
        what = f"a step in a copy, or the copying, took longer than {limit}"
        return within(self.options.step_timeout, lambda: BadEnvironmentError(what))

    def _actions_to(self, state: int | None) -> list[int]:
        """The actions that lead from the root to ``state``."""
        actions: list[int] = []
        while state is not None and state != self.root:
            if self.tree.nodes[state].sampled:
                actions.append(state)
            state = self.tree.nodes[state].parent
        return actions[::-1]

    async def _step(self, action: int) -> tuple[Environment, Observation]:
        """Raises ``CaughtFailure`` and ``SpentError``."""
        node = self.tree.nodes[action]
        with boundary(FailureKind.ENVIRONMENT, "search.simulate"):
            environment = await self._fork_at(node.parent, 1)
            try:
                async with self._step_time():
                    observation = whole_observation(await environment.step(node.message))
                if not math.isfinite(observation.reward):
                    raise BadEnvironmentError(f"the environment answered with the reward {observation.reward}")
                return environment, observation
            except BaseException:
                await self._worlds.end(environment)
                raise

    async def _replay(self, environment: Environment, way: Sequence[int]) -> None:
        """Replay the actions; the observations must be those in the tree."""
        for action in way:
            answer = whole_observation(await environment.step(self.tree.nodes[action].message))
            path = self.tree.path(self.state(action))
            if answer.messages != tuple(self.tree.nodes[at].message for at in path[path.index(action) + 1 :]):
                raise BadEnvironmentError("the environment answered a replayed action differently")

    def _observe(self, action: int, observation: Observation) -> None:
        node = self.tree.nodes[action]
        node.reward, node.simulated = observation.reward, True
        at = action
        for message in observation.messages:
            at = self.tree.append(message, parent=at)
        note(node)["state"] = at
        if observation.terminated or observation.truncated:
            note(node)["ended"] = "terminated" if observation.terminated else "truncated"

    def _add(self, parent: int | None, completion: Completion) -> int:
        self._charge(completion)
        same = next((at for at in self.tree.children(parent) if self._has_message(at, completion.message)), None)
        if same is None:
            return self.tree.propose(completion, parent=parent)
        self.tree.usage += completion.usage
        self.log["merged"] += 1
        seen = note(self.tree.nodes[same])
        seen["merged"] = times_merged(seen) + 1
        return same

    def _has_message(self, index: int, message: Message) -> bool:
        node = self.tree.nodes[index]
        return node.sampled and action_key(node.message) == action_key(message)

    def _sampling(self, parent: int | None) -> SamplingParams:
        seed = self.options.seed
        if seed is not None:
            seed = call_seed(seed, self.engine, self.tree, parent, self._asking[parent])
        return SamplingParams(temperature=self.options.temperature, seed=seed)

    def _charge(self, completion: Completion) -> None:
        self._counts["tokens"] += completion.usage.prompt_tokens + completion.usage.completion_tokens

    def _enter_steps(self, count: int) -> None:
        """Count the steps. Raises ``SpentError`` if a budget does not allow them."""
        for name, what, left in self._left("seconds", "steps"):
            if left <= 0 if what == "seconds" else left < count:
                raise self._spent(name)
        self._counts["steps"] += count

    def _spent(self, bound: str) -> SpentError:
        self.log["cut_by"] = bound
        return SpentError()


def _refusal(error: ModelError) -> Failure:
    return Failure(kind=FailureKind.MODEL, message=describe(error), boundary="search")
