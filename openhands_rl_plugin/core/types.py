"""Which nodes of an episode's tree were acted on: the path to its head, and those that a rewritten history left.

A host that condenses, merges or cuts the history goes on in a new branch, so that an episode without any search may
have several paths (segments) that were all acted on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, JsonValue

from openhands_rl_plugin.core.arrays import Floats, Ids, Mask

TURN, CONDENSATION, SIDE = "turn", "condensation", "side request"
"""Kinds of nodes: a turn of the episode; a host's request to summarise its history, with the summary; another side
request of a client, such as for a title."""

KIND, ACTED, REWRITTEN = "kind", "acted", "history_rewritten"
"""Keys of a node's metadata, which every release can read. ``ACTED`` is for imports, where no reward shows it;
``REWRITTEN``: the answer's prompt does not extend the conversation before."""

AT, SECONDS = "at", "seconds"
"""Keys of a node's metadata: when it was made, in Unix time, and how long an answer took to sample. Kept there, where
every release can read them."""


def kind_of(node: Node) -> str:
    """The kind of a node: ``TURN``, ``CONDENSATION`` or ``SIDE``."""
    kind = node.metadata.get(KIND)
    return kind if isinstance(kind, str) else TURN


def was_executed(node: Node) -> bool:
    """Whether it is an answer that the live environment or the host went on from; a simulation does not count."""
    stepped = node.reward is not None and not node.simulated
    return node.sampled and (stepped or node.metadata.get(ACTED) is True) and kind_of(node) == TURN


def path_to(nodes: Sequence[Node], leaf: int | None) -> tuple[int, ...]:
    """Node indices from the root to ``leaf``."""
    indices: list[int] = []
    while leaf is not None:
        indices.append(leaf)
        leaf = nodes[leaf].parent
    return tuple(reversed(indices))


def acted_nodes(nodes: Sequence[Node], head: int | None) -> tuple[int, ...]:
    """Indices of the answers that were acted on, in order.

    Those of the path to ``head``, and executed ones on other paths. Of several answers in one state only the one on the
    path was acted on, and elsewhere those that the episode went on from, unless a rewritten history led there again. No
    malformed, dropped or only simulated answer, and no summary.
    """
    if head is None:
        return ()
    walk = path_to(nodes, head)
    path = {at for at in walk if nodes[at].sampled and kind_of(nodes[at]) == TURN}
    if len(walk) == len(nodes):
        return tuple(sorted(path))
    decided = {nodes[at].parent for at in path if REWRITTEN not in nodes[at].metadata}
    others = {at for at, node in enumerate(nodes) if was_executed(node) and node.parent not in decided}
    return tuple(sorted(path | others - _superseded(nodes, others)))


def _superseded(nodes: Sequence[Node], executed: set[int]) -> set[int]:
    """Executed nodes that the episode did not continue, because it continued a sibling."""
    continued: set[int] = set()
    for at in executed:
        up = nodes[at].parent
        while up is not None and up not in continued:
            continued.add(up)
            up = nodes[up].parent
    decided = {nodes[at].parent for at in executed & continued if REWRITTEN not in nodes[at].metadata}
    ends = executed - continued
    return {at for at in ends if nodes[at].parent in decided and REWRITTEN not in nodes[at].metadata}


def rewards_steps(environment: str, evidence: dict[str, JsonValue]) -> bool:
    """Whether the steps of an episode could earn rewards. Those of a client's session and of a session in a workspace
    (which leaves a patch) cannot, and those that the environment notes as ``unrewarded`` have not: their 0.0 means only
    that a step was executed, and others judge the outcome."""
    judged = environment in ("gateway", "workspace") or "git_patch" in evidence or evidence.get("unrewarded") is True
    return not judged


SCHEMA_VERSION = 2
"""1: whole trajectories. 2: an episode may be unfinished."""

JsonObject = dict[str, JsonValue]


class Frozen(BaseModel):
    """Base of all values: immutable, and a misspelt field is an error instead of a silent loss."""

    # JSON has no NaN; written as a string it is read back as the same float, and not as a missing value.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


LARGEST = 1e9
"""The largest absolute value of a number that others give: a reward, a value, a weight, a logprob."""

Bounded = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]


def _bounded(values: Floats) -> Floats:
    if not all(map(LARGEST.__ge__, map(abs, values))):
        raise ValueError(f"a number is not finite, or above {LARGEST:g}")
    return values


