"""Recorded trajectories -> training sequences -> micro-batches. Recorded ids are used as they are.

Sequences are packed without padding, with shared prefixes stored once (a prefix tree). Rollouts of a group have the
same prompt, and often the same first turns. A token's hidden state depends on the tokens before it only, so a shared
prefix needs one computation, in which the gradients of all continuations are summed. The result is the same as without
sharing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.arrays import Floats, Ids, Mask
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.judgements import asked_in_common
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, altering_parameters
from openhands_rl_plugin.core.redaction import is_redacted
from openhands_rl_plugin.core.types import (
    TURN,
    FailureKind,
    Node,
    Sample,
    SamplingParams,
    StopReason,
    Trajectory,
    kind_of,
)

MIN_SHARED = 16
"""Shorter common prefixes are not shared: an additional attention call costs more than computing them twice."""


@dataclass(frozen=True)
class Run:
    """Rows ``start:stop`` are consecutive tokens, rows ``stop:end`` all their continuations.

    ``depth``: the number of tokens before the run in each of its sequences. ``parent``: the index of the run with the
    last of them.
    """

    start: int
    stop: int
    end: int
    depth: int
    parent: int | None


@dataclass(frozen=True)
class Layout:
    """``ids`` and ``positions`` of N rows; ``rows[s][t]`` is the row of token t of sequence s."""

    ids: Ids
    positions: tuple[int, ...]
    runs: tuple[Run, ...]
    rows: tuple[tuple[int, ...], ...]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of equal leading items."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def lay_out(sequences: Iterable[Iterable[int]]) -> Layout:
    """The layout of one or more non-empty ``sequences``. A run is directly followed by all its descendants."""
    known = [Ids(each) for each in sequences]
    rows: list[tuple[int, ...]] = [()] * len(known)
    ids: list[Ids] = []
    positions: list[int] = []
    above: dict[int, int | None] = {}  # the first row of each run -> the row before it in its sequences
    # Of the sequence before, in the order of their ids: its tokens, their rows, and where its runs begin.
    before, path, cuts = Ids(), (), [0]
    for at in sorted(range(len(known)), key=lambda at: bytes(known[at])):
        shared, before = common_prefix(before, known[at]), known[at]
        while cuts[-1] > shared:
            cuts.pop()
        if shared - cuts[-1] < MIN_SHARED:
            shared = cuts[-1]
        elif shared < len(before):
            cuts.append(shared)
        if shared < len(before):
            first, branch = len(positions), path[shared - 1] if shared else None
            above[first] = branch
            if branch is not None:
                above.setdefault(branch + 1, branch)
            path = (*path[:shared], *range(first, first + len(before) - shared))
            positions.extend(range(shared, len(before)))
            ids.append(before[shared:])
        rows[at] = path
    starts = sorted(above)
    stops = [*starts[1:], len(positions)]
    parents = [None if (up := above[start]) is None else bisect_right(starts, up) - 1 for start in starts]
    ends = list(stops)
    for index in range(len(starts) - 1, -1, -1):
        if (parent := parents[index]) is not None:
            ends[parent] = max(ends[parent], ends[index])
    spans = zip(starts, stops, ends, parents, strict=True)
    runs = tuple(Run(start, stop, end, positions[start], parent) for start, stop, end, parent in spans)
    return Layout(Ids(b"".join(ids)), tuple(positions), runs, tuple(rows))


_INTERRUPTED = frozenset({StopReason.TIMEOUT, StopReason.UNFINISHED})
_LIMIT_REACHED = frozenset({StopReason.TRUNCATED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS})


def is_interrupted(trajectory: Trajectory) -> bool:
    """Whether a timeout or the end of the process ended the episode, so its reward is not a result of the policy."""
    return trajectory.stop in _INTERRUPTED


def is_failed(trajectory: Trajectory, *, rewarded: bool = True) -> bool:
    """Whether a failure excludes the episode; where no reward is needed, one of the model does not."""
    failure = trajectory.failure
    return failure is not None and (rewarded or failure.kind is not FailureKind.MODEL)


def is_cut_short(trajectory: Trajectory) -> bool:
    """Whether a limit, not the task, ended the episode or truncated its last answer."""
    return _ended_by_limit(trajectory) or trajectory.stop is StopReason.TIMEOUT


def is_overlong(trajectory: Trajectory, settings: TrainingSettings) -> bool:
    """Whether ``overlong`` excludes the episode (DAPO's overlong filtering): a limit ended it or its last answer."""
    return settings.overlong == "leave-out" and _ended_by_limit(trajectory)


def _ended_by_limit(trajectory: Trajectory) -> bool:
    last = next(reversed([*trajectory.sampled()]), None)
    return trajectory.stop in _LIMIT_REACHED or (last is not None and last.finish_reason == "length")


def off_policy_sampling(trajectory: Trajectory) -> str:
    """How an answer that was acted on was sampled, if not from the policy at a temperature; else empty."""
    found = (_in_words(node.sampling) for node in trajectory.sampled() if is_sampled_off_policy(node.sampling))
    return next(found, "")


def is_sampled_off_policy(params: SamplingParams | None) -> bool:
    """Whether an answer was sampled greedily, or not from softmax(logits / temperature)."""
    return params is not None and (params.temperature == 0 or bool(_altering(params)))


def temperature_of(params: SamplingParams | None) -> float:
    """The temperature; one that was not sent is taken to be 1."""
    return 1.0 if params is None or params.temperature is None else params.temperature


def _in_words(params: SamplingParams | None) -> str:
    altering = {} if params is None else _altering(params)
    if temperature_of(params) != 1.0:
        altering = {"temperature": temperature_of(params), **altering}
    return ", ".join(f"{name} = {value:g}" for name, value in altering.items())


def _altering(params: SamplingParams) -> dict[str, float]:
    return altering_parameters({name: getattr(params, name, None) for name in ("top_p", *NEUTRAL_PARAMETERS)})


def regrouped(trajectory: Trajectory) -> Trajectory:
    """The episode, with a group id for all episodes of one task, policy version and strategy, across runs.

    A baseline estimates the expected return of one policy on one task.
    """
    key = (*asked_in_common(trajectory.task), trajectory.policy.served_name, trajectory.strategy.name)
    return trajectory.model_copy(update={"group_id": "\0".join(key)})


def samples_of(
    trajectory: Trajectory, advantage: float = 1.0, leaf: int | None = None, *, need_logprobs: bool = True
) -> list[Sample]:
    """The training sequences of one path (default: of all that was acted on), in order.

    Turns are merged as long as every prompt extends the tokens before it; another prompt (a condensed or rewritten
    history) starts a new sequence. Every answer is trained once, also where several sequences have it as context.
    Answers on paths that a rewritten history left are left out where they were not recorded. Raises ``TrainingError``
    when a sampled node of the path has no tokens, or, with ``need_logprobs`` (for reinforcement learning, not for SFT),
    no logprobs or non-finite ones.
    """
    if leaf is not None:
        return list(_segments(trajectory, leaf, advantage, set(), need_logprobs))
    if trajectory.head is None:
        return []
    acted = set(trained_nodes(trajectory, need_logprobs=need_logprobs))
    others = {at for at, node in enumerate(trajectory.nodes) if node.sampled and at not in acted}
    left = acted - set(trajectory.path())
    ends = [*_leaves(trajectory, left), trajectory.head]
    return [sample for end in ends for sample in _segments(trajectory, end, advantage, others, need_logprobs)]


def trained_nodes(trajectory: Trajectory, *, need_logprobs: bool = True) -> tuple[int, ...]:
    """The completions that were executed, in order; on paths that a rewritten history left, those with recorded tokens.

    A summary that the policy wrote to condense a history is context.
    """
    acted, path = trajectory.acted(), set(trajectory.path())
    if path.issuperset(acted):
        return acted
    recorded = recorded_nodes(trajectory, need_logprobs=need_logprobs)
    return tuple(at for at in acted if at in path or at in recorded)


def sampled_nodes(trajectory: Trajectory) -> tuple[int, ...]:
    """All recorded completions that were sampled from the policy, in order, also malformed ones and other proposals.

    Those are the samples of an algorithm that needs no reward.
    """
    recorded = recorded_nodes(trajectory)
    turns = (at for at, node in enumerate(trajectory.nodes) if node.sampled and kind_of(node) == TURN)
    return tuple(at for at in turns if at in recorded and not is_sampled_off_policy(trajectory.nodes[at].sampling))


def is_recorded(trajectory: Trajectory, *, need_logprobs: bool = True) -> bool:
    """Whether the path to the head has all data that ``samples_of`` needs, and at least one sampled token."""
    own = [trajectory.nodes[at] for at in trajectory.path() if trajectory.nodes[at].sampled]
    return bool(own) and not any(_lacks(node, need_logprobs) for node in own)


def recorded_nodes(trajectory: Trajectory, *, need_logprobs: bool = True) -> frozenset[int]:
    """The nodes that can be trained or be context: they and all nodes before them have what ``samples_of`` needs.

    A branch may have less data than the acted path, because redaction removed possible secrets from it.
    """
    whole: set[int] = set()
    for at, node in enumerate(trajectory.nodes):
        if (node.parent is None or node.parent in whole) and not (node.sampled and _lacks(node, need_logprobs)):
            whole.add(at)
    return frozenset(whole)


def samples_of_tree(
    trajectory: Trajectory,
    advantages: Mapping[int, float],
    *,
    need_logprobs: bool = True,
    again: Mapping[int, tuple[int, float]] | None = None,
) -> list[Sample]:
    """The training sequences of a search tree in which every sampled node has an advantage of its own.

    ``advantages`` is ``node -> advantage``; sampled nodes without one are context only, and nodes of branches that were
    not fully recorded are left out. Every node is trained once, however many leaves are below it. ``again``: how often
    a node was sampled more often, and the advantage of those samples, which get a separate sequence. Raises
    ``TrainingError`` for the path to the head as ``samples_of`` does.
    """
    acted = {up for end in trajectory.ends() for up in trajectory.path(end)}
    path = set(trajectory.path())
    recorded = recorded_nodes(trajectory, need_logprobs=need_logprobs)
    named = {at: value for at, value in advantages.items() if at in path or at in recorded}
    # What was acted on comes first, so that it stays one sequence.
    ends = sorted(_leaves(trajectory, named), key=lambda at: (at not in acted, at))
    trained = {at for at, node in enumerate(trajectory.nodes) if node.sampled and at not in named}
    samples: list[Sample] = []
    for leaf in ends:
        samples.extend(_segments(trajectory, leaf, named, trained, need_logprobs))
    for at, (count, advantage) in sorted((again or {}).items()):
        if at in recorded:
            others = {other for other, node in enumerate(trajectory.nodes) if node.sampled and other != at}
            found = _segments(trajectory, at, advantage, others, need_logprobs)
            # Their tokens are those of the node itself, which is noted once.
            samples.extend(sample.model_copy(update={"count": count, "spans": ()}) for sample in found)
    return samples


def _leaves(trajectory: Trajectory, nodes: Collection[int]) -> list[int]:
    """The nodes of ``nodes`` without a descendant in ``nodes``, in order."""
    inner = {up for at in nodes for up in trajectory.path(at)[:-1]}
    return sorted(set(nodes) - inner)


def pack(samples: Sequence[Sample], max_tokens_per_micro_batch: int) -> list[list[Sample]]:
    """Group samples so that each group takes at most ``max_tokens_per_micro_batch`` rows when laid out.

    Sequences are packed without padding, so samples are grouped by common prefix, not by length: a prefix that
    neighbours share is computed once. Of all partitions of the sorted samples into groups of neighbours the one with
    the fewest recomputed tokens is chosen, and of those the one with the fewest groups. A sample longer than the limit
    is a group of its own. Every sample is in exactly one group; the result does not depend on the order of ``samples``,
    except for the order of equal ones.
    """
    ordered = sorted(samples, key=lambda sample: bytes(sample.input_ids))
    # The length of the common prefix of each with its left neighbour. The layout may leave up to MIN_SHARED tokens of
    # it unshared, so rows are an upper bound.
    shared = [0] * len(ordered)
    for at in range(1, len(ordered)):
        common = common_prefix(ordered[at - 1].input_ids, ordered[at].input_ids)
        shared[at] = max(0, common - MIN_SHARED)
    starts = _cheapest_starts([len(sample.input_ids) for sample in ordered], shared, max_tokens_per_micro_batch)
    return [ordered[start:stop] for start, stop in pairwise((*starts, len(ordered)))]


def _cheapest_starts(lengths: Sequence[int], shared: Sequence[int], limit: int) -> list[int]:
    """Start indices of the groups, with the fewest tokens shared across a cut, then the fewest groups."""
    # Of the first n samples: tokens computed twice, groups, and where the last group begins
    best = [(0, 0, 0)]
    for stop in range(1, len(lengths) + 1):
        rows, found = 0, None
        for start in range(stop - 1, -1, -1):
            # The first of a group is computed whole, because its left neighbour is in another group.
            rows += lengths[start] - (shared[start + 1] if start + 1 < stop else 0)
            if rows > limit and start < stop - 1:
                break
            twice, groups, _ = best[start]
            lost = shared[start] + MIN_SHARED if shared[start] else 0
            cost = (twice + lost, groups + 1, start)
            found = cost if found is None else min(found, cost)
        assert found is not None  # a sample alone is always a group
        best.append(found)
    starts: list[int] = []
    at = len(lengths)
    while at > 0:
        at = best[at][2]
        starts.append(at)
    return starts[::-1]


class _Span(NamedTuple):
    """The trained tokens ``start:stop`` of a sequence, which were sampled at ``node``."""

    node: int
    start: int
    stop: int
    advantage: float
    temperature: float


def _segments(
    trajectory: Trajectory, leaf: int, advantage: float | Mapping[int, float], trained: set[int], need_logprobs: bool
) -> Iterator[Sample]:
    pieces: list[
        tuple[Ids, Floats | None]
    ] = []  # ids, and the logprobs at which they were sampled, if they are trained
    spans: list[_Span] = []
    length = 0
    for index in trajectory.path(leaf):
        node = trajectory.nodes[index]
        if not node.sampled:
            continue
        if why := _lacks(node, need_logprobs):
            raise TrainingError(f"trajectory {trajectory.id}, node {index}: {why}")
        tokens = node.tokens
        assert tokens is not None
        if not tokens.extends:
            if spans:
                yield _sample(trajectory, leaf, pieces, spans)
            pieces, spans, length = [], [], 0
        start, own = length + len(tokens.prompt_ids), index not in trained
        length = start + len(tokens.sampled_ids)
        pieces += [(tokens.prompt_ids, None), (tokens.sampled_ids, tokens.logprobs if own else None)]
        if own:
            value = advantage[index] if isinstance(advantage, Mapping) else advantage
            spans.append(_Span(index, start, length, value, temperature_of(node.sampling)))
            trained.add(index)
    if spans:
        yield _sample(trajectory, leaf, pieces, spans)


def _sample(
    trajectory: Trajectory, leaf: int, pieces: Sequence[tuple[Ids, Floats | None]], spans: Sequence[_Span]
) -> Sample:
    """The sequence up to its last trained token."""
    end = spans[-1].stop
    advantage, token_advantages = _by_token(spans, [span.advantage for span in spans], 0.0)
    temperature, token_temperatures = _by_token(spans, [span.temperature for span in spans], 1.0)
    # Not validated, for speed: the parts come from validated values, and there are tens of thousands of them.
    return Sample.model_construct(
        trajectory_id=trajectory.id,
        leaf=leaf,
        input_ids=Ids(b"".join(ids for ids, _ in pieces))[:end],
        mask=Mask(b"".join(bytes([logprobs is not None]) * len(ids) for ids, logprobs in pieces))[:end],
        logprobs=Floats(b"".join(logprobs or bytes(4 * len(ids)) for ids, logprobs in pieces))[:end],
        advantage=advantage,
        token_advantages=token_advantages,
        policy=next((policy for span in spans if (policy := trajectory.nodes[span.node].policy)), None),
        temperature=temperature,
        token_temperatures=token_temperatures,
        spans=tuple(span[:3] for span in spans),
    )


def _by_token(spans: Sequence[_Span], values: Sequence[float], elsewhere: float) -> tuple[float, Floats]:
    """The value that all spans have, or 1.0 and one for each token."""
    if len({*values}) == 1:
        return values[0], Floats()
    found = [elsewhere] * spans[-1].stop
    for span, value in zip(spans, values, strict=True):
        found[span.start : span.stop] = [value] * (span.stop - span.start)
    return 1.0, Floats(found)


def _lacks(node: Node, need_logprobs: bool) -> str:
    """Why a sampled node cannot be trained; empty where it can."""
    tokens = node.tokens
    if tokens is None or not tokens.sampled_ids:
        return (
            "no token ids were recorded; use a server that returns them (vLLM or `openhands-rl serve`, "
            "return_token_ids) and roll out again"
        )
    if need_logprobs and len(tokens.logprobs) != len(tokens.sampled_ids):
        return (
            f"{len(tokens.logprobs)} logprobs for {len(tokens.sampled_ids)} sampled tokens; reinforcement learning "
            'needs all of them: use a server that returns logprobs, or train with algorithm = "sft"'
        )
    # A sum is fast, and finite only if all values are (unless it overflows).
    if need_logprobs and not math.isfinite(sum(tokens.logprobs)) and not all(map(math.isfinite, tokens.logprobs)):
        return "a recorded logprob is not finite; drop this trajectory or check the server"
    return ""


def until_secret(trajectory: Trajectory) -> Trajectory:
    """The episode up to the last answer before the first one whose token ids were dropped with a secret.

    The same object when there is none, when the ids are missing for another reason, and when nothing comes before.
    """
    nodes, path = trajectory.nodes, trajectory.path()
    own = (at for at in path if nodes[at].sampled)
    cut = next((at for at in own if nodes[at].tokens is None), None)
    if cut is None or not any(is_redacted(nodes[at].message) for at in path if at <= cut):
        return trajectory
    recorded = recorded_nodes(trajectory, need_logprobs=False)
    before = [at for at in trajectory.acted() if at < cut and at in recorded]
    # A parent has a smaller index than its children, so that the tree of those before is whole.
    return trajectory.model_copy(update={"nodes": nodes[:cut], "head": before[-1]}) if before else trajectory
