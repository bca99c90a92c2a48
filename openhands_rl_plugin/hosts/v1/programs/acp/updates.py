"""Events of a conversation as the updates that an ACP client shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from acp import (
    start_tool_call,
    text_block,
    tool_content,
    tool_diff_content,
    update_agent_message_text,
    update_agent_thought_text,
    update_tool_call,
    update_user_message_text,
)
from acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    CurrentModeUpdate,
    ToolCallLocation,
    ToolCallProgress,
    ToolCallStart,
    UserMessageChunk,
)
from acp.schema import ToolCallUpdate as PermissionSubject
from openhands.sdk.event import (
    ActionEvent,
    AgentErrorEvent,
    Event,
    MessageEvent,
    ObservationEvent,
    UserRejectObservation,
)

from openhands_rl_plugin.hosts.v1.programs.acp.names import FolderNames
from openhands_rl_plugin.hosts.v1.programs.agents import EDITOR, TERMINAL
from openhands_rl_plugin.hosts.v1.programs.shown import SAYING, answer_of, said_of, text_of, thought_of, title_of

Update = UserMessageChunk | AgentMessageChunk | AgentThoughtChunk | ToolCallStart | ToolCallProgress | CurrentModeUpdate

_READING = "view"


class Updates:
    """The updates of one conversation. A tool call is named by its event: servers use the ids of calls again.

    Files have the editor's names, except in what the terminal runs and answers: that is said as it is.
    """

    def __init__(self, names: FolderNames) -> None:
        self._names = names
        self._events: dict[str, str] = {}

    def of(self, event: Event, *, replayed: bool = False) -> Iterator[Update]:
        """What to send. The user's own messages only when a conversation is ``replayed``."""
        if thought := thought_of(event):
            yield update_agent_thought_text(self._names.shown(thought))
        if said := said_of(event):
            yield update_agent_message_text(self._names.shown(said))
        if isinstance(event, MessageEvent) and event.source == "user" and replayed:
            yield update_user_message_text(self._names.shown(text_of(event.llm_message.content)))
        elif isinstance(event, ActionEvent) and event.tool_name not in SAYING:
            self._events[event.tool_call_id] = event.id
            yield self._started(event)
        elif isinstance(event, ObservationEvent | AgentErrorEvent | UserRejectObservation):
            yield from self._answered(event)

    def _answered(self, event: ObservationEvent | AgentErrorEvent | UserRejectObservation) -> Iterator[Update]:
        if event.tool_name in SAYING or (call := self._events.get(event.tool_call_id)) is None:
            return
        if isinstance(event, UserRejectObservation):
            text, wrong = event.rejection_reason, True
        else:
            text, wrong = answer_of(event)
            text = self._names.shown(text) if event.tool_name == EDITOR else text
        content = [tool_content(text_block(text))] if text else None
        yield update_tool_call(call, status="failed" if wrong else "completed", content=content)

    def asked_about(self, event: ActionEvent) -> PermissionSubject:
        """The call that a permission is asked for."""
        title, fields = self._title(event), self._fields(event)
        return PermissionSubject(tool_call_id=event.id, title=title, status="pending", raw_input=fields)

    def _started(self, event: ActionEvent) -> ToolCallStart:
        fields = self._fields(event)
        path, command = fields.get("path"), fields.get("command")
        kind: Any = "other"
        if event.tool_name == TERMINAL:
            kind = "execute"
        elif event.tool_name == EDITOR:
            kind = "read" if command == _READING else "edit"
        new = fields.get("new_str") or fields.get("file_text")
        content = None
        if kind == "edit" and path and isinstance(new, str):
            old = fields.get("old_str")
            content = [tool_diff_content(str(path), new, old if isinstance(old, str) else None)]
        return start_tool_call(
            event.id,
            self._title(event),
            kind=kind,
            status="pending",
            content=content,
            locations=[ToolCallLocation(path=str(path))] if path else None,
            raw_input=fields,
        )

    def _title(self, event: ActionEvent) -> str:
        title = title_of(event)
        return self._names.shown(title) if event.tool_name == EDITOR else title

    def _fields(self, event: ActionEvent) -> dict[str, Any]:
        fields = _fields(event)
        if event.tool_name == EDITOR and isinstance(path := fields.get("path"), str):
            fields["path"] = self._names.shown(path)
        return fields


def only_reads(event: ActionEvent) -> bool:
    """Whether nobody needs to be asked: it says something, or looks at a file."""
    return event.tool_name in SAYING or (event.tool_name == EDITOR and _fields(event).get("command") == _READING)


def _fields(event: ActionEvent) -> dict[str, Any]:
    return event.action.model_dump(mode="json", exclude={"kind"}) if event.action is not None else {}