BoundedFloats = Annotated[Floats, AfterValidator(_bounded)]
"""As ``Bounded``, each with the precision of 32 bits."""


class Limits(Frozen):
    """Bounds of one episode. ``None`` means unbounded.

    The lengths are in tokens; ``max_obs_length`` (of one observation) is counted as four characters a token, because
    the server's tokenizer is not known. ``timeout`` is in seconds of wall time for the whole episode.
    """

    max_turns: int = Field(default=10, ge=1)
    max_prompt_length: int | None = Field(default=None, ge=1)
    max_response_length: int = Field(default=512, ge=1)
    max_obs_length: int | None = Field(default=None, ge=1)
    timeout: float | None = Field(default=None, gt=0)


class Task(Frozen):
    """A task of an environment. ``data`` is the input of the environment's ``reset``."""

    id: str
    environment: str
    instruction: str = ""
    data: JsonObject = Field(default_factory=dict)
    split: str = ""
    limits: Limits | None = None


def _arguments_text(given: object) -> object:
    """The text of a call's arguments: absent, null, empty and "null" are ``{}``, and an object is written as JSON."""
    if isinstance(given, str):
        return given if given.strip() not in ("", "null") else "{}"
    return "{}" if given in (None, []) else json.dumps(given, ensure_ascii=False, separators=(",", ":"))


class ToolCall(Frozen):
    """A call exactly as the model emitted it: ``arguments`` is the raw text, never re-serialised, ``{}`` for none."""

    id: str = ""
    name: str
    arguments: Annotated[str, BeforeValidator(_arguments_text)] = "{}"


class Message(Frozen):
    """One chat message in the OpenAI sense, with plain text content."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class Tokens(Frozen):
    """Token ids and logprobs as the server reported them.

    ``prompt_ids`` is the *delta* since the end of the previous sampled node on the path when ``extends`` is true, else
    the whole prompt. ``logprobs`` has one log probability (in nats) for each of ``sampled_ids``, or is empty when the
    server gave none.
    """

    extends: bool = False
    prompt_ids: Ids = Ids()
    sampled_ids: Ids = Ids()
    logprobs: BoundedFloats = Floats()

    @classmethod
    def of(cls, prompt: Iterable[int], sampled: Iterable[int], logprobs: Iterable[float] = (), **more: bool) -> Self:
        """Make tokens of any iterables of numbers."""
        return cls(**more, prompt_ids=Ids(prompt), sampled_ids=Ids(sampled), logprobs=Floats(logprobs))

    @staticmethod
    def known_logprobs(values: Sequence[float], count: int) -> Floats:
        """A logprob for each of ``count`` ids, or nothing where one is missing, no number, out of range, or above 0 by
        more than rounding: such a server gives probabilities or logits."""
        if not values or len(values) != count or not math.isfinite(sum(values)):
            return Floats()
        low, high = min(values), max(values)
        if low < -LARGEST or high > 1e-4:
            return Floats()
        return Floats(values if high <= 0 else [min(value, 0.0) for value in values])


_TRL = "trl-policy"  # whose versions are counted without zeros
_VERSIONED = re.compile(rf"(?P<name>.+(?=-v\d{{6}})|{_TRL})-v(?P<version>\d+)\Z")


class PolicyRef(Frozen):
    """Which weights sampled something: a base model and, when one was active, a versioned adapter."""

    base_model: str
    adapter: str | None = None
    version: int | None = None

    @classmethod
    def from_served_name(cls, base_model: str, served: str) -> Self:
        """Read ``<adapter>-v000007`` and TRL's ``trl-policy-v7`` (SGLang: ``<base model>:<adapter>``) as versions of
        adapters, and any other name as the base model.
        """
        served = served.removeprefix(f"{base_model}:")
        if (match := _VERSIONED.match(served)) is None:
            return cls(base_model=base_model)
        return cls(base_model=base_model, adapter=match["name"], version=int(match["version"]))

    @property
    def served_name(self) -> str:
        """The model name a server knows these weights by."""
        return self.base_model if self.adapter is None else versioned_name(self.adapter, self.version or 0)


def versioned_name(adapter: str, version: int) -> str:
    """``("shop", 7)`` -> ``"shop-v000007"``: a name is used for one set of weights only, ever."""
    return f"{adapter}-v{version}" if adapter == _TRL else f"{adapter}-v{version:06d}"


class Usage(Frozen):
    """Tokens billed (``cached_tokens`` are among ``prompt_tokens``), model calls, and steps of environments.

    Addition adds every field.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0
    steps: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in type(self).model_fields})


