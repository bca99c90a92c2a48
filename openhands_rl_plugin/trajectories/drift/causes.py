"""Why a prompt does not extend the turn before, by what was recorded of both, and the setting that avoids it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from openhands_rl_plugin.core.messages import has_reasoning
from openhands_rl_plugin.core.types import Message, Node, Trajectory
from openhands_rl_plugin.trajectories.drift.breaks import Break

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
        return _of_rewriting(trajectory, found)
    difference = found.difference
    if decode is not None and difference.meets and decode(difference.removed) == decode(difference.inserted):
        return Cause.RETOKENISED
    if found.answer is None:
        return _of_prompt(trajectory, found)
    return _of_answer(trajectory.nodes[found.answer.node], found)


def _of_rewriting(trajectory: Trajectory, found: Break) -> Cause:
    before, after = len(trajectory.path(found.previous)), len(trajectory.path(found.node))
    return Cause.CONDENSED if after <= before else Cause.REWRITTEN


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
