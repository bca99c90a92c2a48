"""The messages between the service and a worker elsewhere: one JSON document a line.

What a worker asks of the queue and of the store is a message with a number, and the answer has the same number. The
service fills in the owner: a worker can ask for its own episodes only.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.contrib.rollouts.states import ClaimedSession, Result, RolloutState
from openhands_rl_plugin.contrib.rollouts.worker import Orders
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Frozen, Score, Trajectory
from openhands_rl_plugin.hosts.pool.messages import Ready, Refused, Store, Stored, from_line


class Begin(Frozen):
    """To a worker, first: what it is told, with names of environment variables, but no secrets."""

    kind: Literal["begin"] = "begin"
    owner: str
    orders: Orders


class FoundEpisode(Frozen):
    """What is stored of an episode."""

    trajectory: Trajectory
    scores: tuple[Score, ...] = ()


class CallAnswer(Frozen):
    """To a worker: what a call of its returned; ``error`` is empty where it did."""

    kind: Literal["answer"] = "answer"
    number: int
    session: ClaimedSession | None = None
    owned: tuple[str, ...] = ()
    stored: bool = False
    found: tuple[FoundEpisode, ...] = ()
    error: str = ""


class ClaimCall(Frozen):
    """``JobQueue.claim``."""

    kind: Literal["claim"] = "claim"
    number: int

    def ask(self, queue: JobQueue, owner: str) -> CallAnswer:
        """Call the queue. Raises ``StorageError``."""
        return CallAnswer(number=self.number, session=queue.claim(owner))


class OwnedCall(Frozen):
    """``JobQueue.owned``."""

    kind: Literal["owned"] = "owned"
    number: int

    def ask(self, queue: JobQueue, owner: str) -> CallAnswer:
        """Call the queue. Raises ``StorageError``."""
        return CallAnswer(number=self.number, owned=tuple(sorted(queue.owned(owner))))


class EnteredCall(Frozen):
    """``JobQueue.entered``."""

    kind: Literal["entered"] = "entered"
    number: int
    session: ClaimedSession
    state: RolloutState

    def ask(self, queue: JobQueue, owner: str) -> CallAnswer:
        """Call the queue. Raises ``StorageError``."""
        queue.entered(self.session, owner, self.state)
        return CallAnswer(number=self.number)


class FinishCall(Frozen):
    """``JobQueue.finish``."""

    kind: Literal["finish"] = "finish"
    number: int
    session: ClaimedSession
    result: Result

    def ask(self, queue: JobQueue, owner: str) -> CallAnswer:
        """Call the queue. Raises ``StorageError``."""
        return CallAnswer(number=self.number, stored=queue.finish(self.session, owner, self.result))


class AgainCall(Frozen):
    """``JobQueue.again``."""

    kind: Literal["again"] = "again"
    number: int
    session: ClaimedSession
    delay: float
    counts: bool

    def ask(self, queue: JobQueue, owner: str) -> CallAnswer:
        """Call the queue. Raises ``StorageError``."""
        queue.again(self.session, owner, delay=self.delay, counts=self.counts)
        return CallAnswer(number=self.number)


class ScoresCall(Frozen):
    """``TrajectoryStorage.add_scores``."""

    kind: Literal["scores"] = "scores"
    number: int
    scores: tuple[Score, ...]

    async def read(self, storage: TrajectoryStorage) -> CallAnswer:
        """Call the store. Raises ``StorageError``."""
        await storage.add_scores(self.scores)
        return CallAnswer(number=self.number)


class FindCall(Frozen):
    """``TrajectoryStorage.find`` of single episodes."""

    kind: Literal["find"] = "find"
    number: int
    where: TrajectoryFilter

    async def read(self, storage: TrajectoryStorage) -> CallAnswer:
        """Call the store. Raises ``StorageError``."""
        found = [FoundEpisode(trajectory=one, scores=scores) async for one, scores in storage.find(self.where)]
        return CallAnswer(number=self.number, found=tuple(found))


QueueCall = ClaimCall | OwnedCall | EnteredCall | FinishCall | AgainCall
StoreCall = ScoresCall | FindCall
ToActor = Begin | CallAnswer | Stored
FromActor = Ready | Refused | Store | QueueCall | StoreCall

_TO_ACTOR: TypeAdapter[ToActor] = TypeAdapter(Annotated[ToActor, Field(discriminator="kind")])
_FROM_ACTOR: TypeAdapter[FromActor] = TypeAdapter(Annotated[FromActor, Field(discriminator="kind")])


def to_actor(line: bytes) -> ToActor:
    """Read a line of the service's. Raises ``InfrastructureError`` for anything but a complete message."""
    # The options are strict for TOML; JSON has no tuples and no paths.
    return from_line(_TO_ACTOR, line, strict=False)


def from_actor(line: bytes) -> FromActor:
    """Read a line of a worker's. Raises ``InfrastructureError`` for anything but a complete message."""
    return from_line(_FROM_ACTOR, line)
