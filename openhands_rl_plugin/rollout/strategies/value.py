"""Value functions: the expected return from a state on."""

from __future__ import annotations

import math
import time
from collections.abc import Coroutine
from typing import Any, ClassVar, NamedTuple, Protocol

from pydantic import ConfigDict, Field

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.records import CHECKED, WorkspaceCommand
from openhands_rl_plugin.core.types import (
    Completion,
    FailureKind,
    JsonObject,
    Message,
    Node,
    PolicyRef,
    Score,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Trajectory,
)
from openhands_rl_plugin.rollout.scoring import workspace_command
from openhands_rl_plugin.rollout.strategies.search import Search, SpentError, StrictOptions, checked, ended, note, notes


class ValueEstimate(NamedTuple):
    """``value``: the expected return after ``path``, the simulated actions, whose rewards are added to it."""

    value: float
    path: tuple[int, ...] = ()


class ValueFunction(Protocol):
    """Estimates the return from a state on. ``needs_world``: whether it needs an environment that can fork.

    It may also have ``estimate_end``, with the signature of ``estimate``, for states in which the episode has ended.
    Without it, such a state has no value beyond its rewards.
    """

    name: str
    needs_world: bool

    async def estimate(self, search: Search, state: int) -> ValueEstimate | None:
        """Estimate the return from ``state``, a node of ``search.tree``. ``None``: no estimate, which is not 0.0."""
        ...


async def value_after(value: ValueFunction, search: Search, action: int, state: int) -> ValueEstimate | None:
    """The expected future return at ``state``, which ``action`` reached, without the rewards so far.

    At an episode's end it is 0, unless the value function judges ends, once; the fork is then closed. ``None`` if there
    is no estimate; the log has the reason.
    """
    node, judge_end = search.tree.nodes[action], getattr(value, "estimate_end", None)
    over, known = ended(node), notes(node).get("worth_of_end")
    if over and isinstance(known, float):
        return ValueEstimate(known)
    # No reward comes after the last turn, so a state there has no value beyond its rewards.
    if over or (search.world is not None and search.gives_rewards and not search.goes_on(state)):
        estimate = ValueEstimate(0.0) if judge_end is None else await judge_end(search, state)
        if over:
            await search.give_up(state)
    else:
        estimate = await value.estimate(search, state)
    if over and estimate is not None and judge_end is not None:
        note(node)["worth_of_end"] = estimate.value
    return estimate


class NoValue:
    """A value function that expects no future return."""

    Options = StrictOptions
    name = "none"
    needs_world = False

    def __init__(self, options: StrictOptions | None = None) -> None:
        """Takes no options."""

    async def estimate(self, search: Search, state: int) -> ValueEstimate:
        """Return 0."""
        return ValueEstimate(0.0)


class RolloutOptions(StrictOptions):
    """``depth``: the most actions of one rollout."""

    depth: int = Field(default=20, ge=1)


class RolloutValue:
    """The return of one rollout of the policy to the episode's end, in a fork. Its actions join the tree."""

    Options = RolloutOptions
    name = "rollout"
    needs_world = True

    def __init__(self, options: RolloutOptions | None = None) -> None:
        self._depth = (options or RolloutOptions()).depth

    async def estimate(self, search: Search, state: int) -> ValueEstimate | None:
        """Roll out as long as the live episode would. ``None`` if a budget cuts it or it dies."""
        path: list[int] = []
        while len(path) < self._depth and search.goes_on(state):
            sampled = search.alive(await search.candidates(state, 1))
            if not sampled or not await search.simulate(sampled[0]):
                return None
            path.append(sampled[0])
            state = search.state(sampled[0])
            if ended(search.tree.nodes[sampled[0]]):
                await search.give_up(state)
                break
        return ValueEstimate(0.0, tuple(path))


_QUESTION = (
    "Look at the conversation so far. Will the task be completed successfully if it goes on like this? "
    "Answer with one word, Yes or No."
)


class ModelValue:
    """The model's own probability that the task will succeed, read from the logprob of its answer, yes or no."""

    Options = StrictOptions
    name = "model"
    needs_world = False

    def __init__(self, options: StrictOptions | None = None) -> None:
        """There are no options."""

    async def estimate(self, search: Search, state: int) -> ValueEstimate | None:
        """Sample once. A completion that is neither yes nor no counts as 0.5.

        The report counts these, because a model that reasons first gives no others.
        """
        question = Message(role="user", content=_QUESTION)
        answer = await search.ask((*search.tree.messages(state), question), max_tokens=4)
        if answer is None:
            return None
        probability = self._probability(answer)
        search.log["undecided"] += probability is None
        return ValueEstimate(0.5 if probability is None else probability)

    async def estimate_end(self, search: Search, state: int) -> ValueEstimate | None:
        """0 if the environment emits rewards, which already count; else as for any other state."""
        return ValueEstimate(0.0) if search.gives_rewards else await self.estimate(search, state)

    def _probability(self, answer: Completion) -> float | None:
        word = (answer.message.content or "").strip().lower()
        logprobs = answer.tokens.logprobs if answer.tokens is not None else ()
        sure = math.exp(min(logprobs[0], 0.0)) if logprobs else 1.0
        return sure if word.startswith("yes") else 1.0 - sure if word.startswith("no") else None


