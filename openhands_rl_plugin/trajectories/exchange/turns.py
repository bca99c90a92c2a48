"""Reshaping a conversation for formats that know one call a turn, and that end with the assistant's last word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from openhands_rl_plugin.core.reasoning import SpokenMessage
from openhands_rl_plugin.core.types import Message, ToolCall


class Turns(NamedTuple):
    """The reshaped conversation, and how many calls without a result had to be left out of it."""

    messages: list[Message]
    unanswered: int


def single_call_turns(messages: Sequence[Message]) -> Turns:
    """Split every message with several calls into one message a call, each followed by its own result.

    Results are matched by call id. In a split message a call that got no result cannot stand between two others, so it
    is left out and counted; the first stays when none got one. Results learn the name of their call.
    """
    out: list[Message] = []
    unanswered = at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        results = []
        while message.tool_calls and at < len(messages) and messages[at].role == "tool":
            results.append(messages[at])
            at += 1
        if len(message.tool_calls) < 2:
            out += [message, *(_named(result, message.tool_calls) for result in results)]
            continue
        pairs, strays = _paired(message.tool_calls, results)
        kept = [pair for pair in pairs if pair[1] is not None] or pairs[:1]
        unanswered += len(pairs) - len(kept)
        for number, (call, result) in enumerate(kept):
            part = message.model_copy(update={"tool_calls": (call,)})
            out.append(part if number == 0 else _without_text(part))
            out += [_named(result, (call,))] if result is not None else []
        out += strays
    return Turns(out, unanswered)


def until_last_answer(messages: Sequence[Message]) -> list[Message]:
    """Without what came after the assistant's last message: nothing is learned from it."""
    last = max((at for at, message in enumerate(messages) if message.role == "assistant"), default=-1)
    return list(messages[: last + 1])


_Pair = tuple[ToolCall, Message | None]


def _paired(calls: Sequence[ToolCall], results: Sequence[Message]) -> tuple[list[_Pair], list[Message]]:
    """Each call with its result, and the results that belong to none of the calls."""
    left = list(results)
    pairs: list[_Pair] = []
    for call in calls:
        result = next((each for each in left if each.tool_call_id == call.id), None)
        # Records without ids keep results in the order of their calls.
        if result is None and left and left[0].tool_call_id is None:
            result = left[0]
        if result is not None:
            left.remove(result)
        pairs.append((call, result))
    return pairs, left


def _without_text(message: Message) -> Message:
    """The text and the reasoning stand with the first of the calls."""
    reasoning = {"reasoning": None} if isinstance(message, SpokenMessage) else {}
    return message.model_copy(update={"content": None, **reasoning})


def _named(result: Message, calls: Sequence[ToolCall]) -> Message:
    if result.name is not None or not calls:
        return result
    call = next((call for call in calls if call.id == result.tool_call_id), calls[0])
    return result.model_copy(update={"name": call.name})
