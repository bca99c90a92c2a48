"""Why a conversation ended, as the SDK shows it from outside."""

from __future__ import annotations

from collections.abc import Sequence

from openhands.sdk.conversation.state import ConversationExecutionStatus as Status
from openhands.sdk.event import ActionEvent, Event, MessageEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.llm import TextContent
from openhands.sdk.tool.builtins import FinishTool

from openhands_rl_plugin.core.types import Failure, FailureKind, StopReason

BOUNDARY = "openhands.conversation"
ENDED = frozenset({Status.FINISHED, Status.ERROR, Status.STUCK})
"""From these a conversation goes on only when it is run again."""

_LIMITS = {"MaxIterationsReached": StopReason.MAX_TURNS, "MaxBudgetReached": StopReason.TRUNCATED}


def conversation_end(status: Status, events: Sequence[Event]) -> tuple[StopReason, Failure | None]:
    """Why a conversation ended. Reaching a limit of the SDK is a regular end of an episode."""
    if status == Status.FINISHED:
        # As with OpenHands V0, words that await an answer are no end of the task's own.
        return StopReason.NO_ACTION if awaits_answer(events) else StopReason.TERMINATED, None
    if status == Status.STUCK:
        return StopReason.TRUNCATED, None
    if status != Status.ERROR:
        message = f"it was closed before the agent had finished ({status.value})"
        return StopReason.ERROR, _failure(message)
    error = next((event for event in reversed(events) if isinstance(event, ConversationErrorEvent)), None)
    if error is None:
        return StopReason.ERROR, _failure("the conversation ended with an error")
    if (limit := _LIMITS.get(error.code)) is not None:
        return limit, None
    return StopReason.ERROR, _failure(f"{error.code}: {error.detail}")


def said_finish(events: Sequence[Event]) -> bool:
    """Whether the agent's last words were a call of the ``finish`` tool."""
    last = _last_words(events)
    return isinstance(last, ActionEvent) and last.tool_name == FinishTool.name


def awaits_answer(events: Sequence[Event]) -> bool:
    """Whether the agent's last words were a message without a call."""
    return isinstance(_last_words(events), MessageEvent)


def last_instruction(events: Sequence[Event]) -> str:
    """What the user said last; empty where nobody said anything."""
    for event in reversed(events):
        if isinstance(event, MessageEvent) and event.source == "user":
            said = event.llm_message.content
            return "\n".join(part.text for part in said if isinstance(part, TextContent))
    return ""


def _last_words(events: Sequence[Event]) -> Event | None:
    said = (event for event in reversed(events) if isinstance(event, ActionEvent | MessageEvent))
    return next((event for event in said if event.source == "agent"), None)


def _failure(message: str) -> Failure:
    return Failure(kind=FailureKind.INFRASTRUCTURE, message=message[:500], boundary=BOUNDARY)
