"""Single decisions of stored episodes: the state before a turn, answers sampled there alone, their values."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from openhands_rl_plugin.core.conversation import REPLAYED_AS
from openhands_rl_plugin.core.errors import CaughtFailure, boundary
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.core.records import PrefixNote, trajectory_id
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Failure,
    FailureKind,
    JsonObject,
    Message,
    Node,
    PolicyRef,
    SamplingParams,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Trajectory,
)
from openhands_rl_plugin.models.engines.seeded import SeededEngine
from openhands_rl_plugin.rollout.alternatives import other_answer
from openhands_rl_plugin.rollout.prefix import DIFFERED, can_begin_others, path_before
from openhands_rl_plugin.rollout.strategies.annotations import action_key

STRATEGY = StrategySpec(name="single-answer")


@dataclass(frozen=True)
class Decision:
    """The state before a turn of a stored episode.

    ``path``: what was said until then, without token ids; ``prompt``: the same in the words in which the host sends it;
    ``prompt_ids``: the recorded ids of that. ``tools``: what was offered.
    ``sampling``: how the recorded answer was sampled. ``taken``: what stored episodes answered here, and the reward of
    each in the end.
    """

    task: Task
    place: PrefixNote
    path: tuple[Node, ...]
    prompt: tuple[Message, ...]
    tools: tuple[JsonObject, ...]
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    taken: tuple[tuple[Message, float], ...]

    @property
    def name(self) -> str:
        """The task, the source and its turns before this one, as in the group of a prefix."""
        return f"{self.task.id}@{self.place.trajectory}+{sum(node.sampled for node in self.path)}"

    def group(self, run_id: str) -> str:
        """The id of the group of answers of a run."""
        return f"{run_id}/{self.name}"

    def other(self, said: Message) -> Node:
        """An answer here, to be executed after the path."""
        return other_answer(self.path, said, self.place)


def decisions_of(played: Sequence[tuple[Trajectory, float, bool]]) -> list[Decision]:
    """Every state with a recorded answer, once; episodes come with their reward, and whether they succeeded.

    Left out are episodes that cannot be replayed, and answers without recorded tokens.
    """
    found: dict[tuple[object, ...], list[tuple[Trajectory, int, float, bool]]] = {}
    for trajectory, reward, good in played:
        if not can_begin_others(trajectory):
            continue
        for turn, at in enumerate(trajectory.acted()):
            node = trajectory.nodes[at]
            if node.tokens is not None and node.sampling is not None:
                state = (trajectory.task.id, tuple(map(_said, trajectory.messages(node.parent))))
                found.setdefault(state, []).append((trajectory, turn, reward, good))
    return [_decision(alike) for alike in found.values()]


def _as_sent(node: Node) -> Message:
    """A host repeats an answer in a form of its own."""
    form = node.metadata.get(REPLAYED_AS)
    return node.message if form is None else Message.model_validate(form)


def _said(message: Message) -> tuple[object, ...]:
    return message.role, *action_key(message)


def _decision(alike: Sequence[tuple[Trajectory, int, float, bool]]) -> Decision:
    source, turn, _, good = alike[0]
    acted = source.acted()
    node = source.nodes[acted[turn]]
    assert node.tokens is not None and node.sampling is not None
    context = EpisodeTree.thaw(source).context_ids(acted[turn])
    return Decision(
        task=source.task,
        place=PrefixNote(trajectory=source.id, turns=turn + 1, of=len(acted), good=good),
        path=path_before(source, turn, good=good),
        prompt=tuple(_as_sent(source.nodes[at]) for at in source.path(node.parent)) if node.parent is not None else (),
        tools=source.tools,
        prompt_ids=context[: len(context) - len(node.tokens.sampled_ids)],
        sampling=node.sampling.model_copy(update={"seed": None}),
        taken=tuple((each.nodes[each.acted()[at]].message, reward) for each, at, reward, _ in alike),
    )


class SingleAnswers:
    """An ``EpisodeRunner`` without an environment: an episode is one answer to the prefix of its request.

    ``decisions``: by the group of the request. An answer to another prompt than the recorded one is a failure of the
    boundary ``DIFFERED``.
    """

    def __init__(self, engine: Callable[[str], LLMEngine], base_model: str, decisions: Mapping[str, Decision]) -> None:
        self._engine = engine
        self._base_model = base_model
        self._decisions = decisions

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Sample one answer; a failed one comes back with ``failure`` set."""
        decision = self._decisions[request.group_id]
        served = request.served_model or self._base_model
        tree, failure, started = _told(request.prefix, decision.tools), None, time.time()
        engine = SeededEngine(self._engine(served), request.sampling, request.seed)
        try:
            with boundary(FailureKind.MODEL, "pivots.answer"):
                [answer] = await engine.complete(decision.prompt, tools=decision.tools)
            tree.commit(tree.propose(answer))
            failure = None if _prompt_of(answer) == decision.prompt_ids else _DRIFTED
        except CaughtFailure as caught:
            failure = caught.failure
        return tree.freeze(
            request,
            trajectory_id=trajectory_id(request),
            strategy=STRATEGY,
            policy=PolicyRef.from_served_name(self._base_model, served),
            stop=StopReason.ERROR if failure else StopReason.NO_ACTION,
            times=Times(started=started, finished=time.time()),
            failure=failure,
        )

    async def close(self) -> None:
        """Does nothing: the engines are their owner's."""


