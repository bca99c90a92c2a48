"""How good is a state? The return that search expects from there on."""

from __future__ import annotations

import math
import time
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from pydantic import Field

from openhands_rl_plugin.errors import CaughtFailure, ConfigError, boundary
from openhands_rl_plugin.protocols import Reward
from openhands_rl_plugin.strategies.search import Search, ended
from openhands_rl_plugin.types import (
    Completion,
    FailureKind,
    Frozen,
    JsonObject,
    Message,
    Node,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Trajectory,
)


class Estimate(NamedTuple):
    """``value`` is expected after ``path``, the actions that were simulated to find out; their rewards come on top."""

    value: float
    path: tuple[int, ...] = ()


class ValueFunction(Protocol):
    """Estimates the return from a state on. ``needs_world``: only where the environment can fork."""

    name: str
    needs_world: bool

    async def estimate(self, search: Search, state: int) -> Estimate:
        """``state`` is a node of ``search.tree``; the estimate is 0.0 where nothing can be said."""
        ...


@runtime_checkable
class JudgesEnds(Protocol):
    """A value that also says what an ended episode is worth, where rewards do not. A capability, not a flag."""

    async def estimate_end(self, search: Search, state: int) -> Estimate:
        """As ``ValueFunction.estimate``, for a state in which the episode has ended."""
        ...


async def value_of_end(value: ValueFunction, search: Search, state: int) -> Estimate:
    """What is expected beyond the rewards that were seen once the episode has ended: nothing, unless it is judged."""
    return await value.estimate_end(search, state) if isinstance(value, JudgesEnds) else Estimate(0.0)


class NoValue:
    """Nothing is expected beyond the rewards that were seen."""

    name = "none"
    needs_world = False

    async def estimate(self, search: Search, state: int) -> Estimate:
        """Always 0."""
        return Estimate(0.0)


class RolloutOptions(Frozen):
    """``depth``: the most actions of one rollout."""

    depth: int = Field(default=20, ge=1)


class RolloutValue:
    """The return of one episode that the policy itself plays to its end, in a fork. Its actions join the tree."""

    Options = RolloutOptions
    name = "rollout"
    needs_world = True

    def __init__(self, options: RolloutOptions | None = None) -> None:
        self._depth = (options or RolloutOptions()).depth

    async def estimate(self, search: Search, state: int) -> Estimate:
        """Play on. A rollout that is cut by a budget or dies counts with what it has earned so far."""
        path: list[int] = []
        while len(path) < self._depth and not search.exhausted():
            sampled = await search.candidates(state, 1)
            if not sampled or not search.alive(sampled):
                break
            action = sampled[0]
            if not search.stepped(action) and not await search.simulate(action):
                break
            path.append(action)
            if ended(search.tree.nodes[action]):
                break
            state = search.state(action)
        return Estimate(0.0, tuple(path))


class ModelValueOptions(Frozen):
    """The question put to the model, and the word that means yes. ``scale`` is the value of a sure yes."""

    question: str = (
        "Look at the conversation so far. Will the task be completed successfully if it goes on like this? "
        "Answer with one word, Yes or No."
    )
    positive: str = "yes"
    negative: str = "no"
    scale: float = 1.0


class ModelValue:
    """The model's own probability that the task will succeed, read from the logprob of its answer."""

    Options = ModelValueOptions
    name = "model"
    needs_world = False

    def __init__(self, options: ModelValueOptions | None = None) -> None:
        self._options = options or ModelValueOptions()

    async def estimate(self, search: Search, state: int) -> Estimate:
        """Ask once. An answer that is neither yes nor no counts as undecided, half of the scale."""
        question = Message(role="user", content=self._options.question)
        answer = await search.ask((*search.tree.messages(state), question), max_tokens=4)
        return Estimate(0.0 if answer is None else self._options.scale * self._probability(answer))

    def _probability(self, answer: Completion) -> float:
        word = (answer.message.content or "").strip().lower()
        logprobs = answer.tokens.logprobs if answer.tokens is not None else ()
        sure = math.exp(min(logprobs[0], 0.0)) if logprobs else 1.0
        if word.startswith(self._options.positive):
            return sure
        return 1.0 - sure if word.startswith(self._options.negative) else 0.5


class RewardValueOptions(Frozen):
    """Names a reward of the registry."""

    reward: str = "return"
    reward_options: JsonObject = Field(default_factory=dict)


class RewardValue:
    """What a reward function (a verifier, say) makes of the episode up to the state, with the fork's evidence."""

    Options = RewardValueOptions
    Parts: ClassVar = {"reward": "rewards"}
    name = "reward"
    needs_world = True

    def __init__(self, options: RewardValueOptions | None = None, *, reward: Reward) -> None:
        self._reward = reward

    async def estimate(self, search: Search, state: int) -> Estimate:
        """Judge once; what cannot be judged is worth 0. Rewards that were already paid are not counted twice."""
        try:
            with boundary(FailureKind.GRADER, f"value {self._reward.version}"):
                score = await self._reward(await _so_far(search, state))
        except CaughtFailure:
            return Estimate(0.0)
        earned = search.total(tuple(at for at in search.tree.path(state) if search.tree.nodes[at].sampled))
        return Estimate(0.0 if score.reward is None else score.reward - earned)


def built_in(name: str, options: JsonObject) -> ValueFunction:
    """A value function that needs nothing else. Raises ``ConfigError`` for any other name."""
    match name:
        case "none":
            return NoValue()
        case "rollout":
            return RolloutValue(RolloutOptions.model_validate(options))
        case "model":
            return ModelValue(ModelValueOptions.model_validate(options))
    raise ConfigError(
        f"value {name!r} is none of none, rollout, model: hand over value=..., or let registry.build make the strategy"
    )


async def _so_far(search: Search, state: int) -> Trajectory:
    world = await search.world_at(state)
    try:
        evidence = await world.evidence()
    finally:
        await world.close()
    return episode_so_far(search, state, evidence)


def episode_so_far(search: Search, state: int, evidence: JsonObject) -> Trajectory:
    """The episode as if it had ended at ``state``, to be judged by a reward."""
    now = time.time()
    return Trajectory(
        id="search",
        run_id="search",
        group_id="search",
        task=Task(id="search", environment="search"),
        strategy=StrategySpec(name="search"),
        policy=PolicyRef(base_model="search"),
        nodes=tuple(Node(**vars(node)) for node in search.tree.nodes),
        head=state,
        stop=StopReason.UNFINISHED,
        tools=tuple(search.tree.tools),
        evidence=evidence,
        times=Times(started=now, finished=now),
    )
