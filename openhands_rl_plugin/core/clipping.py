"""Observations cut to the episode's limit: those of the live environment, and those that a search sees in its forks."""

from __future__ import annotations

from openhands_rl_plugin.core.messages import whole_observation
from openhands_rl_plugin.core.protocols import EnvInfo, Environment, Forkable, info_of
from openhands_rl_plugin.core.tree import CHARACTERS_PER_TOKEN
from openhands_rl_plugin.core.types import JsonObject, Limits, Message, Observation, Task


def clip(observation: Observation, limits: Limits) -> Observation:
    """Cut every message to ``max_obs_length`` tokens, and say in the text that and how much was cut.

    An environment in this process may say halves of characters, too, which could not be stored.
    """
    observation = whole_observation(observation)
    if limits.max_obs_length is None:
        return observation
    longest = limits.max_obs_length * CHARACTERS_PER_TOKEN
    return observation.model_copy(
        update={"messages": tuple(_clip_message(message, longest) for message in observation.messages)}
    )


class ClippedWorld:
    """A live episode as a search may see it: it can only be forked, and its forks answer as the session records."""

    def __init__(self, environment: Forkable, limits: Limits) -> None:
        self._environment = environment
        self._limits = limits

    @property
    def info(self) -> EnvInfo:
        """The environment's own."""
        return info_of(self._environment)

    async def fork(self) -> Environment:
        """A copy of the episode as it stands. Raises what its environment raises."""
        return _clipped(await self._environment.fork(), self._limits)


class _ClippedFork:
    def __init__(self, environment: Environment, limits: Limits) -> None:
        self.environment = environment
        self.limits = limits

    async def reset(self, task: Task) -> Observation:
        """Refused: a fork stands in the middle of an episode."""
        raise RuntimeError("a fork continues from where it was made")

    async def step(self, action: Message) -> Observation:
        return clip(await self.environment.step(action), self.limits)

    async def evidence(self) -> JsonObject:
        return await self.environment.evidence()

    async def close(self) -> None:
        await self.environment.close()


class _ForkableClippedFork(_ClippedFork):
    @property
    def info(self) -> EnvInfo:
        """The environment's own."""
        return info_of(self.environment)

    async def fork(self) -> Environment:
        assert isinstance(self.environment, Forkable)
        return _clipped(await self.environment.fork(), self.limits)


def _clipped(environment: Environment, limits: Limits) -> Environment:
    kind = _ForkableClippedFork if isinstance(environment, Forkable) else _ClippedFork
    return kind(environment, limits)


def _clip_message(message: Message, longest: int) -> Message:
    content = message.content or ""
    if message.role == "system" or len(content) <= longest:
        return message
    cut = len(content) - longest
    return message.model_copy(update={"content": f"{content[:longest]}\n[{cut} characters cut]"})
