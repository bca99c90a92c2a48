"""ONE episode, by the same code for training and for production: observe, decide, act, until a limit is reached."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress

from openhands_rl_plugin.errors import CaughtFailure, boundary
from openhands_rl_plugin.protocols import Environment, Forkable, LLMEngine, Strategy
from openhands_rl_plugin.tree import EpisodeTree
from openhands_rl_plugin.types import (
    EpisodeRequest,
    Failure,
    FailureKind,
    JsonObject,
    Limits,
    Message,
    Observation,
    PolicyRef,
    StopReason,
    StrategySpec,
    Times,
    Trajectory,
)

# A server's tokenizer is not known to the session; four characters a token is the usual rule of thumb for English.
CHARACTERS_PER_TOKEN = 4

_IDS = uuid.UUID("7d4de1c0-6f0b-4b5e-9a6e-5b8a2f3d9c11")


def trajectory_id(request: EpisodeRequest) -> str:
    """The id of the request's trajectory, so that a resumed run can tell what it already has.

    Equal requests give equal ids; run, group, task, sample and attempt tell requests apart.
    """
    key = "\0".join((request.run_id, request.group_id, request.task.id, str(request.sample), str(request.attempt)))
    return str(uuid.uuid5(_IDS, key))


class AgentSession:
    """Plays one episode of one environment. Single use, like the environment it owns."""

    def __init__(
        self,
        *,
        environment: Environment,
        strategy: Strategy,
        strategy_spec: StrategySpec,
        engine: LLMEngine,
        policy: PolicyRef,
        limits: Limits | None = None,
        tools: Sequence[JsonObject] = (),
    ) -> None:
        self._environment = environment
        self._strategy = strategy
        self._spec = strategy_spec
        self._engine = engine
        self._policy = policy
        self._limits = limits or Limits()
        self._world = environment if isinstance(environment, Forkable) else None
        self.tree = EpisodeTree(tools=tools)

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Play until a limit is reached. Failures are part of the result; storage is the caller's concern."""
        limits = request.task.limits or self._limits
        started = time.time()
        try:
            stop, failure = await self._play_until_stopped(request, limits)
            evidence, lost = await self._gather_evidence()
        finally:
            await self._close()
        failure = failure or lost
        return self.tree.freeze(
            request,
            trajectory_id=trajectory_id(request),
            strategy=self._spec,
            policy=self._policy,
            stop=StopReason.ERROR if failure else stop,
            times=Times(started=started, finished=time.time()),
            evidence=evidence,
            failure=failure,
        )

    async def _play_until_stopped(self, request: EpisodeRequest, limits: Limits) -> tuple[StopReason, Failure | None]:
        try:
            async with asyncio.timeout(limits.timeout):
                return await self._play(request, limits), None
        except TimeoutError:
            return StopReason.TIMEOUT, None
        except CaughtFailure as caught:
            return StopReason.ERROR, caught.failure

    async def _gather_evidence(self) -> tuple[JsonObject | None, Failure | None]:
        try:
            with boundary(FailureKind.ENVIRONMENT, "environment.evidence"):
                return await self._environment.evidence(), None
        except CaughtFailure as caught:
            return None, caught.failure

    async def _play(self, request: EpisodeRequest, limits: Limits) -> StopReason:
        with boundary(FailureKind.ENVIRONMENT, "environment.reset"):
            self.tree.observe(clip(await self._environment.reset(request.task), limits))
        while (stop := reached(self.tree, limits)) is None:
            with boundary(FailureKind.MODEL, "strategy.decide"):
                chosen = await self._strategy.decide(self.tree, self._engine, self._world)
            self.tree.commit(chosen)
            with boundary(FailureKind.ENVIRONMENT, "environment.step"):
                self.tree.observe(clip(await self._environment.step(self.tree.action), limits))
        return stop

    async def _close(self) -> None:
        # A failed close leaks a server-side episode but does not spoil the one that was played.
        with suppress(CaughtFailure), boundary(FailureKind.INFRASTRUCTURE, "environment.close"):
            await self._environment.close()


def reached(tree: EpisodeTree, limits: Limits) -> StopReason | None:
    """The reason to stop now, or ``None``."""
    if tree.terminated:
        return StopReason.TERMINATED
    if tree.truncated:
        return StopReason.TRUNCATED
    if tree.turns >= limits.max_turns:
        return StopReason.MAX_TURNS
    if limits.max_prompt_length is not None and context_tokens(tree) > limits.max_prompt_length:
        return StopReason.MAX_TOKENS
    return None


def context_tokens(tree: EpisodeTree) -> int:
    """Length of the next prompt: the recorded ids where there are any, plus an estimate for the text after them."""
    path = tree.path()
    recorded = max((at for at, index in enumerate(path) if tree.nodes[index].tokens), default=-1)
    known = len(tree.context_ids(path[recorded])) if recorded >= 0 else 0
    rest = sum(len(tree.nodes[index].message.content or "") for index in path[recorded + 1 :])
    return known + rest // CHARACTERS_PER_TOKEN


def clip(observation: Observation, limits: Limits) -> Observation:
    """Cut every message to ``max_obs_length`` tokens, and say in the text that and how much was cut."""
    if limits.max_obs_length is None:
        return observation
    longest = limits.max_obs_length * CHARACTERS_PER_TOKEN
    return observation.model_copy(
        update={"messages": tuple(_clip_message(message, longest) for message in observation.messages)}
    )


def _clip_message(message: Message, longest: int) -> Message:
    content = message.content or ""
    if message.role == "system" or len(content) <= longest:
        return message
    cut = len(content) - longest
    return message.model_copy(update={"content": f"{content[:longest]}\n[{cut} characters cut]"})
