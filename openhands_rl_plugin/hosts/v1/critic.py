"""A reward of the project as a critic of the SDK: its score is on the events, on the trajectory, and in the store.

The episode of an ``RLAgent`` is judged as it was sampled, with its token ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from openhands.sdk.critic import CriticBase, CriticResult
from openhands.sdk.event import LLMConvertibleEvent, MessageEvent
from pydantic import Field, PrivateAttr, field_validator

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.concurrency import LoopThread
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, GraderError, RLError, boundary
from openhands_rl_plugin.core.judgements import OPINION
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.records import CHECKED
from openhands_rl_plugin.core.templates import last_answer
from openhands_rl_plugin.core.types import FailureKind, JsonObject, Score, StopReason, Trajectory
from openhands_rl_plugin.hosts.shared.sessions import runtime_of
from openhands_rl_plugin.hosts.v1.agent import said_finish, stepping
from openhands_rl_plugin.hosts.v1.workspace import ConversationWorkspace
from openhands_rl_plugin.rollout.scoring import workspace_command

_NOTHING = "there is nothing to judge yet"
CRITIC = "critic"
"""The key of a sampled node's metadata with the critic's result."""


class NoScoreError(RLError):
    """The critic has no score; ``str()`` is one line with the cause."""

    def __init__(self, reward: str, why: str) -> None:
        super().__init__(f"no score of {reward}: {why.partition(chr(10))[0]}")


class RewardCritic(CriticBase):
    """``Agent(critic=RewardCritic(reward="verifier", options={"adapter": "./verifier-v000001"}))``.

    ``reward`` and ``options`` are those of ``[rl.reward]``: a built-in name, a guest's, or ``module:Class``. A reward
    from 0 to 1 is the score. The conversation cannot be paused during a judgement, so one that takes longer than
    ``timeout`` seconds is given up. Then, and after an error, there is no score, never one of 0.

    The command of the reward ``command`` runs in a copy of the agent's sandboxed workspace: nothing that it writes
    stays. ``matching`` compares the agent's last words with a label: of the task, or of ``evidence``.
    """

    reward: str = Field(default="verifier", description="The reward that judges, as in [rl.reward] name.")
    options: dict[str, Any] = Field(default_factory=dict, description="Its options, as in [rl.reward] options.")
    timeout: float = Field(default=20.0, gt=0, description="Seconds after which a judgement is given up.")
    evidence: dict[str, Any] = Field(default_factory=dict, description='Known of the task, such as {"label": "42"}.')

    _reward: Reward | None = PrivateAttr(default=None)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> RewardCritic:
        return type(self).model_validate(self.model_dump())

    @field_validator("reward")
    @classmethod
    def _is_known(cls, reward: str) -> str:
        try:
            registry.target_of("rewards", reward)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return reward

    def evaluate(self, events: Sequence[LLMConvertibleEvent], git_patch: str | None = None) -> CriticResult:
        """The score of the conversation up to its last event. Raises ``NoScoreError``, which the SDK logs."""
        if (judged := stepping.get()) is None:
            raise NoScoreError(self.reward, "it judges the conversations of an RLAgent only")
        session = judged.session
        given: JsonObject = self.evidence if git_patch is None else {**self.evidence, "git_patch": git_patch}
        ends = isinstance(events[-1], MessageEvent) or said_finish(events)
        stop = StopReason.TERMINATED if ends else StopReason.UNFINISHED
        trajectory = session.freeze(stop=stop, evidence={**(session.evidence or {}), **given})
        work = self._judge(trajectory, runtime_of(judged.id))
        judging = asyncio.run_coroutine_threadsafe(work, _loop().loop)
        try:
            # A reward that blocks the loop is not cancelled by it; it ends by itself.
            score = judging.result(self.timeout)
        except TimeoutError:
            raise NoScoreError(self.reward, f"it {self._late()}") from None
        except RLError as error:
            why = error.failure.message if isinstance(error, CaughtFailure) else str(error)
            raise NoScoreError(self.reward, why) from error
        finally:
            judging.cancel()
        if (reward := score.reward) is None or not 0 <= reward <= 1:
            raise NoScoreError(self.reward, _NOTHING if reward is None else f"{reward:g} is no score from 0 to 1")
        version = score.reward_version
        # On the completion that was judged; the last score is stored when the episode ends.
        tree = session.tree
        if tree.head is not None and (node := tree.nodes[tree.head]).sampled:
            node.metadata[CRITIC] = {"score": reward, "reward": reward, "version": version}
        session.opinion = score.model_copy(update={"reward_version": f"{OPINION}critic@{version}"})
        return CriticResult(score=reward, message=version, metadata={"reward": reward, "detail": score.detail})

    def _late(self) -> str:
        return f"took longer than {self.timeout:g} s; raise the critic's timeout"

    async def _judge(self, trajectory: Trajectory, workspace: object) -> Score:
        """The reward's score, with the last answer, the label and the result of its command as evidence."""
        with boundary(FailureKind.GRADER, f"critic.{self.reward}"):
            made = self._reward or await asyncio.to_thread(registry.build, "rewards", self.reward, self.options)
            self._reward = made
            known = {"answer": last_answer(trajectory), "label": trajectory.task.data.get("label")}
            found: JsonObject = {name: value for name, value in known.items() if value is not None}
            if (asked := workspace_command(made)) is not None:
                if not isinstance(workspace, ConversationWorkspace):
                    raise GraderError("its command needs the workspace of an RLAgent in a sandbox (isolation)")
                bounded = asked.model_copy(update={"timeout": min(asked.timeout, self.timeout)})
                ran = await asyncio.to_thread(workspace.check, bounded)
                if ran.timed_out and asked.timeout > self.timeout:
                    raise GraderError(f"its command {self._late()}")
                found[CHECKED] = ran.model_dump(mode="json")
            return await made(trajectory.model_copy(update={"evidence": {**found, **trajectory.evidence}}))


class _OneLine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """The SDK logs a critic's error with its traceback; a cause that is known needs none."""
        if record.exc_info and isinstance(record.exc_info[1], NoScoreError):
            record.exc_info = None
        return True


logging.getLogger("openhands.sdk.agent.critic_mixin").addFilter(_OneLine())


# A loop of their own: a reward that blocks it delays no strategy.
_loop = cache(partial(LoopThread, "rl-critics"))
