"""Finds the places where a prompt does not extend the tokens of the turn before, and how the two differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from openhands_rl_plugin.core.types import TURN, Frozen, Trajectory, kind_of

_WINDOW = 1024
"""How far behind the first difference the texts may meet again, in tokens."""
_MEETS_AFTER = 4


class Difference(Frozen):
    """How a prompt differs from the context before it, in token ids.

    ``at`` is the first place that differs. There ``removed`` of the context is missing and ``inserted`` stands instead;
    after that both are equal, unless they do not meet again (``meets`` is false; then it is all of the rest).
    """

    at: int
    removed: tuple[int, ...]
    inserted: tuple[int, ...]
    meets: bool


class AnswerSpan(Frozen):
    """Where in a context the answer of ``node`` stands."""

    node: int
    start: int
    end: int


class Break(Frozen):
    """A sampled ``node`` whose prompt does not extend the context up to ``previous``, the turn before.

    ``rewritten``: the history was replaced, so that the answers before are no part of the path, or not as they were
    sampled. ``answer`` is the answer in which the first difference lies, ``next_answer`` the first that lies behind it.
    ``repeated`` counts the tokens that were in the context before and have to be processed again.
    """

    node: int
    previous: int
    rewritten: bool
    difference: Difference
    answer: AnswerSpan | None
    next_answer: AnswerSpan | None
    repeated: int
    starts_segment: bool


def breaks_of(trajectory: Trajectory) -> Iterator[Break]:
    """Every break of an episode, in all of its branches, in the order of the nodes."""
    for index, node in enumerate(trajectory.nodes):
        if not node.sampled or node.tokens is None or kind_of(node) != TURN:
            continue
        ancestor = _sampled_above(trajectory, node.parent)
        rewritten = _is_rewritten(trajectory, index, ancestor)
        previous = _acted_before(trajectory, index) if rewritten else ancestor
        if previous is None or (node.tokens.extends and not rewritten):
            continue
        context, spans = context_of(trajectory, previous)
        whole = (context_of(trajectory, ancestor)[0] if node.tokens.extends and ancestor is not None else ()) + (
            node.tokens.prompt_ids
        )
        difference = difference_of(context, whole)
        yield Break(
            node=index,
            previous=previous,
            rewritten=rewritten,
            difference=difference,
            answer=next((span for span in spans if span.start <= difference.at < span.end), None),
            next_answer=next((span for span in spans if span.start > difference.at), None),
            repeated=min(len(context), len(whole)),
            starts_segment=not node.tokens.extends,
        )


def context_of(trajectory: Trajectory, leaf: int) -> tuple[tuple[int, ...], tuple[AnswerSpan, ...]]:
    """The token ids from the start of the segment to the end of ``leaf``, and where its answers stand in them."""
    ids: list[int] = []
    spans: list[AnswerSpan] = []
    for index in trajectory.path(leaf):
        tokens = trajectory.nodes[index].tokens
        if tokens is None:
            continue
        if not tokens.extends:
            ids.clear()
            spans.clear()
        ids += tokens.prompt_ids
        spans.append(AnswerSpan(node=index, start=len(ids), end=len(ids) + len(tokens.sampled_ids)))
        ids += tokens.sampled_ids
    return tuple(ids), tuple(spans)


def difference_of(context: Sequence[int], prompt: Sequence[int]) -> Difference:
    """The first place where ``prompt`` leaves ``context``, and where they meet again."""
    at = 0
    shortest = min(len(context), len(prompt))
    while at < shortest and context[at] == prompt[at]:
        at += 1
    before, after = context[at : at + _WINDOW], prompt[at : at + _WINDOW]
    meeting = _meeting(before, after)
    removed, inserted = meeting or (len(before), len(after))
    return Difference(
        at=at, removed=tuple(before[:removed]), inserted=tuple(after[:inserted]), meets=meeting is not None
    )


def _meeting(before: Sequence[int], after: Sequence[int]) -> tuple[int, int] | None:
    """The smallest numbers of tokens to skip in both so that the next few, or all of the rest, are the same."""
    places: dict[tuple[int, ...], int] = {}
    for at in range(len(before) - _MEETS_AFTER + 1):
        places.setdefault(tuple(before[at : at + _MEETS_AFTER]), at)
    pieces = ((at, tuple(after[at : at + _MEETS_AFTER])) for at in range(len(after) - _MEETS_AFTER + 1))
    meetings = [(places[piece], at) for at, piece in pieces if piece in places]
    for skipped, added in sorted(meetings, key=sum):
        # Every prompt has the same end, so a match that ends with it says nothing.
        if not _ends_with_prompt(before[skipped:], after[added:]):
            return skipped, added
    for size in range(min(_MEETS_AFTER - 1, len(before)), 0, -1):
        for at in range(len(after) - size + 1):
            if after[at : at + size] == before[-size:]:
                return len(before) - size, at
    return None


def _ends_with_prompt(before: Sequence[int], after: Sequence[int]) -> bool:
    return len(after) < len(before) and tuple(before[: len(after)]) == tuple(after)


def _sampled_above(trajectory: Trajectory, at: int | None) -> int | None:
    """The nearest node at or above ``at`` that was sampled and has token ids."""
    while at is not None and not (trajectory.nodes[at].sampled and trajectory.nodes[at].tokens):
        at = trajectory.nodes[at].parent
    return at


def _is_rewritten(trajectory: Trajectory, index: int, ancestor: int | None) -> bool:
    """Whether the recorder says so, or an answer on the path was not sampled there."""
    nodes = trajectory.nodes
    if nodes[index].metadata.get("history_rewritten"):
        return True
    # The opening of an episode may hold worked examples; only what comes after an answer is a copy of one.
    at = nodes[index].parent
    while at is not None and at != ancestor:
        if ancestor is not None and nodes[at].message.role == "assistant" and not nodes[at].sampled:
            return True
        at = nodes[at].parent
    return False


def _acted_before(trajectory: Trajectory, index: int) -> int | None:
    """The answer that was executed last before ``index`` was sampled."""
    nodes = trajectory.nodes
    parents = {node.parent for node in nodes[: index + 1]}
    return next(
        (
            at
            for at in reversed(range(index))
            if nodes[at].sampled
            and nodes[at].tokens is not None
            and kind_of(nodes[at]) == TURN
            and nodes[at].parent != nodes[index].parent
            and (nodes[at].reward is not None or at in parents)
        ),
        None,
    )