_DRIFTED = Failure(
    kind=FailureKind.ENVIRONMENT,
    message="the server makes another prompt of this conversation than the recorded one",
    boundary=DIFFERED,
)


def _told(path: Iterable[Node], tools: Sequence[JsonObject]) -> EpisodeTree:
    tree = EpisodeTree(tools=tools, clock=time.time)
    for node in path:
        if node.sampled:
            tree.commit(tree.propose(Completion(message=node.message, metadata=node.metadata)))
        else:
            tree.head = tree.append(node.message)
    return tree


def _prompt_of(answer: Completion) -> tuple[int, ...] | None:
    return None if answer.tokens is None else answer.tokens.prompt_ids


@dataclass
class DecisionValues:
    """What is known of answers: the outcome of each wording, and the rewards of episodes that went on from an outcome.

    Answers with one outcome share one value: the mean of these rewards. Decisions are known by their name.
    """

    outcomes: dict[tuple[str, tuple[object, ...]], str] = field(default_factory=dict)
    """Decision and wording -> outcome."""
    ended: set[tuple[str, str]] = field(default_factory=set)
    """Outcomes with which the episode ended."""
    rewards: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """Decision and outcome -> rewards."""

    def outcome(self, name: str, said: Message) -> str | None:
        """What the answer led to, where that was tried."""
        return self.outcomes.get((name, action_key(said)))

    def tried(self, name: str, said: Message, outcome: str, *, ended: bool) -> None:
        """Note what an answer led to."""
        self.outcomes[name, action_key(said)] = outcome
        if ended:
            self.ended.add((name, outcome))

    def earned(self, name: str, said: Message, reward: float) -> None:
        """Note what an episode earned in the end that went on with this answer, if its outcome is known."""
        if (outcome := self.outcome(name, said)) is not None:
            self.rewards.setdefault((name, outcome), []).append(reward)

    def missing(self, name: str, outcome: str, wanted: int) -> int:
        """How many more of ``wanted`` rewards an outcome needs; one is enough where the episode ended with it."""
        needed = 1 if (name, outcome) in self.ended else wanted
        return max(0, needed - len(self.rewards.get((name, outcome), ())))

    def value(self, name: str, said: Message) -> float | None:
        """The value of an answer; ``None`` where nothing is known of it."""
        outcome = self.outcome(name, said)
        rewards = self.rewards.get((name, outcome), ()) if outcome is not None else ()
        return sum(rewards) / len(rewards) if rewards else None
