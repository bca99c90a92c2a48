"""One episode in a session of OpenHands' controller: its tree, its limits, and why it ended.

A runner binds it for the agent that it creates next; without one the agent creates its own. Nothing here imports
OpenHands.

An environment's replies pass through OpenHands as the content of a tool's observation (V0: ``MCPObservation``). An
action of the policy is a call of ``STEP_TOOL``; the reply is JSON text, so that the host's event log holds rewards and
ends of episodes, too. The first action of an episode is ``RESET_TOOL``, which costs no completion.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Protocol, runtime_checkable

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.concurrency import background, bound
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, StorageError
from openhands_rl_plugin.core.protocols import Forkable, LLMEngine, Strategy
from openhands_rl_plugin.core.records import PROMPT, EpisodeEnd, EpisodeGrowth, EpisodeStart, trajectory_id
from openhands_rl_plugin.core.tree import EpisodeTree, clip
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Failure,
    FailureKind,
    Frozen,
    JsonObject,
    Limits,
    Message,
    Observation,
    PolicyRef,
    SamplingParams,
    Score,
    StopReason,
    StrategySpec,
    Times,
    Tokens,
    Trajectory,
)
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.rollout.journal import EpisodeJournal, EpisodeSink
from openhands_rl_plugin.rollout.session import context_tokens, reached

RESET_TOOL = "environment_reset"
STEP_TOOL = "environment_step"


class EnvironmentReply(Frozen):
    """One reply of the environment; ``messages`` open the conversation after a reset and continue it after a step.

    ``failure`` is set when the environment could not answer; the agent then ends the episode.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    evidence: JsonObject | None = None
    failure: Failure | None = None


# Seconds between checks whether the loop was closed.
_CHECK_INTERVAL = 1.0


@runtime_checkable
class _TakesScores(Protocol):
    async def add_scores(self, scores: Sequence[Score], /) -> None: ...


class LoopBoundStorage:
    """An ``EpisodeSink`` that calls ``storage`` on its own event loop ``loop``.

    Raises what the storage raises, and ``InfrastructureError`` when that loop is closed before the call ends.
    """

    def __init__(self, storage: EpisodeSink, loop: asyncio.AbstractEventLoop) -> None:
        self._storage = storage
        self._loop = loop

    async def add(self, trajectory: Trajectory) -> None:
        """As in ``TrajectoryStorage``."""
        await self._on_loop(self._storage.add(trajectory))

    async def begin(self, start: EpisodeStart) -> None:
        """As in ``TrajectoryStorage``."""
        await self._on_loop(self._storage.begin(start))

    async def grow(self, growth: EpisodeGrowth) -> None:
        """As in ``TrajectoryStorage``."""
        await self._on_loop(self._storage.grow(growth))

    async def end(self, end: EpisodeEnd) -> None:
        """As in ``TrajectoryStorage``."""
        await self._on_loop(self._storage.end(end))

    async def add_scores(self, scores: Sequence[Score]) -> None:
        """As in ``TrajectoryStorage``; nothing where the storage is a pipe to another process."""
        if isinstance(self._storage, _TakesScores):
            await self._on_loop(self._storage.add_scores(scores))

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """As in ``TrajectoryStorage``."""
        return await self._on_loop(self._storage.drop(trajectory_ids))

    async def _on_loop[T](self, call: Coroutine[Any, Any, T]) -> T:
        if self._loop is asyncio.get_running_loop():
            return await call
        if not self._loop.is_closed():
            answer = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))
            # A stopped loop drops its tasks without an error.
            while not (await asyncio.wait([answer], timeout=_CHECK_INTERVAL))[0] and not self._loop.is_closed():
                pass
            if answer.done():
                return answer.result()
        call.close()
        raise InfrastructureError("the event loop of this episode was closed")


LAST_ERROR = "last_error"
"""The key of OpenHands' own last error in an episode's evidence."""

_SEEDS = 2**31
_LARGEST_ID = 2**63 - 1


class SessionWorld(Forkable, Protocol):
    """The live session during one decision, for strategies that search in forks of it."""

    async def close(self) -> None:
        """Close all forks."""
        ...


