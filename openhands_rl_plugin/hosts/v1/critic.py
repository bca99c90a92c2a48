"""A reward of the project as a critic of the SDK: its score is on the events, on the trajectory, and in the store.

Of ``RLAgent`` the episode is judged as it was sampled, with its token ids; of any other agent what the events say.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

from openhands.sdk.critic import CriticBase, CriticResult
from openhands.sdk.event import LLMConvertibleEvent, MessageEvent
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.llm import TextContent
from pydantic import Field, PrivateAttr, field_validator

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.concurrency import LoopThread, bound
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, GraderError, RLError, boundary
from openhands_rl_plugin.core.judgements import OPINION
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    FailureKind,
    JsonObject,
    Message,
    PolicyRef,
    Score,
    StopReason,
    StrategySpec,
    Task,
    Times,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.sessions import runtime_of
from openhands_rl_plugin.hosts.v1.critic_evidence import Gathering
from openhands_rl_plugin.hosts.v1.endings import said_finish

CRITIC = "critic"
"""The key of a sampled node's metadata with what the critic said of it."""

VERSION = f"{OPINION}critic@"
"""How the version of a critic's score begins: an opinion, which never takes the place of an outcome."""

_UNKNOWN = PolicyRef(base_model="unknown")
_judged: ContextVar[_Judged | None] = ContextVar("rl_judged_episode", default=None)


class NoScoreError(RLError):
    """The critic has no score; ``str()`` is one line with the cause."""


class _Judged(NamedTuple):
    episode: HostEpisode
    session: str


def judged_in(episode: HostEpisode, session: str) -> AbstractContextManager[object]:
    """Until the end of the block, critics judge the steps of ``episode``, in the workspace of ``session``."""
    return bound(_judged, _Judged(episode, session))


class RewardCritic(CriticBase):
    """``Agent(critic=RewardCritic(reward="verifier", options={"adapter": "./verifier-v000001"}))``.

    ``reward`` and ``options`` are those of ``[rl.reward]``: a built-in name, a guest's, or ``module:Class``. A reward
    in ``reward_range`` becomes a score from 0 to 1. The conversation cannot be paused during a judgement, so one that
    takes longer than ``timeout`` seconds is given up. Then, and after an error, there is no score, never one of 0.

    Commands (of the reward ``command``, and ``tests``) run in a copy of the agent's sandboxed workspace: nothing that
    they write stays. ``matching`` compares the agent's last words with a label: of the task, or of ``evidence``.
    """

    reward: str = Field(default="verifier", description="The reward that judges, as in [rl.reward] name.")
    options: dict[str, Any] = Field(default_factory=dict, description="Its options, as in [rl.reward] options.")
    reward_range: tuple[float, float] = Field(default=(0.0, 1.0), description="Rewards that become scores of 0 and 1.")
    timeout: float = Field(default=20.0, gt=0, description="Seconds after which a judgement is given up.")
    tests: str = Field(default="", description='Command whose exit status is what the reward "tests" reads.')
    evidence: dict[str, Any] = Field(default_factory=dict, description='Known of the task, such as {"label": "42"}.')

    _reward: Reward | None = PrivateAttr(default=None)
    _busy: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> RewardCritic:
        return type(self).model_validate(self.model_dump())

    @field_validator("reward")
    @classmethod
    def _is_known(cls, reward: str) -> str:
        try:
            registry.check("rewards", reward)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return reward

    @field_validator("reward_range")
    @classmethod
    def _is_range(cls, given: tuple[float, float]) -> tuple[float, float]:
        if not given[0] < given[1]:
            raise ValueError("the first has to be below the second")
        return given

    def evaluate(self, events: Sequence[LLMConvertibleEvent], git_patch: str | None = None) -> CriticResult:
        """The score of the conversation up to its last event. Raises ``NoScoreError``, which the SDK logs."""
        judged = _judged.get()
        episode, workspace = (judged.episode, runtime_of(judged.session)) if judged is not None else (None, None)
        given: JsonObject = {**self.evidence, **({"git_patch": git_patch} if git_patch is not None else {})}
        ends = isinstance(events[-1], MessageEvent) or said_finish(events) if events else False
        stop = StopReason.TERMINATED if ends else StopReason.UNFINISHED
        if episode is not None:
            trajectory = episode.freeze(stop=stop, evidence={**(episode.evidence or {}), **given})
        else:
            trajectory = _told_by(events, stop, given)
        score = self._score(trajectory, Gathering(workspace, tests=self.tests, seconds=self.timeout))
        result = self._result(score)
        if episode is not None:
            _note(episode, score, result.score)
        return result

    def _result(self, score: Score) -> CriticResult:
        low, high = self.reward_range
        if score.reward is None:
            raise self._none("there is nothing to judge yet")
        if not low <= score.reward <= high:
            raise self._none(f"{score.reward:g} is outside of reward_range [{low:g}, {high:g}]; widen it")
        return CriticResult(
            score=(score.reward - low) / (high - low),
            message=score.reward_version,
            metadata={"reward": score.reward, "detail": score.detail},
        )

    def _score(self, trajectory: Trajectory, gathering: Gathering) -> Score:
        if not self._busy.acquire(blocking=False):
            raise self._none("an earlier judgement still runs")
        running = asyncio.run_coroutine_threadsafe(self._judge(trajectory, gathering), _loop().loop)
        try:
            # A reward that blocks the loop is not cancelled by it; it ends by itself.
            return running.result(self.timeout)
        except TimeoutError as error:
            raise self._none(f"it took longer than {self.timeout:g} s; raise the critic's timeout") from error
        except RLError as error:
            raise self._none(str(error).partition("\n")[0]) from error

    async def _judge(self, trajectory: Trajectory, gathering: Gathering) -> Score:
        try:
            async with asyncio.timeout(self.timeout):
                with boundary(FailureKind.GRADER, f"critic.{self.reward}"):
                    made = self._reward or await asyncio.to_thread(registry.build, "rewards", self.reward, self.options)
                    self._reward = made
                    found = await asyncio.to_thread(gathering.evidence, made, trajectory)
                    evidence = {**found, **trajectory.evidence}
                    return await made(trajectory.model_copy(update={"evidence": evidence}))
        except CaughtFailure as caught:
            raise GraderError(caught.failure.message) from caught
        finally:
            gathering.give_up()
            self._busy.release()

    def _none(self, cause: str) -> NoScoreError:
        return NoScoreError(f"no score of {self.reward}: {cause}")


