"""An environment behind a host's runtime or tool, and forks of it for search, which answer as the live one would.

It never raises: the host would wait forever for an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any

from openhands_rl_plugin.core.concurrency import shielded
from openhands_rl_plugin.core.errors import BadEnvironmentError, CaughtFailure, InfrastructureError, boundary
from openhands_rl_plugin.core.protocols import EnvInfo, Environment, Forkable, info_of
from openhands_rl_plugin.core.tree import clip
from openhands_rl_plugin.core.types import Failure, FailureKind, JsonObject, Limits, Message, Observation, Task
from openhands_rl_plugin.hosts.shared.episode import RESET_TOOL, STEP_TOOL, EnvironmentReply
from openhands_rl_plugin.rollout.session import reserve_forks, truncation_reward

# Seconds for a fork to open, and to close: copying a workspace and starting its shell take one or two.
_TIMEOUT = 10.0


class OpenForks:
    """Forks that are being created or in use."""

    def __init__(self) -> None:
        self._making: set[asyncio.Task[Any]] = set()
        self._open: set[Environment] = set()
        self._closed = False

    async def add[E: Environment](self, make: Coroutine[Any, Any, E]) -> E:
        """Wait for a fork. If the caller is cancelled, ``close`` closes the fork.

        Raises ``InfrastructureError`` after ``close``.
        """
        if self._closed:
            make.close()
            raise InfrastructureError("the search has ended: no more forks")
        task = asyncio.create_task(self._made(make))
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        return await asyncio.shield(task)

    def closed(self, branch: Environment) -> None:
        """A fork was closed by its user."""
        self._open.discard(branch)

    async def close(self) -> None:
        """Close all forks, also those that are still being created. One that does not open or close in time is
        abandoned. Closing continues even when the caller is cancelled."""
        await shielded(self._close_all())

    async def _close_all(self) -> None:
        self._closed = True
        if self._making:
            await asyncio.wait(self._making, timeout=_TIMEOUT)
        await asyncio.gather(*(_close(branch) for branch in list(self._open)))

    async def _made[E: Environment](self, make: Coroutine[Any, Any, E]) -> E:
        branch = await make
        self._open.add(branch)
        return branch


async def _close(branch: Environment) -> None:
    with suppress(CaughtFailure), boundary(FailureKind.INFRASTRUCTURE, "search.close"):
        async with asyncio.timeout(_TIMEOUT):
            await branch.close()


class EnvironmentWorld:
    """The live episode, which can only be forked: it is never stepped here."""

    def __init__(self, environment: Forkable, limits: Limits) -> None:
        self._environment = environment
        self._limits = limits
        self._branches = OpenForks()

    @property
    def info(self) -> EnvInfo:
        """The environment's own."""
        return info_of(self._environment)

    async def fork(self) -> Environment:
        """A fork of the live episode. Raises what its environment raises."""
        return await self.branch(self._environment)

    async def branch(self, environment: Forkable) -> Environment:
        """A fork of ``environment``, which may be a fork itself."""
        return await self._branches.add(self._fork(environment))

    async def step(self, environment: Environment, action: Message) -> Observation:
        """As the runtime forwards an action and the episode clips the observation."""
        sent = Message(role="assistant", content=action.content or "")
        return clip(await environment.step(sent), self._limits)

    def closed(self, branch: Environment) -> None:
        """A fork was closed by its user."""
        self._branches.closed(branch)

    async def close(self) -> None:
        """Close all forks."""
        await self._branches.close()

    async def _fork(self, environment: Forkable) -> EnvironmentBranch:
        fork = await environment.fork()
        branch = ForkableEnvironmentBranch if isinstance(fork, Forkable) else EnvironmentBranch
        return branch(self, fork)


class EnvironmentBranch:
    """One fork."""

    def __init__(self, world: EnvironmentWorld, environment: Environment) -> None:
        self.world = world
        self.environment = environment

    async def reset(self, task: Task) -> Observation:
        """Not supported: a fork begins in the middle of an episode."""
        raise RuntimeError("a fork cannot be reset: it continues an episode")

    async def step(self, action: Message) -> Observation:
        """As the live environment would answer."""
        return await self.world.step(self.environment, action)

    async def evidence(self) -> JsonObject:
        """The fork's own."""
        return await self.environment.evidence()

    async def close(self) -> None:
        """Release the fork."""
        self.world.closed(self)
        await self.environment.close()


class ForkableEnvironmentBranch(EnvironmentBranch):
    """A fork that can be forked again."""

    @property
    def info(self) -> EnvInfo:
        """The environment's own."""
        return info_of(self.environment)

    async def fork(self) -> Environment:
        """A fork of this fork."""
        assert isinstance(self.environment, Forkable)
        return await self.world.branch(self.environment)


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
        return EnvironmentReply(
            messages=answer.messages,
            reward=answer.reward,
            terminated=answer.terminated,
            truncated=answer.truncated,
            evidence=self.evidence,
        )

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
