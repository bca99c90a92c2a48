"""The records of storages, besides whole trajectories and scores."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, NamedTuple, Self

from pydantic import Field, FiniteFloat, JsonValue

from openhands_rl_plugin.core.arrays import Floats, Ids, Mask
from openhands_rl_plugin.core.types import (
    SCHEMA_VERSION,
    Bounded,
    EpisodeRequest,
    Failure,
    FailureKind,
    Frozen,
    JsonObject,
    Node,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Trajectory,
    Usage,
)

# The namespace of the UUIDs; another one would make every stored episode unknown.
_IDS = uuid.UUID("7d4de1c0-6f0b-4b5e-9a6e-5b8a2f3d9c11")

MISSING = "missing"
"""Key of a sampled node's metadata: an object from ``token_ids`` or ``logprobs`` to why the node has none."""

PROMPT = "prompt"
"""Key of the first node's metadata: "compact" where the agent had those instructions, and not OpenHands' own."""


def trajectory_id(request: EpisodeRequest) -> str:
    """The id of the request's trajectory, so that a resumed run finds what it already has.

    Equal requests give equal ids: a UUID made from run, group, task, its environment, sample and attempt.
    """
    task = request.task
    parts = (request.run_id, request.group_id, task.id, task.environment, str(request.sample), str(request.attempt))
    return str(uuid.uuid5(_IDS, "\0".join(parts)))


class EpisodeStart(Frozen):
    """Facts of an episode before its first node. ``started`` is a Unix time in seconds."""

    schema_version: int = SCHEMA_VERSION
    id: str
    run_id: str
    group_id: str
    task: Task
    strategy: StrategySpec
    policy: PolicyRef
    tools: tuple[JsonObject, ...] = ()
    started: FiniteFloat

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        """The part of a trajectory that was known before the episode ran."""
        shared = {name: value for name, value in trajectory if name in cls.model_fields}
        return cls(**shared, started=trajectory.times.started)


def prompt_of(trajectory: Trajectory) -> str:
    """The agent's ``[rl.workspace] prompt``: "compact" or "standard"."""
    prompt = trajectory.nodes[0].metadata.get(PROMPT) if trajectory.nodes else None
    return prompt if isinstance(prompt, str) else "standard"


class NodeMark(Frozen):
    """Facts about a stored node that became known later: the step's reward, or the search's statistics.

    ``search`` is all that the strategy noted, under that key of the node's metadata; ``None`` leaves it as it was.
    """

    index: int
    reward: Bounded | None = None
    simulated: bool = False
    value: FiniteFloat | None = None
    visits: int = 0
    search: JsonValue = None

    def changes(self, node: Node) -> dict[str, object]:
        """The fields of ``node`` that the mark sets, with their new values."""
        known: dict[str, object] = {name: each for name, each in vars(self).items() if name not in ("index", "search")}
        return known if self.search is None else known | {"metadata": node.metadata | {"search": self.search}}


class EpisodeGrowth(Frozen):
    """An addition to an episode: ``nodes`` from index ``first`` on, and ``marks`` of earlier ones."""

    trajectory_id: str
    first: int = Field(ge=0)
    nodes: tuple[Node, ...] = ()
    head: int | None = None
    marks: tuple[NodeMark, ...] = ()


class EpisodeEnd(Frozen):
    """How an episode ended: the fields of ``Trajectory`` that are not known before. ``finished`` is in seconds."""

    trajectory_id: str
    head: int | None
    stop: StopReason
    policy: PolicyRef
    tools: tuple[JsonObject, ...] = ()
    evidence: JsonObject = Field(default_factory=dict)
    failure: Failure | None = None
    usage: Usage = Usage()
    finished: FiniteFloat

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        """The part of a trajectory that was known when it was over."""
        shared = {name: value for name, value in trajectory if name in cls.model_fields}
        return cls(**shared, trajectory_id=trajectory.id, finished=trajectory.times.finished)


CHECKED = "command"
"""The key of a workspace command's result in an episode's evidence."""

