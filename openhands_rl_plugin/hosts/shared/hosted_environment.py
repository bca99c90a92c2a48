"""An environment behind a host's runtime or tool, and forks of it for search, which answer as the live one would.

It never raises: the host would wait forever for an answer. Replies pass through the host as the content of a tool's
observation (V0: ``MCPObservation``). An action of the policy is a call of ``STEP_TOOL``; the reply is JSON text, so
that the host's event log holds rewards and ends of episodes, too. The first action of an episode is ``RESET_TOOL``,
which costs no completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from openhands_rl_plugin.core.errors import BadEnvironmentError, CaughtFailure, boundary
from openhands_rl_plugin.core.protocols import Environment, Forkable, info_of
from openhands_rl_plugin.core.tree import ClippedWorld
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject, Limits, Message, Observation, Task
from openhands_rl_plugin.rollout.session import reserve_forks, truncation_reward
from openhands_rl_plugin.session.branches import OpenForks

RESET_TOOL = "environment_reset"
STEP_TOOL = "environment_step"


class EnvironmentReply(Observation):
    """One reply of the environment; ``messages`` open the conversation after a reset and continue it after a step.

    ``failure`` is set when the environment could not answer; the agent then ends the episode.
    """

    evidence: JsonObject | None = None
    failure: Failure | None = None


class EnvironmentWorld(ClippedWorld):
    """The live episode, which can only be forked: it is never stepped here."""

    def __init__(self, environment: Forkable, limits: Limits) -> None:
        super().__init__(environment, limits)
        self._forks = OpenForks()

    async def fork(self) -> Environment:
        """A fork of the live episode. Raises what its environment raises."""
        return await self._forks.add(super().fork())

    async def close(self) -> None:
        """Close all forks; those that their users closed are closed again, which environments allow."""
        await self._forks.close()


class HostedEnvironment:
    """One episode of one environment: failures are in its replies, and evidence is collected before it is closed."""

    def __init__(self, environment: Environment, task: Task, *, forks: int = 0) -> None:
        """``forks``: how many the strategy holds at a time."""
        self._environment = environment
        reserve_forks(environment, forks)
        self._task = task
        self._opened = False
        self._closed = False
        self._answered = False
        self._owed: float | None = None
        self.evidence: JsonObject | None = None
        self.failure: Failure | None = None

    def world(self, limits: Limits) -> EnvironmentWorld | None:
        """The episode, for search to fork; ``None`` when the environment cannot be forked."""
        return EnvironmentWorld(self._environment, limits) if isinstance(self._environment, Forkable) else None

    def instruct(self, instruction: str) -> None:
        """Set the instruction of a task without one, before the episode begins."""
        if not self._opened and not self._task.instruction:
            self._task = self._task.model_copy(update={"instruction": instruction})

    async def reply_to(self, tool: str, arguments: Mapping[str, object]) -> EnvironmentReply:
        """Execute ``RESET_TOOL`` or ``STEP_TOOL``. A failure is returned in the reply and kept in ``failure``."""
        try:
            with boundary(FailureKind.ENVIRONMENT, f"environment.{tool.removeprefix('environment_')}"):
                answer = await self._execute(tool, arguments)
            if answer.terminated or answer.truncated:
                await self._gather()
        except CaughtFailure as caught:
            if not self._closed:  # else ``conclude`` has ended the step
                self.failure = caught.failure
            return EnvironmentReply(failure=caught.failure)
        return EnvironmentReply(**dict(answer), evidence=self.evidence)

    async def conclude(self) -> None:
        """Collect the evidence of an episode that did not end by itself, then close. Idempotent.

        One that a limit cut is ended first where its environment pays at the end only (``take_owed``).
        A failed close leaks an episode on the server, but the finished episode stays valid.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._opened and self.evidence is None and self.failure is None:
                await self._cut()
                await self._gather()
        except CaughtFailure as caught:
            self.failure = caught.failure
        finally:
            with suppress(CaughtFailure), boundary(FailureKind.INFRASTRUCTURE, "environment.close"):
                await self._environment.close()

    def take_owed(self) -> float | None:
        """The reward that ``conclude`` earned the last action, once."""
        owed, self._owed = self._owed, None
        return owed

    async def _cut(self) -> None:
        if self._answered:
            self._owed = await truncation_reward(self._environment)

    async def _execute(self, tool: str, arguments: Mapping[str, object]) -> Observation:
        if tool == RESET_TOOL:
            answer = await self._environment.reset(self._task)
            self._opened = True
            if info_of(self._environment).tools:
                raise BadEnvironmentError(
                    "OpenHands' controller passes the text of an answer only, and this environment wants its tools "
                    "called: set react_format = true in [rl] (tools of your own: template in [rl.environment])"
                )
            return answer
        content = arguments.get("content")
        if not isinstance(content, str):
            raise BadEnvironmentError(f"{STEP_TOOL} needs the policy's answer as text in 'content'")
        self._answered = False
        answer = await self._environment.step(Message(role="assistant", content=content))
        self._answered = True
        return answer

    async def _gather(self) -> None:
        with boundary(FailureKind.ENVIRONMENT, "environment.evidence"):
            self.evidence = await self._environment.evidence()
