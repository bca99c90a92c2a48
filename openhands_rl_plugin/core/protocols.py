"""The seams. Anything that has these methods fits; nothing needs to be inherited."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from openhands_rl_plugin.core.records import (
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    TrajectoryFilter,
    TrajectorySummary,
)
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    JsonObject,
    Message,
    Observation,
    SamplingParams,
    Score,
    Task,
    Trajectory,
)

if TYPE_CHECKING:
    from openhands_rl_plugin.core.tree import EpisodeTree


class LLMEngine(Protocol):
    """A source of completions."""

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` answers. Raises ``InfrastructureError`` or ``ModelError``."""
        ...


@runtime_checkable
class StreamingEngine(Protocol):
    """An engine that can show an answer while it is sampled. A capability, not a flag."""

    def stream(
        self, messages: Sequence[Message], *, tools: Sequence[JsonObject] = (), sampling: SamplingParams | None = None
    ) -> AsyncIterator[str | Completion]:
        """The answer's text in pieces, then, last, the same completion that ``complete`` would return."""
        ...


class Environment(Protocol):
    """One episode of one task. Single use: reset once, close once."""

    async def reset(self, task: Task) -> Observation:
        """Start the episode; the messages of the first observation open the conversation."""
        ...

    async def step(self, action: Message) -> Observation:
        """Execute one answer of the policy. A malformed action is answered, not raised."""
        ...

    async def evidence(self) -> JsonObject:
        """All that a reward will need, gathered before ``close``."""
        ...

    async def close(self) -> None:
        """Release the episode. Safe to call after a failure and more than once."""
        ...


@runtime_checkable
class Forkable(Protocol):
    """An environment that can be copied in mid-episode. A capability, not a flag."""

    async def fork(self) -> Environment:
        """An independent copy of the episode as it stands."""
        ...


@runtime_checkable
class OffersTools(Protocol):
    """An environment whose actions are tool calls, which the model server is told of."""

    @property
    def offered_tools(self) -> Sequence[JsonObject]:
        """The tools in OpenAI's form."""
        ...


class Strategy(Protocol):
    """Decides one turn; someone else executes it."""

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Add candidates below ``tree.head`` and return the index of the sampled node to commit."""
        ...


class TrajectoryStorage(Protocol):
    """Where trajectories live. What a call acknowledged survives a crash; every method may raise ``StorageError``.

    An episode is stored at once by ``add``, or as it is played by ``begin``, ``grow`` and ``end``. All of them may be
    repeated: what is known already is not stored again.
    """

    async def add(self, trajectory: Trajectory) -> None:
        """Store a finished episode; it takes the place of an unfinished one of the same id."""
        ...

    async def begin(self, start: EpisodeStart) -> None:
        """Open an episode. Does nothing when its id is known."""
        ...

    async def grow(self, growth: EpisodeGrowth) -> None:
        """Append to an open episode. Nodes that are stored already are skipped; a gap before them is an error."""
        ...

    async def end(self, end: EpisodeEnd) -> None:
        """Close an open episode: from now on it is a finished trajectory and nothing changes it any more."""
        ...

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """Forget unfinished episodes and return how many; finished and unknown ones are left alone."""
        ...

    async def add_scores(self, scores: Sequence[Score]) -> None:
        """Append judgements beside what is stored."""
        ...

    def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[tuple[Trajectory, tuple[Score, ...]]]:
        """Stream what matches with its scores, oldest score first. What is added meanwhile is not part of it."""
        ...

    def summaries(self, where: TrajectoryFilter | None = None) -> AsyncIterator[TrajectorySummary]:
        """Like ``find``, without reading any node."""
        ...

    async def count(self, where: TrajectoryFilter | None = None) -> int:
        """How many match, ``offset`` and ``limit`` aside."""
        ...

    async def close(self) -> None:
        """Flush and release."""
        ...


class Reward(Protocol):
    """A pure function over a stored trajectory."""

    @property
    def version(self) -> str:
        """Changes whenever the same trajectory could get another score."""
        ...

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Judge. Raises ``GraderError`` when it cannot; never invents a 0.0."""
        ...


class EpisodeRunner(Protocol):
    """Plays whole episodes: in-process sessions, or OpenHands' controller."""

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Play one episode. A failed one is returned with ``failure`` set, not raised."""
        ...

    async def close(self) -> None:
        """Release workers and connections."""
        ...
