"""Keeps an episode's tree in step with the conversation that OpenHands sends.

OpenHands builds every prompt anew from its events. As long as it only adds to it, the new messages become nodes below
the head; when it rewrites the past (a condenser, merged messages), the tree gets a branch where the rewriting begins.
An answer of the policy comes back re-serialised; it stays the node that was sampled, and the other form is noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openhands_rl_plugin.tree import EpisodeTree
from openhands_rl_plugin.types import Message, Observation, ToolCall

WireMessage = Mapping[str, Any]
"""A chat message as OpenHands hands it to its LLM client: content is text or a list of parts."""


class HostConversation:
    """The path of ``tree`` that the host's next prompt consists of."""

    def __init__(self, tree: EpisodeTree) -> None:
        self._tree = tree
        # How the host says a node; absent for an answer that was acted on and not replayed yet, and for one that the
        # host will never replay.
        self._forms: dict[int, Message] = {}
        self._acted: set[int] = set()

    def acted(self, node: int) -> None:
        """Commit ``node``: the host executes it, and will replay it in its own form from now on."""
        self._tree.commit(node)
        self._acted.add(node)

    def follow(self, prompt: Sequence[WireMessage]) -> bool:
        """Make the path to the head equal to ``prompt``; true when the host rewrote what was said before."""
        tree = self._tree
        at, known = self._match(prompt)
        new = tuple(to_message(message) for message in prompt[known:])
        rewritten = at != tree.head
        # The last action was executed even if it is no part of the prompt any more, so it gets its step all the same.
        tree.observe(Observation())
        tree.head = at
        for message in new:
            tree.head = tree.append(message)
            self._forms[tree.head] = message
        return rewritten

    def _match(self, prompt: Sequence[WireMessage]) -> tuple[int | None, int]:
        """The last node that the prompt has in common with the tree, and the number of messages up to it."""
        path, forms = self._tree.path(), self._forms
        at: int | None = None
        on_path = True
        for known, message in enumerate(prompt):
            if on_path and known < len(path) and (form := forms.get(path[known])) is not None and says(message, form):
                at = path[known]
            elif (child := self._child(at, message)) is not None:
                at = child
                on_path = known < len(path) and path[known] == child
            else:
                return at, known
        return at, len(prompt)

    def _child(self, parent: int | None, message: WireMessage) -> int | None:
        nodes = self._tree.nodes
        children = (index for index in reversed(range(len(nodes))) if nodes[index].parent == parent)
        return next((index for index in children if self._is(index, message)), None)

    def _is(self, index: int, message: WireMessage) -> bool:
        if (form := self._forms.get(index)) is not None:
            return says(message, form)
        return index in self._acted and self._first_replay(index, message)

    def _first_replay(self, index: int, message: WireMessage) -> bool:
        """Take the host's form of an answer it just executed; it may differ in white space and closing tags."""
        node = self._tree.nodes[index]
        replay = to_message(message)
        if replay.role != "assistant" or (node.message.tool_calls and not _same_calls(replay, node.message)):
            return False
        self._forms[index] = replay
        if not says(message, node.message):
            node.metadata["replayed_as"] = replay.model_dump(mode="json", exclude_defaults=True)
        return True


def to_message(wire: WireMessage) -> Message:
    """The message with its text parts joined by line breaks, as chat templates join them."""
    return Message(
        role=wire["role"],
        content=text_of(wire.get("content")),
        tool_calls=tuple(
            ToolCall(
                id=call.get("id") or "",
                name=call["function"]["name"],
                arguments=call["function"]["arguments"],
            )
            for call in wire.get("tool_calls") or ()
        ),
        tool_call_id=wire.get("tool_call_id"),
        name=wire.get("name"),
    )


def to_wire(message: Message) -> dict[str, Any]:
    """The message as an OpenAI chat message."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        wire["name"] = message.name
    return wire


def text_of(content: object) -> str | None:
    """Content as plain text; a part that is no text (an image) is named in brackets."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        return str(content)
    if len(content) == 1 and content[0].get("type") == "text":
        return content[0]["text"]
    return "\n".join(part["text"] if part.get("type") == "text" else f"[{part.get('type')}]" for part in content)


def says(wire: WireMessage, message: Message) -> bool:
    """Whether both say the same. Hot: called for every message of every prompt, so it builds nothing."""
    if (
        wire["role"] != message.role
        or wire.get("tool_call_id") != message.tool_call_id
        or (text_of(wire.get("content")) or "") != (message.content or "")
    ):
        return False
    calls = wire.get("tool_calls") or ()
    if not calls and not message.tool_calls:
        return True
    return len(calls) == len(message.tool_calls) and all(
        (call.get("id") or "") == own.id
        and call["function"]["name"] == own.name
        and call["function"]["arguments"] == own.arguments
        for call, own in zip(calls, message.tool_calls, strict=True)
    )


def _same_calls(one: Message, other: Message) -> bool:
    return [(call.id, call.name) for call in one.tool_calls] == [(call.id, call.name) for call in other.tool_calls]
