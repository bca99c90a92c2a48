"""The interfaces. Anything that has these methods fits; nothing needs to be inherited.

Each shows one use, with the small implementations of ``openhands_rl_plugin.testing``:

    >>> import asyncio
    >>> from openhands_rl_plugin.core.types import Message, Task
    >>> from openhands_rl_plugin.testing import GridEnvironment, ScriptedEngine, example_trajectory
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from openhands_rl_plugin.core.records import (
    Columns,
    DamagedRecord,
    EpisodeEnd,
    EpisodeGrowth,
    EpisodeStart,
    Label,
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
    """A source of completions.

    Examples:
        >>> engine = ScriptedEngine(["left", "right"])
        >>> completions = asyncio.run(engine.complete([Message(role="user", content="Which way?")], n=2))
        >>> [completion.message.content for completion in completions]
        ['left', 'right']
    """

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Sample ``n`` answers.

        Args:
            messages: the conversation so far; it does not end with an answer.
            tools: the functions that the model may call, in OpenAI's form.
            n: how many independent answers.
            sampling: unset parameters are the engine's choice.

        Returns:
            ``n`` completions.

        Raises:
            InfrastructureError: the server is away, slow or overloaded.
            ModelError: the server refused the request.
        """
        ...


@dataclass(frozen=True, slots=True)
class EnvInfo:
    """Abilities of an environment beyond the methods that all have.

    ``emits_rewards``: its steps can have rewards; if not, only a judgement gives the value of an ended episode.
    ``fork_steps``: how many steps its next fork replays; 0 where a fork is a copy. ``tools``: the functions that the
    model may call, in OpenAI's form; none where its actions are text.

    Examples:
        >>> EnvInfo(emits_rewards=False).fork_steps
        0
    """

    emits_rewards: bool = True
    fork_steps: int = 0
    tools: tuple[JsonObject, ...] = ()


def info_of(environment: object) -> EnvInfo:
    """The attribute or property ``info`` of an environment, which may change in an episode; the defaults without it."""
    return getattr(environment, "info", None) or EnvInfo()


class Environment(Protocol):
    """One episode of one task. Single use: reset once, close once.

    It may have more: ``info`` (see ``EnvInfo``); and ``cut_short()``, awaited where a limit ends the episode, for an
    environment that gives its reward at the end: it returns an observation without messages, whose reward is the last
    action's, or ``None``.

    Examples:
        >>> async def episode(environment: Environment) -> float:
        ...     await environment.reset(Task(id="walk", environment="grid", data={"goal": [1, 0]}))
        ...     observation = await environment.step(Message(role="assistant", content="I go right"))
        ...     await environment.close()
        ...     return observation.reward
        >>> asyncio.run(episode(GridEnvironment()))
        1.0
    """

    async def reset(self, task: Task) -> Observation:
        """Start the episode.

        Args:
            task: whose ``data`` the environment alone understands.

        Returns:
            The first observation; its messages, at least one, open the conversation.

        Raises:
            InfrastructureError: no episode can be opened now; another attempt may succeed.
            BadEnvironmentError: the task cannot be run here.
        """
        ...

    async def step(self, action: Message) -> Observation:
        """Execute one answer of the policy.

        Args:
            action: an assistant message; a malformed one is answered, not raised.

        Returns:
            The next observation, with the step's reward. ``terminated`` is not ``truncated``.

        Raises:
            InfrastructureError: the environment is gone.
            BadEnvironmentError: its server broke the protocol.
        """
        ...

    async def evidence(self) -> JsonObject:
        """Gather all that a reward will need. Called once, before ``close``.

        Returns:
            JSON, such as the final state, a patch or a test report.

        Raises:
            InfrastructureError: the environment is gone.
        """
        ...

    async def close(self) -> None:
        """Release the episode. Safe to call after a failure and more than once."""
        ...


@runtime_checkable
class Forkable(Protocol):
    """An environment that can be copied in mid-episode. A capability, not a flag.

    Examples:
        >>> isinstance(GridEnvironment(), Forkable)
        True
    """

    async def fork(self) -> Environment:
        """Copy the episode as it stands.

        Returns:
            An independent environment that is open already; the caller closes it.

        Raises:
            InfrastructureError: there is no room for one more.
            BadEnvironmentError: this episode cannot be copied.
        """
        ...


class Strategy(Protocol):
    """Decides one turn; someone else executes it.

    Examples:
        >>> from openhands_rl_plugin import StandardReActStrategy
        >>> from openhands_rl_plugin.core.tree import EpisodeTree
        >>> from openhands_rl_plugin.core.types import Observation
        >>> tree = EpisodeTree()
        >>> tree.observe(Observation(messages=(Message(role="user", content="Which way?"),)))
        >>> chosen = asyncio.run(StandardReActStrategy().decide(tree, ScriptedEngine(["left"]), None))
        >>> tree.nodes[chosen].message.content
        'left'
    """

    async def decide(self, tree: EpisodeTree, engine: LLMEngine, world: Forkable | None) -> int:
        """Add candidates below ``tree.head`` and choose one.

        Args:
            tree: the episode so far; it is grown in place.
            engine: samples the candidates.
            world: the environment, where it can be forked; forks are closed by the strategy.

        Returns:
            The index in ``tree.nodes`` of the sampled node to commit.

        Raises:
            ConfigError: the strategy needs forks and ``world`` is ``None``.
            EpisodeError: raised by the engine or a fork.
        """
        ...


