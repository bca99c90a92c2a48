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
from typing import Any, Self

from openhands.sdk.critic import CriticBase, CriticResult
from openhands.sdk.event import LLMConvertibleEvent, MessageEvent
from pydantic import Field, PrivateAttr, model_validator

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.concurrency import LoopThread, bound
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, GraderError, RLError, boundary
from openhands_rl_plugin.core.judgements import OPINION
from openhands_rl_plugin.core.messages import last_answer
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.records import CHECKED, CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import FailureKind, JsonObject, Score, StopReason, StrategySpec, Trajectory
from openhands_rl_plugin.hosts.shared.sessions import runtime_of
from openhands_rl_plugin.hosts.v1.conversations import said_finish
from openhands_rl_plugin.hosts.v1.workspace import ConversationWorkspace
from openhands_rl_plugin.rollout.scoring import workspace_command
from openhands_rl_plugin.session.session import Session
from openhands_rl_plugin.trajectories.exchange.episodes import UNKNOWN, finished, policy_of, task_of
from openhands_rl_plugin.trajectories.exchange.events import V1_EVENTS, read_events

CRITIC = "critic"
"""The key of a sampled node's metadata with what the critic said of it."""

_judged: ContextVar[tuple[Session, str] | None] = ContextVar("rl_judged_episode", default=None)


class NoScoreError(RLError):
    """The critic has no score; ``str()`` is one line with the cause."""


def judged_in(episode: Session, session: str) -> AbstractContextManager[object]:
    """Until the end of the block, critics judge the steps of ``episode``, in the workspace of ``session``."""
    return bound(_judged, (episode, session))


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

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> RewardCritic:
        return type(self).model_validate(self.model_dump())

    @model_validator(mode="after")
    def _is_usable(self) -> Self:
        if not self.reward_range[0] < self.reward_range[1]:
            raise ValueError("reward_range: the first has to be below the second")
        try:
            registry.check("rewards", self.reward)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def evaluate(self, events: Sequence[LLMConvertibleEvent], git_patch: str | None = None) -> CriticResult:
        """The score of the conversation up to its last event. Raises ``NoScoreError``, which the SDK logs."""
        if not events:
            raise NoScoreError(f"no score of {self.reward}: there is nothing to judge yet")
        episode, session = _judged.get() or (None, "")
        given: JsonObject = {**self.evidence, **({"git_patch": git_patch} if git_patch is not None else {})}
        ends = events and (isinstance(events[-1], MessageEvent) or said_finish(events))
        stop = StopReason.TERMINATED if ends else StopReason.UNFINISHED
        if episode is not None:
            trajectory = episode.freeze(stop=stop, evidence={**(episode.evidence or {}), **given})
        else:
            tree = read_events([event.model_dump(mode="json") for event in events], policy_of(None))
            task = task_of(tree.messages(), "workspace")
            read = finished(tree, V1_EVENTS, task, stop, evidence=given).trajectory
            # The evidence of what is imported would prove nothing.
            trajectory = read.model_copy(update={"strategy": StrategySpec(name=UNKNOWN)})
        (low, high), given_up = self.reward_range, threading.Event()
        judging = asyncio.run_coroutine_threadsafe(self._judge(trajectory, runtime_of(session), given_up), _loop().loop)
        try:
            # A reward that blocks the loop is not cancelled by it; it ends by itself.
            score = judging.result(self.timeout)
        except TimeoutError:
            why = f"it took longer than {self.timeout:g} s; raise the critic's timeout"
        except RLError as error:
            why = error.failure.message if isinstance(error, CaughtFailure) else str(error)
        else:
            reward, version, why = score.reward, score.reward_version, "there is nothing to judge yet"
            if reward is not None and low <= reward <= high:
                value = (reward - low) / (high - low)
                if episode is not None:
                    # On the completion that was judged; the last score is stored when the episode ends.
                    if episode.tree.head is not None and (node := episode.tree.nodes[episode.tree.head]).sampled:
                        node.metadata[CRITIC] = {"score": value, "reward": reward, "version": version}
                    episode.opinion = score.model_copy(update={"reward_version": f"{OPINION}critic@{version}"})
                return CriticResult(score=value, message=version, metadata={"reward": reward, "detail": score.detail})
            if reward is not None:
                why = f"{reward:g} is outside of reward_range [{low:g}, {high:g}]; widen it"
        finally:
            given_up.set()
            judging.cancel()
        raise NoScoreError(f"no score of {self.reward}: {why.partition(chr(10))[0]}")

    async def _judge(self, trajectory: Trajectory, workspace: object, given_up: threading.Event) -> Score:
        with boundary(FailureKind.GRADER, f"critic.{self.reward}"):
            made = self._reward or await asyncio.to_thread(registry.build, "rewards", self.reward, self.options)
            self._reward = made
            found = await asyncio.to_thread(self._gather, made, trajectory, workspace, given_up)
            return await made(trajectory.model_copy(update={"evidence": {**found, **trajectory.evidence}}))

    def _gather(self, reward: Reward, judged: Trajectory, workspace: object, given_up: threading.Event) -> JsonObject:
        """The last answer, the label, and the commands that the reward needs. Blocks; raises ``GraderError``."""

        def run(asked: WorkspaceCommand) -> CommandEvidence:
            if not isinstance(workspace, ConversationWorkspace):
                raise GraderError("its command needs the workspace of an RLAgent in a sandbox (isolation)")
            bounded = asked.model_copy(update={"timeout": min(asked.timeout, self.timeout)})
            ran = workspace.check(bounded, given_up)
            if ran.timed_out and asked.timeout > self.timeout:
                raise GraderError(f"its command took longer than {self.timeout:g} s; raise the critic's timeout")
            return ran

        known = {"answer": last_answer(judged), "label": judged.task.data.get("label")}
        found: JsonObject = {name: value for name, value in known.items() if value is not None}
        if (asked := workspace_command(reward)) is not None:
            found[CHECKED] = run(asked).model_dump(mode="json")
        if self.tests:
            ran = run(WorkspaceCommand(command=self.tests))
            if ran.error:
                raise GraderError(f"the tests could not be run: {ran.error}")
            found["test_result"] = {"report": {"resolved": ran.exit_code == 0}, "test_output": ran.output}
        return found


class _OneLine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """The SDK logs a critic's error with its traceback; a cause that is known needs none."""
        if record.exc_info and isinstance(record.exc_info[1], NoScoreError):
            record.exc_info = None
        return True


logging.getLogger("openhands.sdk.agent.critic_mixin").addFilter(_OneLine())


@cache
def _loop() -> LoopThread:
    """A loop of their own: a reward that blocks it delays no strategy."""
    return LoopThread("rl-critics")
