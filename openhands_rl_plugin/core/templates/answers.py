"""From the tags of an answer to a ParsedAnswer: the part that all dialects with tags share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from openhands_rl_plugin.core.templates.parsed import ParsedAnswer, Problem, ProblemKind, Span
from openhands_rl_plugin.core.types import ToolCall


class Tag(NamedTuple):
    """A tag in the text. ``kind`` is in lower case, with a slash if it closes."""

    kind: str
    name: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the answer that is a call, several calls, or a broken one."""

    span: Span
    calls: tuple[ToolCall, ...] = ()
    problem: Problem | None = None
    notes: tuple[Problem, ...] = ()


@dataclass(slots=True)
class Blocks:
    """The findings so far, in and out of the thought."""

    spoken: list[Block] = field(default_factory=list)
    thought_of: list[Block] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    thinking: Tag | None = None
    thought_until: int = 0

    def add(self, block: Block) -> None:
        (self.spoken if self.thinking is None else self.thought_of).append(block)

    def begin_thought(self, tag: Tag) -> None:
        self.thinking = self.thinking or tag

    def end_thought(self, text: str, tag: Tag) -> None:
        """A first ``</think>`` without ``<think>`` ends a thought that the prompt opened."""
        if self.thinking is not None:
            self.thoughts.append(text[self.thinking.end : tag.start])
        elif not self.thoughts:
            self.thoughts.append(text[: tag.start])
            self.thought_of += self.spoken
            self.spoken.clear()
        self.thinking = None
        self.thought_until = tag.end


def scan(
    text: str, tags: Sequence[Tag], read: Callable[[int, Blocks], int], read_end: Callable[[Blocks], None]
) -> ParsedAnswer:
    """Go through ``tags`` once. ``read`` adds the block at an index and returns the index behind it; ``read_end`` adds
    what the end of the text cut.
    """
    blocks = Blocks()
    at = 0
    while at < len(tags):
        tag = tags[at]
        if tag.kind == "think":
            blocks.begin_thought(tag)
            at += 1
        elif tag.kind == "/think":
            blocks.end_thought(text, tag)
            at += 1
        else:
            at = read(at, blocks)
    read_end(blocks)
    if blocks.thinking is not None:
        blocks.thoughts.append(text[blocks.thinking.end :])
        blocks.thought_until = len(text)
    return _assembled(text, blocks)


def _assembled(text: str, blocks: Blocks) -> ParsedAnswer:
    spoken = blocks.spoken
    calls = [(call, block.span) for block in spoken for call in block.calls]
    problems = [block.problem for block in spoken if block.problem is not None]
    notes = [note for block in spoken for note in block.notes]
    unspoken = [_in_thought(block) for block in blocks.thought_of if block.calls]
    # A model that only thought of a call did not mean its thought to be the answer.
    silent = not spoken and not text[blocks.thought_until :].strip()
    (problems if silent else notes).extend(unspoken)
    first, last = (spoken[0].span.start, spoken[-1].span.end) if spoken else (len(text), len(text))
    gaps = [text[one.span.end : other.span.start] for one, other in pairwise(spoken)]
    return ParsedAnswer(
        before=text[:first],
        calls=tuple(call for call, _ in calls),
        after="".join([*gaps, text[last:]]),
        problems=tuple(problems),
        notes=tuple(notes),
        spans=tuple(span for _, span in calls),
        thought="\n".join(thought.strip() for thought in blocks.thoughts),
    )


def _in_thought(block: Block) -> Problem:
    names = ", ".join(repr(call.name) for call in block.calls)
    message = f"The call of {names} was not executed: it stands inside <think>. Write calls after </think>."
    return Problem(ProblemKind.IN_THOUGHT, message, block.span)