class _OneLine(logging.Filter):
    """The SDK logs a critic's error with its traceback; a cause that is known needs none."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass every record, that of a ``NoScoreError`` as one line."""
        if record.exc_info and isinstance(record.exc_info[1], NoScoreError):
            record.exc_info = None
        return True


logging.getLogger("openhands.sdk.agent.critic_mixin").addFilter(_OneLine())


@cache
def _loop() -> LoopThread:
    """A loop of their own: a reward that blocks it delays no strategy."""
    return LoopThread("rl-critics")


def _note(episode: HostEpisode, score: Score, value: float) -> None:
    """Put the score on the answer that was judged, and the last one into the store when the episode ends."""
    if episode.tree.head is not None and (node := episode.tree.nodes[episode.tree.head]).sampled:
        node.metadata[CRITIC] = {"score": value, "reward": score.reward, "version": score.reward_version}
    episode.opinion = score.model_copy(update={"reward_version": f"{VERSION}{score.reward_version}"})


def _told_by(events: Sequence[LLMConvertibleEvent], stop: StopReason, evidence: JsonObject) -> Trajectory:
    """The conversation as its events tell it."""
    tree = EpisodeTree()
    for each in LLMConvertibleEvent.events_to_messages(list(events)):
        message = message_of(each)
        if message.role == "assistant":
            tree.commit(tree.propose(Completion(message=message, policy=_UNKNOWN)))
        else:
            tree.head = tree.append(message)
    asked = next((message.content for message in tree.messages() if message.role == "user"), None)
    return tree.freeze(
        EpisodeRequest(
            task=Task(id="conversation", environment="workspace", instruction=asked or ""),
            run_id=CRITIC,
            group_id=CRITIC,
        ),
        trajectory_id="conversation",
        strategy=StrategySpec(name=CRITIC),
        policy=_UNKNOWN,
        stop=stop,
        times=Times(started=0.0, finished=0.0),
        evidence=evidence,
    )


def message_of(said: SdkMessage) -> Message:
    text = "\n".join(part.text for part in said.content if isinstance(part, TextContent))
    return Message(
        role=said.role,
        content=text or None,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in said.tool_calls or ()
        ),
        tool_call_id=said.tool_call_id,
        name=said.name,
    )