class TrajectoryStorage(Protocol):
    """A store of trajectories. An acknowledged call survives a crash; every method may raise ``StorageError``.

    An episode is stored at once by ``add``, or as it runs by ``begin``, ``grow`` and ``end``. All of them may be
    repeated: what is known already is not stored again.

    Examples:
        >>> import tempfile
        >>> from openhands_rl_plugin import FileTrajectoryStorage
        >>> async def stored(storage: TrajectoryStorage) -> int:
        ...     await storage.add(example_trajectory())
        ...     count = await storage.count(TrajectoryFilter(environment="grid"))
        ...     await storage.close()
        ...     return count
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     asyncio.run(stored(FileTrajectoryStorage(folder)))
        1
    """

    async def add(self, trajectory: Trajectory) -> None:
        """Store a finished episode; it takes the place of an unfinished one of the same id."""
        ...

    async def begin(self, start: EpisodeStart) -> None:
        """Open an episode. Does nothing when its id is known."""
        ...

    async def grow(self, growth: EpisodeGrowth) -> None:
        """Append to an open episode. Nodes that are stored already are skipped.

        Raises:
            StorageError: nodes before ``growth.first`` are missing, or the episode is not open.
        """
        ...

    async def end(self, end: EpisodeEnd) -> None:
        """Close an open episode: from now on it is a finished trajectory and nothing changes it any more."""
        ...

    async def drop(self, trajectory_ids: Sequence[str]) -> int:
        """Delete unfinished episodes; finished and unknown ones are left alone.

        Returns:
            How many were deleted.
        """
        ...

    async def add_scores(self, scores: Sequence[Score]) -> None:
        """Append scores to those that are stored."""
        ...

    async def add_labels(self, labels: Sequence[Label]) -> None:
        """Append labels; one whose id is known is not stored again. They may come before their episode."""
        ...

    async def scores(self, trajectory_ids: Sequence[str]) -> Mapping[str, tuple[Score, ...]]:
        """Id -> its scores, oldest first, of those that have some."""
        ...

    async def labels(self, trajectory_ids: Sequence[str]) -> tuple[Label, ...]:
        """The labels of these episodes, oldest first."""
        ...

    async def revision(self) -> str:
        """A text that is another one when anything in the store has changed."""
        ...

    def skip_damaged(self) -> list[DamagedRecord]:
        """From now on, skip records that cannot be read instead of raising.

        Returns:
            A list to which every record that is left out is added once.
        """
        ...

    def find(self, where: TrajectoryFilter | None = None) -> AsyncIterator[tuple[Trajectory, tuple[Score, ...]]]:
        """Stream the matches. Trajectories added meanwhile are not part of it.

        Args:
            where: ``None`` finds all finished trajectories.

        Returns:
            Trajectories in the order of ``where``, each with its scores, oldest first.
        """
        ...

    def summaries(self, where: TrajectoryFilter | None = None) -> AsyncIterator[TrajectorySummary]:
        """Like ``find``, without reading any node."""
        ...

    async def columns(self, where: TrajectoryFilter | None = None) -> Columns:
        """Like ``find``, as arrays: no node is made."""
        ...

    async def count(self, where: TrajectoryFilter | None = None) -> int:
        """How many match, ``offset`` and ``limit`` aside."""
        ...

    async def close(self) -> None:
        """Flush and release."""
        ...


class Reward(Protocol):
    """A pure function over a stored trajectory.

    Examples:
        >>> from openhands_rl_plugin.rewards.outcome import ReturnReward
        >>> asyncio.run(ReturnReward()(example_trajectory())).reward
        1.0
    """

    @property
    def version(self) -> str:
        """Changes whenever the same trajectory could get another score."""
        ...

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Judge one trajectory by its nodes and evidence.

        Returns:
            A score whose ``reward`` is ``None`` where there is nothing to judge; never an invented 0.0.

        Raises:
            GraderError: the reward cannot be computed; the trajectory stays unscored.
        """
        ...


class EpisodeRunner(Protocol):
    """Plays whole episodes: in-process sessions, or OpenHands' controller.

    Examples:
        >>> class Recorded:
        ...     async def run(self, request: EpisodeRequest) -> Trajectory:
        ...         return example_trajectory()
        >>> runner: EpisodeRunner = Recorded()
        >>> request = EpisodeRequest(task=Task(id="walk", environment="grid"), run_id="run", group_id="run/walk")
        >>> asyncio.run(runner.run(request)).stop
        <StopReason.TERMINATED: 'terminated'>
    """

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Play one episode.

        Args:
            request: the episode to run; equal requests are the same episode.

        Returns:
            The trajectory; a failed one has ``failure`` set.

        Raises:
            StorageError: the episode cannot be stored while it runs.
        """
        ...