class SamplingParams(Frozen):
    """The sampling parameters of a completion. ``None`` leaves the choice to the server; see ``NEUTRAL_PARAMETERS``."""

    temperature: FiniteFloat | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: tuple[str, ...] = ()
    seed: int | None = None


class Completion(Frozen):
    """One answer of an engine. ``tokens`` holds the *whole* prompt here (``extends`` false)."""

    message: Message
    tokens: Tokens | None = None
    finish_reason: str | None = None
    usage: Usage = Usage()
    policy: PolicyRef | None = None
    sampling: SamplingParams | None = None
    metadata: JsonObject = Field(default_factory=dict)


class Observation(Frozen):
    """An answer of an environment, and the step's reward. ``terminated``: the task ended; ``truncated``: by a limit."""

    messages: tuple[Message, ...] = ()
    reward: Bounded = 0.0
    terminated: bool = False
    truncated: bool = False


class Node(Frozen):
    """One message of an episode's tree.

    ``reward`` is that of the step which a sampled node caused (``None`` until it was executed). ``simulated``: that
    step was taken in a fork of the environment only. ``metadata`` belongs to the recorder (sampling attempts, the raw
    response without its token arrays) and, under ``"search"``, to the strategy.
    """

    parent: int | None
    message: Message
    sampled: bool = False
    tokens: Tokens | None = None
    policy: PolicyRef | None = None
    sampling: SamplingParams | None = None
    finish_reason: str | None = None
    reward: Bounded | None = None
    simulated: bool = False
    value: FiniteFloat | None = None
    visits: int = 0
    metadata: JsonObject = Field(default_factory=dict)

    @property
    def at(self) -> float | None:
        """When it was made, in Unix time; ``None`` where its recorder did not note it."""
        return _number(self.metadata.get(AT))

    @property
    def seconds(self) -> float | None:
        """How long the answer took to sample, as far as its recorder measured that."""
        return _number(self.metadata.get(SECONDS, self.metadata.get("latency")))


def _number(value: JsonValue) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


