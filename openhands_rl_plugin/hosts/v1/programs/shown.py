"""What an event says to a person, as text."""

from __future__ import annotations

from collections.abc import Sequence

from openhands.sdk.event import ActionEvent, AgentErrorEvent, Event, MessageEvent, ObservationEvent
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.sdk.llm import ImageContent, TextContent
from openhands.sdk.tool.builtins import FinishAction, FinishTool, ThinkAction, ThinkTool

SAYING = frozenset({FinishTool.name, ThinkTool.name})
"""Tools that only say something."""

_LONGEST = 120


def text_of(parts: Sequence[TextContent | ImageContent]) -> str:
    """The text among the parts of a message."""
    return "\n".join(part.text for part in parts if isinstance(part, TextContent))


def title_of(event: ActionEvent) -> str:
    """A tool call in one line: the command or the file, else its arguments."""
    action = event.action
    fields = action.model_dump() if action is not None else {}
    command, path = str(fields.get("command") or ""), fields.get("path")
    what = f"{command} {path}" if path else command
    first = (what or event.tool_call.arguments).strip().partition("\n")
    text = f"{first[0]} ..." if first[2] else first[0]
    return f"{event.tool_name}: {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}"


def said_of(event: Event) -> str:
    """What the agent says to the user in this event; empty for other events."""
    if isinstance(event, MessageEvent) and event.source == "agent":
        return text_of(event.llm_message.content)
    if isinstance(event, ActionEvent):
        if isinstance(event.action, FinishAction):
            return event.action.message
        return text_of(event.thought)
    if isinstance(event, ConversationErrorEvent):
        return f"{event.code}: {event.detail}"
    return ""


def thought_of(event: Event) -> str:
    """What the agent says to itself."""
    if not isinstance(event, ActionEvent):
        return ""
    own = event.action.thought if isinstance(event.action, ThinkAction) else ""
    return own or event.reasoning_content or ""


def answer_of(event: ObservationEvent | AgentErrorEvent) -> tuple[str, bool]:
    """What a tool answered, and whether that was an error."""
    if isinstance(event, AgentErrorEvent):
        return event.error, True
    observation = event.observation
    return text_of(observation.to_llm_content), bool(observation.is_error)
