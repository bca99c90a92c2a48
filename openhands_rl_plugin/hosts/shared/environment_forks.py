"""Forks of an environment behind OpenHands' runtime, for search: they answer as the live one would."""

from __future__ import annotations

from openhands_rl_plugin.core.clipping import clip
from openhands_rl_plugin.core.protocols import EnvInfo, Environment, Forkable, info_of
from openhands_rl_plugin.core.types import JsonObject, Limits, Message, Observation, Task
from openhands_rl_plugin.hosts.shared.open_forks import OpenForks


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
