"""Drift: where a prompt does not extend the tokens of the turn before, why, what it costs, and the cure.

A segment is a run of acted turns in which every prompt extends the one before.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from enum import StrEnum
from typing import Any

from openhands_rl_plugin.core.messages import has_reasoning
from openhands_rl_plugin.core.redaction import REDACTED
from openhands_rl_plugin.core.types import TURN, Frozen, Message, Node, Score, Trajectory, kind_of

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


Decode = Callable[[Sequence[int]], str]
"""Token ids -> their text, special tokens included."""


class Cause(StrEnum):
    """Why a turn does not extend the one before, or cannot be trained at all."""

    REASONING = "reasoning stripped"
    ARGUMENTS = "arguments re-serialised"
    CONDENSED = "history condensed"
    REWRITTEN = "history rewritten"
    WHITESPACE = "white space or closing tags changed"
    SPECIAL = "special tokens differ"
    GENERATION_PROMPT = "generation prompt differs from history"
    TEMPLATE = "earlier prompt rendered differently"
    RETOKENISED = "text tokenised differently"
    UNKNOWN = "unknown"
    NO_IDS = "no token ids recorded"
    REDACTED = "token ids dropped with a secret"


SETTINGS: dict[Cause, str] = {
    Cause.REASONING: "keep reasoning in earlier turns: a chat template that prints it, or no thinking at all "
    "(chat_template_kwargs = { enable_thinking = false } in the LLM's extra_body)",
    Cause.ARGUMENTS: "native_tool_calling = false for the LLM (calls stay text), or a chat template that prints "
    "arguments as they came",
    Cause.CONDENSED: '[agent.RLAgent.condenser] type = "noop", or a larger max_size, so that it happens less often',
    Cause.REWRITTEN: '[agent.RLAgent.condenser] type = "noop"; no masking or merging of earlier messages',
    Cause.WHITESPACE: "native_tool_calling = true for the LLM (the text form re-adds closing tags and trims), or a "
    "chat template without trim",
    Cause.SPECIAL: "the same end token in generation_config.json (eos_token_id) and in the chat template; no stop "
    "strings that the template does not print",
    Cause.GENERATION_PROMPT: "a chat template that prints the same behind the assistant's role in earlier turns as in "
    "the generation prompt (often an empty <think> block: enable_thinking)",
    Cause.TEMPLATE: "the same system prompt, tools and date in all calls of an episode",
    Cause.RETOKENISED: "nothing to set: the server tokenises its own text again; the recorded ids are right, and the "
    "new segment is what it costs",
    Cause.UNKNOWN: "look at the two turns with `openhands-rl show`, and run this with --tokenizer to see the texts",
    Cause.NO_IDS: "a server that returns token ids (vLLM with return_token_ids, or `openhands-rl serve`)",
    Cause.REDACTED: "keep secrets out of the environment that the agent sees",
}

_FEW = 3
"""So many ids at the end of an answer are an end token and what templates put around it."""


def cause_of(trajectory: Trajectory, found: Break, decode: Decode | None = None) -> Cause:
    """The cause of a break; ``decode`` distinguishes a difference of text from one of tokens."""
    if found.rewritten:
        shorter = len(trajectory.path(found.node)) <= len(trajectory.path(found.previous))
        return Cause.CONDENSED if shorter else Cause.REWRITTEN
    difference = found.difference
    if decode is not None and difference.meets and decode(difference.removed) == decode(difference.inserted):
        return Cause.RETOKENISED
    if found.answer is None:
        return _of_prompt(trajectory, found)
    return _of_answer(trajectory.nodes[found.answer.node], found)


def _of_prompt(trajectory: Trajectory, found: Break) -> Cause:
    """The first difference lies before an answer: at the end of its prompt, or anywhere in it."""
    difference, behind = found.difference, found.next_answer
    if behind is None:
        return Cause.TEMPLATE
    answer = trajectory.nodes[behind.node]
    assert answer.tokens is not None
    end = difference.at + len(difference.removed)
    own_prompt = behind.start - len(answer.tokens.prompt_ids)
    if end > behind.start and has_reasoning(answer):
        return Cause.REASONING  # the generation prompt opens the block of thinking
    if end == behind.start and difference.meets and difference.at > own_prompt:
        return Cause.GENERATION_PROMPT
    return Cause.TEMPLATE


def _of_answer(answer: Node, found: Break) -> Cause:
    span, difference = found.answer, found.difference
    assert span is not None
    left = span.end - difference.at
    replay = _replay_of(answer)
    if replay is not None and answer.message.tool_calls and _same_but_written_otherwise(answer.message, replay):
        return Cause.ARGUMENTS
    if has_reasoning(answer) and len(difference.removed) > len(difference.inserted) and left > _FEW:
        return Cause.REASONING
    if replay is not None and _squeezed(replay.content) == _squeezed(answer.message.content):
        return Cause.WHITESPACE
    text = answer.message.content or ""
    at_edge = difference.at - span.start <= _FEW or left <= _FEW + len(text) - len(text.rstrip())
    if not answer.message.tool_calls and text != text.strip() and at_edge:
        return Cause.WHITESPACE
    if replay is not None:
        return Cause.WHITESPACE if _is_cut(replay.content, text) else Cause.REWRITTEN
    if left <= 1:
        return Cause.SPECIAL
    if answer.message.tool_calls:
        return Cause.ARGUMENTS
    return Cause.SPECIAL if left <= _FEW else Cause.UNKNOWN


def _replay_of(node: Node) -> Message | None:
    noted = node.metadata.get("replayed_as")
    return Message.model_validate(noted) if isinstance(noted, dict) else None


def _same_but_written_otherwise(one: Message, other: Message) -> bool:
    pairs = list(zip(one.tool_calls, other.tool_calls, strict=False))
    return any(own.arguments != told.arguments for own, told in pairs) and all(
        _parsed(own.arguments) == _parsed(told.arguments) for own, told in pairs
    )


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return "".join(arguments.split())


def _squeezed(text: str | None) -> str:
    return "".join((text or "").split())


def _is_cut(replay: str | None, text: str) -> bool:
    """Whether only an end was added or taken, such as a closing tag."""
    one, other = sorted((_squeezed(replay), _squeezed(text)), key=len)
    return other.startswith(one)


BEGINNING = "beginning"
"""Why the first segment of every episode begins."""


def segment_causes(trajectory: Trajectory) -> dict[int, str]:
    """First turn of each segment -> why it begins; empty without token ids."""
    starts = [at for at in trajectory.acted() if (tokens := trajectory.nodes[at].tokens) and not tokens.extends]
    if len(starts) < 2:
        return dict.fromkeys(starts, BEGINNING)
    why = {found.node: cause_of(trajectory, found).value for found in breaks_of(trajectory) if found.starts_segment}
    return {at: BEGINNING if number == 0 else why.get(at, "another conversation") for number, at in enumerate(starts)}


MOST_EXAMPLES = 5
_LONGEST_TEXT = 60


class DriftExample(Frozen):
    """One place: ``removed`` and ``inserted`` are texts when there is a tokenizer, else the numbers of ids."""

    trajectory_id: str
    node: int
    previous: int
    at: int
    removed: str
    inserted: str


class CauseFigures(Frozen):
    """One cause. ``repeated_tokens`` have to be processed once more in training; ``lost_turns`` cannot be trained."""

    cause: Cause
    breaks: int
    episodes: int
    repeated_tokens: int
    lost_turns: int
    setting: str
    examples: tuple[DriftExample, ...]


class DriftReport(Frozen):
    """All of it. ``turns`` counts sampled nodes with token ids, ``tokens`` what their segments hold in all.

    ``segments_by_drift`` are those that begin with a break; the others begin an episode or a branch of a search.
    """

    episodes: int
    turns: int
    segments: int
    segments_by_drift: int
    tokens: int
    sampled_tokens: int
    causes: tuple[CauseFigures, ...]


async def drift_of(
    found: AsyncIterator[tuple[Trajectory, tuple[Score, ...]]], decode: Decode | None = None
) -> DriftReport:
    """Analyse every episode of ``found``, one at a time; the costliest cause comes first."""
    totals = Counter[str]()
    counts, episodes = defaultdict[Cause, Counter[str]](Counter), defaultdict[Cause, set[str]](set)
    examples = defaultdict[Cause, list[DriftExample]](list)
    async for trajectory, _ in found:
        totals["episodes"] += 1
        with_secret: set[int] = set()
        for index, node in enumerate(trajectory.nodes):
            if node.parent in with_secret or REDACTED in node.message.model_dump_json():
                with_secret.add(index)
            if (tokens := node.tokens) is not None and node.sampled:
                held = len(tokens.prompt_ids) + len(tokens.sampled_ids)
                totals += Counter(turns=1, segments=int(not tokens.extends), tokens=held)
                totals["sampled_tokens"] += len(tokens.sampled_ids)
            elif node.sampled:
                cause = Cause.REDACTED if index in with_secret else Cause.NO_IDS
                counts[cause]["lost_turns"] += 1
                episodes[cause].add(trajectory.id)
        for each in breaks_of(trajectory):
            cause = cause_of(trajectory, each, decode)
            totals["segments_by_drift"] += each.starts_segment
            counts[cause].update(breaks=1, repeated_tokens=each.repeated)
            episodes[cause].add(trajectory.id)
            if len(examples[cause]) < MOST_EXAMPLES:
                examples[cause].append(_example(trajectory, each, decode))
    names = ("breaks", "repeated_tokens", "lost_turns")
    figures = [
        CauseFigures(
            cause=cause,
            episodes=len(episodes[cause]),
            setting=SETTINGS[cause],
            examples=tuple(examples[cause]),
            **{name: count[name] for name in names},
        )
        for cause, count in counts.items()
    ]
    figures.sort(key=lambda each: (-each.repeated_tokens, -each.lost_turns, each.cause))
    known = {name: totals[name] for name in DriftReport.model_fields if name != "causes"}
    return DriftReport(**known, causes=tuple(figures))


def _example(trajectory: Trajectory, each: Break, decode: Decode | None) -> DriftExample:
    def text(ids: tuple[int, ...]) -> str:
        said = f"{len(ids)} ids" if decode is None else decode(ids)
        return said if len(said) <= _LONGEST_TEXT else f"{said[: _LONGEST_TEXT - 1]}…"

    removed, inserted = text(each.difference.removed), text(each.difference.inserted)
    places = {"node": each.node, "previous": each.previous, "at": each.difference.at}
    return DriftExample(trajectory_id=trajectory.id, **places, removed=removed, inserted=inserted)
