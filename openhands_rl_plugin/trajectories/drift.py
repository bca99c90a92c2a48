"""Drift: why the tokens of a turn are no prefix of the next prompt, which costs training time; see ``breaks_of`` and
``Cause``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from openhands_rl_plugin.core.errors import ConfigError, boundary, from_extra
from openhands_rl_plugin.core.messages import has_reasoning
from openhands_rl_plugin.core.types import REWRITTEN, TURN, FailureKind, Message, Node, Score, Trajectory, kind_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Decode = Callable[[Sequence[int]], str]
"""Token ids -> their text, special tokens included."""

TOKENIZER = "tokenizer.json"


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a ``tokenizer.json``, given the file or its folder. Raises ``RLError``."""
    with from_extra("train", "tokenizers"):
        from tokenizers import Tokenizer
    file = folder / TOKENIZER if folder.is_dir() else folder
    if not file.is_file():
        raise ConfigError(f"--tokenizer: there is no {file}; give the folder of a model that has a {TOKENIZER}")
    with boundary(FailureKind.MODEL, "--tokenizer"):
        return Tokenizer.from_file(str(file))


_WINDOW = 1024
"""How many tokens after the first difference to search for equal ids again."""
_MEETS_AFTER = 4
_FEW = 3
"""A difference of at most this many ids at a completion's end is an end token and its template text."""
MOST_EXAMPLES = 5
_LONGEST_TEXT = 60


class Cause(StrEnum):
    """Why a turn does not extend the one before."""

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
}


class Difference(NamedTuple):
    """How a prompt differs from the context before it, in token ids.

    ``at`` is the first place that differs. There ``removed`` of the context is missing and ``inserted`` stands instead;
    after that both are equal, unless they do not meet again (``meets`` is false; then it is all of the rest).
    """

    at: int
    removed: tuple[int, ...]
    inserted: tuple[int, ...]
    meets: bool


class Break(NamedTuple):
    """A drift: the prompt of the sampled ``node`` does not extend the context up to ``previous``, the turn before.

    ``repeated``: how many tokens of the earlier context have to be processed again.
    """

    node: int
    previous: int
    cause: Cause
    difference: Difference
    repeated: int
    starts_segment: bool


class AnswerSpan(NamedTuple):
    """The span of the completion of ``node`` in a context, and the start of its part of the prompt."""

    node: int
    prompt: int
    start: int
    end: int


def breaks_of(trajectory: Trajectory, decode: Decode | None = None) -> Iterator[Break]:
    """All breaks of an episode, in all its branches, in the order of the nodes.

    With ``decode``, equal text in other tokens is a separate cause.
    """
    nodes, acted = trajectory.nodes, trajectory.acted()
    for index, node in enumerate(nodes):
        if not node.sampled or node.tokens is None or kind_of(node) != TURN:
            continue
        *path, _ = trajectory.path(index)
        above = max((at for at in path if nodes[at].sampled and nodes[at].tokens), default=None)
        # The opening of an episode may hold worked examples; only what comes after an answer is a copy of one.
        later = [nodes[at] for at in path if above is not None and at > above]
        copied = any(each.message.role == "assistant" and not each.sampled for each in later)
        previous, rewritten = above, copied or bool(node.metadata.get(REWRITTEN))
        if rewritten:
            earlier = (at for at in acted if at < index and nodes[at].tokens and nodes[at].parent != node.parent)
            previous = max(earlier, default=None)
        if previous is None or (node.tokens.extends and not rewritten):
            continue
        context, spans = context_of(trajectory, previous)
        held = context_of(trajectory, above)[0] if node.tokens.extends and above is not None else ()
        prompt = (*held, *node.tokens.prompt_ids)
        difference = difference_of(context, prompt)
        if rewritten:
            shorter = len(path) < len(trajectory.path(previous))
            cause = Cause.CONDENSED if shorter else Cause.REWRITTEN
        elif decode and difference.meets and decode(difference.removed) == decode(difference.inserted):
            cause = Cause.RETOKENISED
        else:
            # Where the context ends before the difference, something was asked otherwise.
            span = next((span for span in spans if difference.at < span.end), None)
            cause = Cause.TEMPLATE if span is None else _cause(nodes[span.node], span, difference)
        repeated = min(len(context), len(prompt))
        yield Break(index, previous, cause, difference, repeated, not node.tokens.extends)


def context_of(trajectory: Trajectory, leaf: int) -> tuple[tuple[int, ...], list[AnswerSpan]]:
    """The token ids from the start of the segment to the end of ``leaf``, and where its answers stand in them."""
    ids: list[int] = []
    spans: list[AnswerSpan] = []
    for index in trajectory.path(leaf):
        if (tokens := trajectory.nodes[index].tokens) is None:
            continue
        if not tokens.extends:
            ids, spans = [], []
        start = len(ids) + len(tokens.prompt_ids)
        spans.append(AnswerSpan(index, len(ids), start, start + len(tokens.sampled_ids)))
        ids += (*tokens.prompt_ids, *tokens.sampled_ids)
    return tuple(ids), spans


