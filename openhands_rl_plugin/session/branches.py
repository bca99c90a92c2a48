"""Forks of a host's session for search: a branch is an ordinary session of the host whose request is held.

The host goes on in the branch as it would live, from a request that waits for its answer. The strategy's answer is
given, the host executes it, and its next request is the observation, which waits in turn. So what a branch shows is
what the live session would show; its first prompt is compared with the live one.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Protocol

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import BadEnvironmentError, CaughtFailure, boundary
from openhands_rl_plugin.core.messages import WireMessage, says, to_message
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.records import CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import FailureKind, JsonObject, Message, Observation, StopReason, Task
from openhands_rl_plugin.models.engines.openai_wire import Json
from openhands_rl_plugin.session.session import EpisodeOver, Session, Turn

Complete = Callable[[Json], Json]
"""A host's request -> the document of the answer. Blocks; raises ``EpisodeOver``."""


class BranchWorkspace(Protocol):
    """The workspace of a branch. All methods block."""

    def changes(self) -> JsonObject:
        """The changes since the session began, as the branch's evidence."""
        ...

    def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """Run a command over the workspace as it stands."""
        ...

    def close(self) -> None:
        """End its processes and remove its files. Idempotent."""
        ...


class Branch(Protocol):
    """A copy of a host's session at a request that waits for its answer. All methods block.

    The live session is one, too, which is only forked.
    """

    @property
    def workspace(self) -> BranchWorkspace:
        """The copy that it works on, which its user closes."""
        ...

    def run(self, complete: Complete) -> None:
        """Go on as the host would, from that request on, with ``complete`` as the model, until the agent ends.

        Raises what ends a session of the host.
        """
        ...

    def fork(self) -> Branch:
        """A copy. Raises ``BadEnvironmentError`` or ``InfrastructureError``."""
        ...


class BranchWorld:
    """An ``Environment`` over a branch, in the middle of an episode. The branch runs in a thread of its own, and its
    requests are held. Over the ``live`` branch of a session at one decision it is only forked.

    ``turn``: the request of the branch that waits.
    """

    def __init__(self, live: Branch, session: Session, turn: Turn | None = None) -> None:
        self.session = session
        self.turn = turn or session.turn
        self._branch = live
        self._loop = asyncio.get_running_loop()
        self._requests: asyncio.Queue[Json | None] = asyncio.Queue()
        self._answer: Future[Json] = Future()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: CaughtFailure | None = None

    @property
    def info(self) -> EnvInfo:
        """Its steps have no rewards."""
        return EnvInfo(emits_rewards=False)

    async def reset(self, task: Task) -> Observation:
        """Not supported: a branch begins in the middle of an episode."""
        raise RuntimeError("a branch cannot be reset: it continues an episode")

    async def step(self, action: Message) -> Observation:
        """Execute an answer that the session sampled; returns what the model would see.

        Raises ``BadEnvironmentError`` for an action that a fork cannot execute.
        """
        before, session = self.turn, self.session
        if self._thread is None:
            run = contextvars.copy_context().run
            self._thread = threading.Thread(target=run, args=(self._run,), name="rl-branch", daemon=True)
            self._thread.start()
            wire = await self._prompt()
            if wire is None or not _same(wire, before.wire):
                raise BadEnvironmentError("the branch does not begin with the live session's prompt")
        waiting, self._answer = self._answer, Future()
        waiting.set_result(session.document_of(action))
        wire, known = await self._prompt(), len(before.wire)
        if wire is None:
            return Observation(terminated=True)
        if not _same(wire[:known], before.wire):
            raise BadEnvironmentError("the branch cannot continue the conversation: its host rewrites earlier messages")
        # The prompt repeats the answer first, in the host's own form, except for one that the host could not read.
        replayed = len(wire) > known and wire[known]["role"] == "assistant"
        new = tuple(to_message(message) for message in wire[known + replayed :])
        # The earlier messages are shared, because a search holds very many turns.
        self.turn = Turn(before.body, [*before.wire, *wire[known:]], (*before.path, action, *new))
        session.expect(self.turn)
        return Observation(messages=new)

    async def fork(self) -> BranchWorld:
        """A copy. Raises ``BadEnvironmentError`` or ``InfrastructureError``."""
        return BranchWorld(await background().blocking(self._branch.fork), self.session, self.turn)

    async def evidence(self) -> JsonObject:
        """The changes to the workspace since the session began."""
        return await background().blocking(self._branch.workspace.changes)

    async def check(self, asked: WorkspaceCommand) -> CommandEvidence:
        """Run a command over the workspace as it stands, in a fresh sandbox."""
        return await background().blocking(lambda: self._branch.workspace.check(asked))

    async def close(self) -> None:
        """End the host's run, without a retry, its processes, and remove its files."""
        self._closed = True
        if not self._answer.done():
            self._answer.set_exception(EpisodeOver(StopReason.NO_ACTION))
        await background().blocking(self._branch.workspace.close)

    async def _prompt(self) -> Sequence[WireMessage] | None:
        """That of the next request; ``None`` after the end of its agent.

        Raises ``CaughtFailure`` when the host has failed.
        """
        if (body := await self._requests.get()) is None:
            if self._failure is not None:
                raise self._failure
            return None
        return body["messages"]

    def _run(self) -> None:
        try:
            with suppress(EpisodeOver), boundary(FailureKind.ENVIRONMENT, "search.simulate"):
                self._branch.run(self._complete)
        except CaughtFailure as caught:
            self._failure = caught
        self._loop.call_soon_threadsafe(self._requests.put_nowait, None)

    def _complete(self, body: Json) -> Json:
        if self._closed:
            raise EpisodeOver(StopReason.NO_ACTION)
        waiting = self._answer
        self._loop.call_soon_threadsafe(self._requests.put_nowait, body)
        return waiting.result()


def _same(one: Sequence[WireMessage], other: Sequence[WireMessage]) -> bool:
    return len(one) == len(other) and all(a == b or says(a, to_message(b)) for a, b in zip(one, other, strict=True))