class RewardValueOptions(StrictOptions):
    """``reward`` names a reward of the registry. ``unfinished``: for rewards from 0 to 1, and states before an end.

    It moves their value towards 0.5: 0.2 turns 0 into 0.2, and 1 into 0.8. So a bad state before the end is worth more
    than a bad end, and a good one less than a good end. If steps emit no rewards, it also applies at the last turn,
    because an episode in use may have more turns than one in training.
    """

    reward: str = "return"
    reward_options: JsonObject = Field(default_factory=dict)
    unfinished: float = Field(default=0.0, ge=0, le=0.5)


class RewardValue:
    """A reward function's score (a verifier's, say) of the episode up to the state, with the fork's evidence.

    A reward by a command (``pytest -q``) has it run in the fork, where that has a workspace.
    Raises ``ConfigError`` for the reward ``tests``: what it reads is there only when an episode was graded.
    """

    Options = RewardValueOptions
    Parts: ClassVar = {"reward": "rewards"}
    name = "reward"
    needs_world = True

    def __init__(self, options: RewardValueOptions | None = None, *, reward: Reward) -> None:
        if reward.version.partition("-")[0] == "tests":
            raise ConfigError(
                "value 'reward' cannot judge by reward = 'tests', because a task is graded only after its episode: "
                'use another reward, or value = "model" or "verifier"'
            )
        self._reward = reward
        self._unfinished = (options or RewardValueOptions()).unfinished

    async def estimate(self, search: Search, state: int) -> ValueEstimate | None:
        """Judge once; ``None`` if it cannot be judged. Rewards of earlier steps are not counted twice."""
        found = await self.estimate_end(search, state)
        if found is None or not self._unfinished:
            return found
        reward = earned(search, state)
        score = found.value + reward
        return ValueEstimate(score + self._unfinished * (1 - 2 * score) - reward)

    async def estimate_end(self, search: Search, state: int) -> ValueEstimate | None:
        """As ``estimate``, for an episode that has ended."""
        asked = workspace_command(self._reward)
        score = await judged_in_time(search, self._reward, _so_far(search, state, asked))
        return None if score is None else ValueEstimate(score - earned(search, state))


async def judged_in_time(search: Search, reward: Reward, episode: Coroutine[Any, Any, Trajectory]) -> float | None:
    """The score of ``episode`` by ``reward``; ``None`` if it fails, returns none, or a budget's seconds are over.

    The log has the reason.
    """

    async def judge() -> Score:
        with boundary(FailureKind.GRADER, f"value {reward.version}"):
            return await reward(await episode)

    try:
        return (await search.in_time(judge())).reward
    except SpentError:
        return None
    except CaughtFailure as caught:
        search.last_failure = caught.failure
        return None


def earned(search: Search, state: int) -> float:
    """The rewards that were given on the way to ``state``, from the start of the episode on."""
    return search.total(tuple(at for at in search.tree.path(state) if search.tree.nodes[at].sampled))


def built_in(name: str, options: JsonObject) -> ValueFunction:
    """A value function that needs nothing else. Raises ``ConfigError`` for any other name, and for wrong options."""
    kinds: tuple[Any, ...] = NoValue, RolloutValue, ModelValue
    for kind in kinds:
        if kind.name == name:
            return kind(checked(kind.Options, options))
    raise ConfigError(
        f"value {name!r} is none of none, rollout, model: hand over value=..., or let registry.build make the strategy"
    )


async def _so_far(search: Search, state: int, asked: WorkspaceCommand | None) -> Trajectory:
    async with search.world_at(state) as world:
        evidence = await world.evidence()
        if asked is not None:
            if (check := getattr(world, "check", None)) is None:
                raise ConfigError(
                    f"value 'reward': `{asked.command}` judges a workspace, and this environment has none: choose "
                    "another reward"
                )
            # After the evidence, so that files it writes are not in the patch.
            evidence = {**evidence, CHECKED: (await check(asked)).model_dump(mode="json")}
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


class VerifierValueOptions(StrictOptions):
    """Options of the reward ``verifier``, such as ``adapter`` and ``base_url``. ``verifier``: another such reward."""

    model_config = ConfigDict(extra="allow")

    verifier: str = "verifier"

    @property
    def verifier_options(self) -> JsonObject:
        """The options of the verifier reward; the registry validates them."""
        return dict(self.model_extra or {})


class VerifierValue:
    """A verifier's score of the episode up to a state.

    It reads the conversation and needs no fork. States that are judged together, such as a turn's candidates, share the
    computation of their common prefix.
    """

    Options = VerifierValueOptions
    Parts: ClassVar = {"verifier": "rewards"}
    name = "verifier"
    needs_world = False

    def __init__(self, options: VerifierValueOptions | None = None, *, verifier: Reward) -> None:
        self._verifier = verifier

    async def estimate(self, search: Search, state: int) -> ValueEstimate | None:
        """Judge once; ``None`` if it cannot be judged."""
        score = await judged_in_time(search, self._verifier, _conversation(search, state))
        return None if score is None else ValueEstimate(score - earned(search, state))

    async def estimate_end(self, search: Search, state: int) -> ValueEstimate | None:
        """0 if the environment has given a reward, which already counts; else as for any other state."""
        return ValueEstimate(0.0) if earned(search, state) else await self.estimate(search, state)


async def _conversation(search: Search, state: int) -> Trajectory:
    return episode_so_far(search, state, {})