class HostEpisode:
    """The state that ``RLAgent`` and its runner share. Modified by one session and frozen at its end.

    ``environment_mode``: the model sees only the environment's observations; else it works in a workspace with the
    tools of OpenHands' CodeAct agent, in ``workspace`` if given. ``base_model`` is the served name of the model without
    an adapter, ``token_ids`` whether token ids are requested from the server. ``error`` must stop the whole run; it is
    kept here because OpenHands' controller handles any exception by ending only the session. ``opinion``: what a critic
    said of it last, stored at its end.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        settings: RLSettings,
        *,
        strategy: Strategy,
        strategy_spec: StrategySpec,
        base_model: str,
        environment_mode: bool,
        workspace: TaskWorkspace | None = None,
        token_ids: bool = True,
    ) -> None:
        self.request = request
        self.settings = settings
        self.strategy = strategy
        self.strategy_spec = strategy_spec
        self.base_model = base_model
        self.environment_mode = environment_mode
        self.workspace = workspace
        self.token_ids = token_ids
        self.limits = request.task.limits or _limits_of(settings, environment_mode)
        # The length of an answer is bounded by the limits, which may be the task's own.
        self.sampling = overlay(settings.sampling_params().model_copy(update={"max_tokens": None}), request.sampling)
        self.tree = EpisodeTree(clock=time.time)
        self.turns = 0
        self.stop: StopReason | None = None
        self.failure: Failure | None = None
        self.evidence: JsonObject | None = None
        self.error: StorageError | ConfigError | None = None
        self.opinion: Score | None = None
        self.started = time.time()
        self._journal: EpisodeJournal | None = None
        self._sink: LoopBoundStorage | None = None
        self._checked_nodes = 0
        self._wrong_tokens = False

    async def decide(self, engine: LLMEngine, world: SessionWorld | None) -> int:
        """The node that the strategy chooses to execute. All forks of ``world`` are closed, also after an error."""
        self.tree.turns_left = self.limits.max_turns - max(self.turns, self.tree.turns)
        self.tree.longest_prompt = self.limits.max_prompt_length
        try:
            return await self.strategy.decide(self.tree, engine, world)
        finally:
            if world is not None:
                await world.close()

    def end_here(self, stop: StopReason) -> None:
        """Set why the episode ended. A last answer that search simulated is marked as a real one."""
        self.stop = stop
        last = self.tree.nodes[self.tree.head] if self.tree.head is not None else None
        if last is not None and last.sampled and last.simulated:
            last.reward, last.simulated = None, False

    def keep_in(self, storage: EpisodeSink, loop: asyncio.AbstractEventLoop) -> None:
        """Store the episode while it runs. ``storage`` is used on ``loop`` only."""
        self._keep_in(LoopBoundStorage(storage, loop))

    def keep_beside(self, other: HostEpisode) -> None:
        """Store the episode while it runs, where ``other`` is stored; nowhere if that one is not."""
        if other._sink is not None:
            self._keep_in(other._sink)

    def _keep_in(self, sink: LoopBoundStorage) -> None:
        start = EpisodeStart.for_request(
            self.request, strategy=self.strategy_spec, policy=self._policy, started=self.started
        )
        self._sink, self._journal = sink, EpisodeJournal(sink, start)

    def keep(self) -> None:
        """Store the nodes since the last call. Blocks: do not call it on the storage's event loop or that of
        ``background``. Raises ``StorageError``."""
        if self._journal is not None:
            background().wait_for(self.keep_up())

    async def keep_up(self) -> None:
        """``keep`` for callers on the loop of ``background``, where strategies modify the tree."""
        if self._journal is None:
            return
        self._drop_wrong_tokens()
        self._note_prompt()
        try:
            await self._journal.keep(self.tree)
        except StorageError as error:
            self.error = error
            raise

    async def end(self, trajectory: Trajectory) -> None:
        """Close the episode in the storage, if it is stored while it runs. Raises ``StorageError``."""
        if self._journal is not None:
            await self._in_background(self._journal.end(trajectory))
        if self._sink is not None and self.opinion is not None:
            score = self.opinion.model_copy(update={"trajectory_id": trajectory.id})
            await self._in_background(self._sink.add_scores((score,)))

    async def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, background().loop))

    def refuse(self, error: ConfigError) -> None:
        """Fail the episode with an error of the settings, which also stops the run."""
        self.error = error
        self.failure = Failure(kind=FailureKind.ENVIRONMENT, message=str(error)[:500], boundary="strategy.decide")

    def observe(self, reply: EnvironmentReply) -> None:
        """Add an environment's reply, cut to ``max_obs_length``."""
        answer = Observation(
            messages=reply.messages, reward=reply.reward, terminated=reply.terminated, truncated=reply.truncated
        )
        self.tree.observe(clip(answer, self.limits))
        if reply.evidence is not None:
            self.evidence = reply.evidence
        if reply.failure is not None:
            self.failure = reply.failure

    def pay(self, reward: float) -> None:
        """Pay the last action of an episode that a limit cut, also one that it interrupted."""
        if self.tree.turns:
            self.tree.pay(reward)

    def limit_reached(self) -> StopReason | None:
        """The limit that was reached, or ``None``. Answers that OpenHands could not parse count as turns."""
        if (stop := reached(self.tree, self.limits.model_copy(update={"max_prompt_length": None}))) is not None:
            return stop
        if self.turns >= self.limits.max_turns:
            return StopReason.MAX_TURNS
        longest = self.limits.max_prompt_length
        if longest is not None and context_tokens(self.tree) > longest:
            return StopReason.MAX_TOKENS
        if self.limits.timeout is not None and time.time() - self.started > self.limits.timeout:
            return StopReason.TIMEOUT
        return None

    def sampling_for(self, asked: SamplingParams | None, number: int) -> SamplingParams:
        """The sampling parameters of a completion: the strategy's, else the request's, else the settings'.

        Every call has its own seed: the strategy's or the episode's plus ``number``.
        """
        wanted = overlay(self.sampling, asked or SamplingParams())
        seed = self.request.seed if wanted.seed is None else wanted.seed
        longest = min(wanted.max_tokens or self.limits.max_response_length, self.limits.max_response_length)
        return wanted.model_copy(update={"max_tokens": longest, "seed": (seed + number) % _SEEDS})

    def freeze(
        self, *, stop: StopReason | None = None, failure: Failure | None = None, evidence: JsonObject | None = None
    ) -> Trajectory:
        """The episode as a trajectory. With a failure it ends as an error; the agent's own failure takes precedence,
        because it came first and says more. ``stop`` and ``evidence`` take precedence over the agent's."""
        failure = self.failure = self.failure or failure or self._drop_wrong_tokens()
        self._note_prompt()
        return self.tree.freeze(
            self.request,
            trajectory_id=trajectory_id(self.request),
            strategy=self.strategy_spec,
            policy=self._policy,
            stop=StopReason.ERROR if failure else stop or self.stop or StopReason.NO_ACTION,
            times=Times(started=self.started, finished=time.time()),
            evidence=self.evidence if evidence is None else evidence,
            failure=failure,
        )

    def _note_prompt(self) -> None:
        if self.tree.nodes and not self.environment_mode and self.settings.workspace.is_compact:
            self.tree.nodes[0].metadata[PROMPT] = self.settings.workspace.prompt

    def _drop_wrong_tokens(self) -> Failure | None:
        """Drop all token ids if any is not a whole number: no turn of the episode can be trained on without the others.

        Checks the nodes since the last call.
        """
        new, self._checked_nodes = self.tree.nodes[self._checked_nodes :], len(self.tree.nodes)
        self._wrong_tokens |= not all(_whole_numbers(node.tokens) for node in new if node.tokens is not None)
        if not self._wrong_tokens:
            return None
        for node in self.tree.nodes:
            node.tokens = None
        message = "the model server's token ids are not whole numbers"
        return Failure(kind=FailureKind.MODEL, message=message, boundary="openhands.recorder")

    @property
    def _policy(self) -> PolicyRef:
        return PolicyRef.from_served_name(self.base_model, self.request.served_model or self.base_model)