LAST_ERROR = "last_error"
"""The key of OpenHands' own last error in an episode's evidence."""

_OF_GRADERS = frozenset({CHECKED, "test_result", "report", "resolved", "patch", "git_patch", "answer", "label"})
_OF_RUNS = frozenset({"return", "rewards", "purchase", "unrewarded", "unrecorded", "metrics", "malformed", "ended_by"})
HOST_EVIDENCE = _OF_GRADERS | _OF_RUNS | {LAST_ERROR}
"""Names of evidence that rewards, lists and exports read: only who runs or grades an episode writes them."""


class WorkspaceCommand(Frozen):
    """A shell command that judges a workspace as it stands when the episode ends; ``timeout`` is in seconds.

    ``protected``: patterns of files (``tests/**``, ``Makefile``, ``*.toml``; ``!`` before one takes out of those before
    it) that are put back from before the session; what matches and was not there is removed. ``*`` matches ``/``, too.
    """

    command: str = Field(min_length=1)
    timeout: float = Field(default=600.0, gt=0)
    protected: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    def did(self, **what: object) -> CommandEvidence:
        """The evidence of this command."""
        return CommandEvidence.model_validate({"command": self.command, "protected": self.protected, **what})


class CommandEvidence(Frozen):
    """What such a command did. ``exit_code`` is ``None`` when it was ended at its time limit, or did not run at all:
    then ``error`` is why, or ``prevented`` what the session did. ``output`` is bounded: its middle is dropped."""

    command: str
    protected: tuple[str, ...] = ()
    exit_code: int | None = None
    timed_out: bool = False
    output: str = ""
    seconds: float = 0.0
    error: str = ""
    prevented: str = ""


class LabelKind(StrEnum):
    """What a label is: a verdict on the outcome, which of two episodes is better, a remark, or a mark to find it by."""

    VERDICT = "verdict"
    PREFERENCE = "preference"
    COMMENT = "comment"
    TAG = "tag"


class Label(Frozen):
    """What somebody noted on an episode, or on one ``node`` of it, or on its sampled ``tokens`` from one to another.

    No label is a reward: ``score --reward human`` makes scores of verdicts. ``value``: of a verdict the reward; of a
    preference 1.0 when this episode is better than ``other``, 0.0 when it is worse, 0.5 when neither is. ``text``: a
    remark, a tag, or a note on a verdict or preference. ``withdraws``: the id of an earlier label that holds no more.
    ``author``: of several verdicts on an episode by one author the last one counts. ``at``: Unix time in seconds.
    """

    id: str
    trajectory_id: str
    kind: LabelKind
    value: Bounded | None = None
    text: str = ""
    node: int | None = None
    tokens: tuple[int, int] | None = None
    other: str | None = None
    withdraws: str | None = None
    author: str = ""
    at: FiniteFloat


class DamagedRecord(Frozen):
    """A stored record that cannot be read. ``id`` is that of its episode, ``row`` the number in its table, as far as
    they are known; ``what`` is "episode", "score", "label", or "log" (the write-ahead log, by its file)."""

    what: str
    id: str | None
    row: int | None = None
    cause: str

    def in_words(self) -> str:
        """``episode 3f2a (row 7): a record is damaged``."""
        row = "" if self.row is None else f" (row {self.row})"
        return f"{self.what} {self.id or 'of an unknown id'}{row}: {self.cause}"


class TrajectoryOrder(StrEnum):
    """The sort key of a listing; equal ones stay in the order in which they were stored."""

    STORED = "stored"
    FINISHED = "finished"
    REWARD = "reward"
    TURNS = "turns"
    TOKENS = "tokens"
    SECONDS = "seconds"


SUB_AGENT = "sub_agent"
"""Key of a task's ``data`` with the fields of a ``SubAgentOf``."""


class SubAgentOf(Frozen):
    """The parent of a sub-agent's episode: the episode's id, and the registered ``kind`` of the agent."""

    parent: str
    kind: str