class StopReason(StrEnum):
    """Why an episode ended."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    TIMEOUT = "timeout"
    NO_ACTION = "no_action"
    ERROR = "error"
    UNFINISHED = "unfinished"  # not ended yet, or its process has died


class FailureKind(StrEnum):
    """The origin of a failure; only infrastructure failures are worth a retry."""

    INFRASTRUCTURE = "infrastructure"
    ENVIRONMENT = "environment"
    MODEL = "model"
    GRADER = "grader"


class Failure(Frozen):
    """An error as a value. ``boundary`` names the place where it was caught."""

    kind: FailureKind
    message: str
    boundary: str


class StrategySpec(Frozen):
    """The strategy of an episode and its options, enough to build it again."""

    name: str
    options: JsonObject = Field(default_factory=dict)


class Times(Frozen):
    """Unix timestamps, in seconds. ``finished`` of an unfinished episode is when it last grew."""

    started: FiniteFloat
    finished: FiniteFloat


class Trajectory(Frozen):
    """One episode, frozen. ReAct is a tree with one path, so every strategy has this shape.

    ``head`` is the last node of the path that was acted on. ``failure`` is set when the episode is not a valid sample
    of the policy's behaviour; such an episode never counts as one with zero reward.
    """

    schema_version: int = SCHEMA_VERSION
    id: str
    run_id: str
    group_id: str
    task: Task
    strategy: StrategySpec
    policy: PolicyRef
    nodes: tuple[Node, ...]
    head: int | None
    stop: StopReason
    tools: tuple[JsonObject, ...] = ()
    evidence: JsonObject = Field(default_factory=dict)
    failure: Failure | None = None
    usage: Usage = Usage()
    times: Times

    def path(self, leaf: int | None = None) -> tuple[int, ...]:
        """Node indices from the root to ``leaf`` (default: ``head``)."""
        return path_to(self.nodes, self.head if leaf is None else leaf)

    def messages(self, leaf: int | None = None) -> tuple[Message, ...]:
        """The conversation from the root to ``leaf`` (default: ``head``)."""
        return tuple(self.nodes[index].message for index in self.path(leaf))

    def acted(self) -> tuple[int, ...]:
        """Indices of the answers that were acted on, in order: also those on paths that a rewritten history left."""
        return acted_nodes(self.nodes, self.head)

    def ends(self) -> tuple[int, ...]:
        """The last node of every path that was acted on, in order; the last one is ``head``.

        Several where the history was rewritten: each is the conversation as the model saw it then.
        """
        if self.head is None:
            return ()
        last = {*self.path()}
        left = [at for at in self.acted() if at not in last]
        inner = {up for at in left for up in self.path(at)[:-1]}
        return (*(at for at in left if at not in inner), self.head)

    def sampled(self, leaf: int | None = None) -> Iterator[Node]:
        """The nodes that the policy sampled, from the root to ``leaf`` (default: all that were acted on)."""
        indices = self.acted() if leaf is None else self.path(leaf)
        return (self.nodes[index] for index in indices if self.nodes[index].sampled)

    @property
    def episode_return(self) -> float:
        """Undiscounted sum of the step rewards of what was acted on."""
        return sum(self.nodes[index].reward or 0.0 for index in self._stepped())

    @property
    def known_return(self) -> float | None:
        """``episode_return``; ``None`` for a failed episode, for one in which no step was rewarded, and where the
        environment gives no rewards."""
        rewarded = any(self.nodes[index].reward is not None for index in self._stepped())
        reported = rewards_steps(self.task.environment, self.evidence) or self.episode_return
        return self.episode_return if rewarded and reported and self.failure is None else None

    def _stepped(self) -> list[int]:
        return sorted({*self.path(), *self.acted()})


class Score(Frozen):
    """A judgement of one trajectory. Scores are appended, never rewritten; unscored is ``reward=None``, never 0.0.

    ``reward_version`` is that of the reward that judged it: scores of two versions are not compared. A later score of
    the same version takes its place; one with ``reward=None`` withdraws it.
    """

    trajectory_id: str
    reward: Bounded | None
    value: Bounded | None = None
    weight: Bounded = 1.0
    detail: JsonObject = Field(default_factory=dict)
    reward_version: str


class Sample(Frozen):
    """One training sequence: a run of turns in which every prompt extends the one before.

    ``input_ids``, ``mask`` (true where the policy sampled the token) and ``logprobs`` (0.0 where it did not) all have
    length T. ``advantage`` weighs every sampled token, unless ``token_advantages`` (length T) gives each its own;
    so do ``temperature``, at which it was sampled, and ``token_temperatures``. ``count``: equal samples it stands for.
    ``teacher_logprobs``: those of a teacher (0.0 where ``mask`` is false), or empty.
    ``spans``: node, start and stop of what was sampled, where that is nodes of a stored tree.
    """

    trajectory_id: str
    leaf: int
    input_ids: Ids
    mask: Mask
    logprobs: BoundedFloats
    advantage: FiniteFloat = 1.0
    token_advantages: BoundedFloats = Floats()
    policy: PolicyRef | None = None
    count: int = Field(default=1, ge=1)
    temperature: FiniteFloat = 1.0
    token_temperatures: BoundedFloats = Floats()
    teacher_logprobs: BoundedFloats = Floats()
    spans: tuple[tuple[int, int, int], ...] = ()

    def advantage_at(self, position: int) -> float:
        """The weight of the sampled token at ``position``."""
        return self.token_advantages[position] if self.token_advantages else self.advantage

    def temperature_at(self, position: int) -> float:
        """The temperature that the token at ``position`` was sampled at."""
        return self.token_temperatures[position] if self.token_temperatures else self.temperature


class Adapter(Frozen):
    """A trained LoRA adapter or whole model on disk. ``name`` is the versioned name; ``sha256`` that of the weights."""

    name: str
    version: int
    parent: str | None
    path: str
    base_model: str
    sha256: str
    step: int
    metrics: dict[str, float] = Field(default_factory=dict)


class Probe(Frozen, extra="ignore"):
    """Fixed token ids and the trainer's logprobs of ids 1 .. T-1, to be compared with those of a server.

    ``max_difference`` bounds the mean absolute difference, in nats. An earlier release stored more fields.
    """

    token_ids: tuple[int, ...] = Field(min_length=2)
    logprobs: tuple[Bounded, ...]
    max_difference: float = Field(gt=0)


class EpisodeRequest(Frozen):
    """The input of a runner for one episode, whose id follows from it. ``sample`` counts those of a task in its group,
    ``attempt`` replacements of a failed one."""

    task: Task
    run_id: str
    group_id: str
    sample: int = 0
    attempt: int = 0
    seed: int = 0
    served_model: str | None = None
    sampling: SamplingParams = SamplingParams()
