"""One episode of a host: its completions are sampled, searched, recorded and stored here.

A runner binds a session for the agent that it creates next; without one the agent creates its own. Nothing here imports
OpenHands.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.concurrency import Job, background, bound
from openhands_rl_plugin.core.errors import boundary
from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.core.protocols import Strategy
from openhands_rl_plugin.core.records import PROMPT
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    FailureKind,
    JsonObject,
    Limits,
    PolicyRef,
    SamplingParams,
    Score,
    StopReason,
    StrategySpec,
    Trajectory,
    Usage,
)
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.models.engines.seeded import merge_sampling
from openhands_rl_plugin.rollout.forks import World
from openhands_rl_plugin.rollout.journal import EpisodeSink
from openhands_rl_plugin.rollout.session import Episode
from openhands_rl_plugin.session.conversation import WorkspaceConversation
from openhands_rl_plugin.session.engine import SessionEngine
from openhands_rl_plugin.session.responses import RecordedChoice
from openhands_rl_plugin.session.sampled_texts import SampledCalls, SampledTexts
from openhands_rl_plugin.session.storage import bound_to
from openhands_rl_plugin.session.token_id_text import Json, NodeTokens, canonical
from openhands_rl_plugin.session.turns import EpisodeOver, Turn
from openhands_rl_plugin.session.upstream import Upstream

_SEEDS = 2**31


class Session(Episode):
    """One episode. A host asks it for each completion; its runner freezes it at the end.

    ``environment_mode``: the model sees only the environment's observations; else it works in a workspace with the
    tools of OpenHands' CodeAct agent, in ``workspace`` if given. ``base_model`` is the served name of the model without
    an adapter, ``token_ids`` whether token ids are requested from the server. ``error`` must stop the whole run; it is
    kept here because OpenHands' controller handles any exception by ending only the session. ``opinion``: what a critic
    said of it last, stored at its end.

    A host may set: ``note``, metadata of the next answers; ``world``, which makes the forks for the decision on a
    request; ``reads``, its own parser, for strategies that choose (document -> why it cannot read it, or ``None``);
    ``samples`` to false where the host's sampling and limits hold, not the session's; ``calls``, those that were
    sampled, to put them back into its prompts; ``exact`` to false where calls in the text stay in its own form.
    """

    follows: type[WorkspaceConversation] = WorkspaceConversation
    """How the host's prompts follow the tree."""

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
        super().__init__(
            request,
            strategy=strategy,
            strategy_spec=strategy_spec,
            policy=PolicyRef.from_served_name(base_model, request.served_model or base_model),
            limits=_limits_of(settings, environment_mode),
        )
        self.settings = settings
        self.base_model = base_model
        self.environment_mode = environment_mode
        self.workspace = workspace
        self.token_ids = token_ids
        # The length of an answer is bounded by the limits, which may be the task's own.
        self.sampling = merge_sampling(
            request.sampling, settings.sampling_params().model_copy(update={"max_tokens": None})
        )
        self.opinion: Score | None = None
        self.note: JsonObject = {}
        self.world: Callable[[Turn, SessionEngine], World | None] | None = None
        self.reads: Callable[[Json], str | None] | None = None
        self.samples = True
        self.exact = True
        self.calls: SampledCalls | None = None
        self.said = SampledTexts()
        self._engine: SessionEngine | None = None
        self._follow()
        self._turn = asyncio.Lock()
        self._deciding: tuple[Job[Json] | None, float] = None, 0.0
        self._stopped = -math.inf
        self._stopping = threading.Lock()

    def connect(self, upstream: Upstream) -> None:
        """Sample from ``upstream``, in the middle of the episode, too."""
        if self._engine is not None:
            self._engine.upstream = upstream
        else:
            self._engine = SessionEngine(self, upstream)

    def resume(self, unfinished: Trajectory, storage: EpisodeSink | None) -> bool:
        """As ``Episode.resume``."""
        goes_on = super().resume(unfinished, storage)
        self._follow()
        return goes_on

    def _follow(self) -> None:
        self.ids = NodeTokens(self.tree)
        self._conversation = self.follows(self.tree, self.said)

    def policy_of(self, served: str) -> PolicyRef:
        """The weights that a server knows by the name ``served``."""
        return PolicyRef.from_served_name(self.base_model, served)

    def completion(
        self,
        choice: RecordedChoice,
        *,
        after: int | None,
        served: str,
        usage: Usage,
        sampling: SamplingParams,
        metadata: JsonObject,
    ) -> Completion:
        """A model server's answer to the prompt up to the node ``after``: every node of a session is made of one."""
        tokens = None
        if choice.prompt is not None:
            tokens = self.ids.read(after, canonical(choice.prompt), choice.sampled, choice.logprobs)
        return Completion.model_construct(
            message=choice.message,
            tokens=tokens,
            finish_reason=choice.finish_reason,
            usage=usage,
            policy=self.policy_of(served),
            sampling=sampling,
            metadata=metadata,
        )

    def answer(self, body: Json, at: float = 0.0) -> Json:
        """As ``complete``, for a host that blocks. ``at``: when, in the host's own count, such as the id of an event.

        Also raises ``asyncio.CancelledError`` after ``cancel``.
        """
        with self._stopping:
            if at <= self._stopped:
                raise asyncio.CancelledError
            job = background().start(self.complete(body))
            self._deciding = job, at
        return job.result()

    def cancel(self, until: float | None = None) -> None:
        """End the decision that is under way, and wait for its end. With ``until`` only one that began at that time or
        before, and those that still come. Blocks."""
        with self._stopping:
            self._stopped = max(self._stopped, -math.inf if until is None else until)
            job, at = self._deciding
        if job is not None and (until is None or at <= until):
            job.cancel()

    async def complete(self, body: Json) -> Json:
        """The strategy's answer to a host's chat request, as a chat completion, which is stored before it is returned.

        What the host executed, condensed or rewrote shows in its prompt, which the tree follows. On the loop of
        ``background``. Raises ``EpisodeOver`` at a limit, ``CaughtFailure`` when no answer can be had (its last cause
        is the ``ServerError``, if there is one; the same request may come again), ``ConfigError``, ``StorageError``.
        """
        engine, conversation, tree = self._engine, self._conversation, self.tree
        assert engine is not None
        async with self._turn:
            wire = body["messages"] if self.calls is None else self.calls.put_back(body["messages"])
            rewritten = conversation.follow(wire)
            if not self.environment_mode and self.settings.workspace.is_compact:
                tree.nodes[0].metadata[PROMPT] = self.settings.workspace.prompt
            tree.tools = tree.tools or tuple(body.get("tools") or ())
            if self.samples and (stop := self.stop or self.limit_reached()) is not None:
                raise EpisodeOver(stop)
            turn = Turn(body, wire, tree.messages(), rewritten)
            engine.open(turn)
            turns = self.turns
            try:
                chosen = await self.decide(engine, self.world(turn, engine) if self.world is not None else None)
            finally:
                engine.close(decided=self.turns > turns)
            conversation.acted(chosen)
            if self.calls is not None:
                self.calls.add(tree.nodes[chosen].message)
            await self.keep_up()
            return engine.document(chosen)

    async def aside(self, body: Json, kind: str, upstream: Upstream) -> Json:
        """A completion of ``upstream`` beside the episode, such as a summary, sampled as the host asks.

        Raises as ``complete``.
        """
        assert self._engine is not None
        with boundary(FailureKind.MODEL, "session.aside"):
            completion = await self._engine.ask(body, body["messages"], None, upstream=upstream)
        self.tree.aside([to_message(message) for message in body["messages"]], completion, kind)
        await self.keep_up()
        document: Any = completion.metadata["response"]
        return document

    def unread(self, why: str) -> None:
        """The host could not read the last answer, and goes on without it."""
        tree = self.tree
        assert tree.head is not None
        tree.nodes[tree.head].metadata["malformed"] = why
        self._conversation.unread(tree.head)

    def end_here(self, stop: StopReason) -> None:
        """Set why the episode ended. A last answer that search simulated is marked as a real one."""
        self.stop = stop
        last = self.tree.nodes[self.tree.head] if self.tree.head is not None else None
        if last is not None and last.sampled and last.simulated:
            last.reward, last.simulated = None, False

    def keep_in(self, storage: EpisodeSink, loop: asyncio.AbstractEventLoop) -> None:
        """Store the episode while it runs. ``storage`` is used on ``loop`` only."""
        self.store_in(bound_to(storage, loop))

    @property
    def sink(self) -> Any:
        """Where it is stored while it runs; ``None`` for nowhere."""
        return self._journal.storage if self._journal is not None else None

    async def end(self, trajectory: Trajectory) -> None:
        """Close the episode in the storage, if it is stored while it runs. Raises ``StorageError``."""
        await self._in_background(super().end(trajectory))
        if self.sink is not None and self.opinion is not None:
            score = self.opinion.model_copy(update={"trajectory_id": trajectory.id})
            await self._in_background(self.sink.add_scores((score,)))

    async def _in_background[T](self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, background().loop))

    def sampling_for(self, asked: SamplingParams | None, number: int) -> SamplingParams:
        """The sampling parameters of a completion: the strategy's, else the request's, else the settings'.

        Every call has its own seed: the strategy's or the episode's plus ``number``.
        """
        wanted = merge_sampling(asked, self.sampling)
        seed = self.request.seed if wanted.seed is None else wanted.seed
        longest = min(wanted.max_tokens or self.limits.max_response_length, self.limits.max_response_length)
        return wanted.model_copy(update={"max_tokens": longest, "seed": (seed + number) % _SEEDS})


_BOUND: ContextVar[Session | None] = ContextVar("rl_session", default=None)


def bind_episode(episode: Session) -> AbstractContextManager[Session]:
    """An ``RLAgent`` that is created in this context runs ``episode``."""
    return bound(_BOUND, episode)


def current_episode() -> Session | None:
    """The episode bound in this context."""
    return _BOUND.get()


def _limits_of(settings: RLSettings, environment_mode: bool) -> Limits:
    limits = settings.limits()
    if environment_mode or settings.max_prompt_length != RLSettings.model_fields["max_prompt_length"].default:
        return limits
    # The default is made for short conversations, and the CodeAct agent's own instructions are longer. So it is no
    # limit in a workspace, even where it is written out: in a copied example, or in the settings of a worker process.
    return limits.model_copy(update={"max_prompt_length": None})