def sub_agent_of(task: Task) -> SubAgentOf | None:
    """``None`` for an episode that is no sub-agent's."""
    link = task.data.get(SUB_AGENT)
    if not isinstance(link, dict):
        return None
    return SubAgentOf(parent=str(link.get("parent")), kind=str(link.get("kind")))


def sub_agents_run(run_id: str) -> str:
    """The run of the sub-agents of a run's episodes: they are no samples of that run's tasks."""
    return f"{run_id}/sub-agents"


HELD_OUT = "heldout"
HELD_OUT_SPLITS = frozenset({HELD_OUT, "held-out", "validation"})
"""Splits that only measure: no training on their episodes unless a filter names the split.

``test`` is none of them: rows and environments without a split have it too.
"""


SEARCHED = ("id", "run_id", "group_id", "task_id", "environment", "strategy", "base_model", "adapter")
"""Fields of an episode's header that ``TrajectoryFilter.contains`` looks into."""


class TrajectoryFilter(Frozen):
    """Which stored trajectories to stream, in which order. Every field that is set must match; bounds are inclusive.

    ``reward_*`` and ``TrajectoryOrder.REWARD`` look at the newest judgement of the outcome (``newest_outcome``), or
    at the return of the episode when there is none yet. An episode that failed has none, nor one that nothing judged
    and of which no step was rewarded: no bound matches it, and it comes last in either direction. ``since`` and
    ``until`` bound the time at which the episode finished. Unfinished episodes (no sample of anything yet) are left out
    by default: ``finished=False`` finds only them, ``None`` finds both. ``limit`` and ``offset`` make pages.
    ``contains`` is a text that one of ``SEARCHED`` has in it, upper and lower case apart. ``label`` is the text of a
    tag, or the kind of another label (``verdict``), that the episode has and nobody withdrew.
    """

    ids: tuple[str, ...] | None = None
    run_id: str | None = None
    group_id: str | None = None
    task_id: str | None = None
    environment: str | None = None
    split: str | None = None
    strategy: str | None = None
    adapter: str | None = None
    policy_version: int | None = Field(default=None, le=sys.maxsize)
    stop: StopReason | None = None
    failed: bool | None = None
    failure_kind: FailureKind | None = None
    finished: bool | None = True
    reward_at_least: float | None = None
    reward_at_most: float | None = None
    since: float | None = None
    until: float | None = None
    contains: str | None = None
    label: str | None = None
    sort: TrajectoryOrder = TrajectoryOrder.STORED
    descending: bool = False
    offset: int = Field(default=0, ge=0, le=sys.maxsize)
    limit: int | None = Field(default=None, ge=0, le=sys.maxsize)

    def only_measures(self, split: str) -> bool:
        """Whether this filter's matches of ``split`` must not be trained on."""
        return self.split is None and split in HELD_OUT_SPLITS


class Columns(NamedTuple):
    """Columns of episodes, with a place for each episode.

    They hold the id, the group, the reward that filters use (NaN if there is none), the number of segments, and whether
    the episode is complete: no failure, and token ids and logprobs for every completion.
    """

    ids: Sequence[str]
    groups: Sequence[str]
    rewards: Floats
    segments: Ids
    whole: Mask


class TrajectorySummary(Frozen):
    """A stored trajectory without its nodes. ``reward``: the newest judgement of the outcome, if any. ``turns`` and
    ``episode_return`` are of what was executed.

    There is no return where the episode failed, where no step was rewarded, or where the environment gives no rewards.
    An unfinished episode has no usage, and as ``times.finished`` the time at which it last grew.
    """

    id: str
    run_id: str
    group_id: str
    task_id: str
    environment: str
    split: str
    strategy: str
    policy: PolicyRef
    stop: StopReason = StopReason.UNFINISHED
    failure: FailureKind | None = None
    nodes: int = 0
    turns: int = 0
    episode_return: float | None = None
    reward: float | None = None
    usage: Usage = Usage()
    times: Times

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.stop == StopReason.UNFINISHED

    @property
    def judged(self) -> float | None:
        """The reward by which it is found and sorted."""
        return None if self.failure else self.episode_return if self.reward is None else self.reward