def difference_of(context: Sequence[int], prompt: Sequence[int]) -> Difference:
    """The first difference of ``prompt`` and ``context``, and where they are equal again."""
    at = len(list(takewhile(bool, map(eq, context, prompt))))
    before, after = tuple(context[at : at + _WINDOW]), tuple(prompt[at : at + _WINDOW])
    for one, other, size in SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks():
        whole, ends = one + size == len(before), other + size == len(after)
        # All prompts have the same end, so a match at the end is no evidence.
        if size and (whole or (size >= _MEETS_AFTER and not ends)):
            return Difference(at, before[:one], after[:other], True)
    return Difference(at, before, after, False)


def _cause(answer: Node, span: AnswerSpan, difference: Difference) -> Cause:
    """The cause of a break whose first difference is in ``answer``, or in its part of the prompt."""
    at, removed, inserted, meets = difference
    left, text, calls = span.end - at, answer.message.content or "", answer.message.tool_calls
    if at < span.start:
        end = at + len(removed)
        if end > span.start and has_reasoning(answer):
            return Cause.REASONING  # the generation prompt opens the block of thinking
        return Cause.GENERATION_PROMPT if end == span.start and meets and at > span.prompt else Cause.TEMPLATE
    if has_reasoning(answer) and len(removed) > len(inserted) and left > _FEW:
        return Cause.REASONING
    if isinstance(form := answer.metadata.get("replayed_as"), dict):
        replay = Message.model_validate(form)
        if [call.arguments for call in calls] != [call.arguments for call in replay.tool_calls]:
            return Cause.ARGUMENTS
        # Only an end was added or taken, such as a closing tag.
        one, other = sorted(("".join(each.split()) for each in (text, replay.content or "")), key=len)
        return Cause.WHITESPACE if other.startswith(one) else Cause.REWRITTEN
    at_edge = at - span.start <= _FEW or left <= _FEW + len(text) - len(text.rstrip())
    if not calls and text != text.strip() and at_edge:
        return Cause.WHITESPACE
    if left <= (1 if calls else _FEW):
        return Cause.SPECIAL
    return Cause.ARGUMENTS if calls else Cause.UNKNOWN


BEGINNING = "beginning"
"""Why the first segment of every episode begins."""


def segment_causes(trajectory: Trajectory) -> dict[int, str]:
    """First turn of each segment -> why it begins; empty without token ids."""
    starts = [at for at in trajectory.acted() if (tokens := trajectory.nodes[at].tokens) and not tokens.extends]
    if len(starts) < 2:
        return dict.fromkeys(starts, BEGINNING)
    why = {found.node: found.cause.value for found in breaks_of(trajectory) if found.starts_segment}
    return {at: BEGINNING if number == 0 else why.get(at, "another conversation") for number, at in enumerate(starts)}


async def drift_of(
    found: AsyncIterator[tuple[Trajectory, tuple[Score, ...]]], decode: Decode | None = None
) -> dict[str, Any]:
    """Analyse every episode of ``found``, one at a time; the costliest of the ``causes`` comes first.

    ``turns`` counts sampled nodes with token ids, ``tokens`` what their segments hold in all, ``segments_by_drift``
    the segments that begin with a break; the others begin an episode or a branch of a search. Of each cause:
    ``repeated_tokens`` have to be processed once more in training; ``examples`` are places, a line each.
    """
    totals = dict.fromkeys(("episodes", "turns", "segments", "segments_by_drift", "tokens", "sampled_tokens"), 0)
    breaks = defaultdict[Cause, list[tuple[str, Break]]](list)
    async for trajectory, _ in found:
        turns = [node.tokens for node in trajectory.nodes if node.sampled and node.tokens]
        sampled = sum(len(each.sampled_ids) for each in turns)
        totals["episodes"] += 1
        totals["turns"] += len(turns)
        totals["segments"] += sum(not each.extends for each in turns)
        totals["tokens"] += sampled + sum(len(each.prompt_ids) for each in turns)
        totals["sampled_tokens"] += sampled
        for each in breaks_of(trajectory, decode):
            totals["segments_by_drift"] += each.starts_segment
            breaks[each.cause].append((trajectory.id, each))
    causes = [
        {
            "cause": cause,
            "breaks": len(places),
            "episodes": len({identity for identity, _ in places}),
            "repeated_tokens": sum(each.repeated for _, each in places),
            "setting": SETTINGS[cause],
            "examples": [_example(*place, decode) for place in places[:MOST_EXAMPLES]],
        }
        for cause, places in breaks.items()
    ]
    return {**totals, "causes": sorted(causes, key=lambda each: (-each["repeated_tokens"], each["cause"]))}


def _example(identity: str, found: Break, decode: Decode | None) -> str:
    removed, inserted = (_shown(ids, decode) for ids in found.difference[1:3])
    where = f"{identity} #{found.previous} -> #{found.node} at token {found.difference.at}"
    return f"{where}: {removed!r} became {inserted!r}"


def _shown(ids: Sequence[int], decode: Decode | None) -> str:
    """The text of the ids if there is a tokenizer, else their count."""
    text = f"{len(ids)} ids" if decode is None else decode(ids)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