_BOUND: ContextVar[HostEpisode | None] = ContextVar("rl_controller_episode", default=None)


def bind_episode(episode: HostEpisode) -> AbstractContextManager[HostEpisode]:
    """An ``RLAgent`` that is created in this context runs ``episode``."""
    return bound(_BOUND, episode)


def current_episode() -> HostEpisode | None:
    """The episode bound in this context."""
    return _BOUND.get()


def overlay(below: SamplingParams, above: SamplingParams) -> SamplingParams:
    """``above``, with values from ``below`` where it has none."""
    given = {name: value for name, value in above if value not in (None, ())}
    return below.model_copy(update=given)


def _whole_numbers(tokens: Tokens) -> bool:
    return all(type(id) is int and 0 <= id <= _LARGEST_ID for id in (*tokens.prompt_ids, *tokens.sampled_ids))


def _limits_of(settings: RLSettings, environment_mode: bool) -> Limits:
    limits = settings.limits()
    if environment_mode or settings.max_prompt_length != RLSettings.model_fields["max_prompt_length"].default:
        return limits
    # The default is made for short conversations, and the CodeAct agent's own instructions are longer. So it is no
    # limit in a workspace, even where it is written out: in a copied example, or in the settings of a worker process.
    return limits.model_copy(update={"max_prompt_length": None})
