"""Matches the messages of each request to the nodes of a session's episode."""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.core.conversation import HostConversation
from openhands_rl_plugin.core.messages import WireMessage, says, text_of
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Message, Usage


class ClientConversation(HostConversation):
    """A ``HostConversation`` for clients that sample several choices, or continue several branches concurrently.

    An assistant message is matched with all answers to the same prompt: first with an equal one, then with one that the
    client sent back in another form. A message without a match is the client's own.
    """

    def __init__(self, tree: EpisodeTree) -> None:
        super().__init__(tree)
        for index, node in enumerate(tree.nodes):
            if node.sampled:
                self._acted.add(index)
            else:
                self._forms[index] = node.message

    def _settle(self, at: int | None, new: Sequence[Message]) -> None:
        """What the client sent back was acted on. An answer was not when another one to its prompt was sent back, nor
        when the client goes on from that prompt without it."""
        tree = self._tree
        last = tree.head
        path = tree.path(at) if at is not None else []
        if last is not None and tree.nodes[last].sampled and last not in path:
            asked = tree.nodes[last].parent
            other = any(tree.nodes[index].sampled and tree.nodes[index].parent == asked for index in path)
            if other or (at == asked and not (new and new[0].role == "assistant")):
                tree.head = asked
        for index in path:
            node = tree.nodes[index]
            if node.sampled and node.reward is None and index != tree.head:
                node.reward = 0.0
                tree.usage += Usage(steps=1)

    def _child(self, parent: int | None, message: WireMessage) -> int | None:
        nodes = self._tree.nodes
        for index in self._tree.children(parent):
            if index in self._acted and says(message, nodes[index].message):
                self._forms.setdefault(index, nodes[index].message)
                return index
        return super()._child(parent, message)

    def _first_replay(self, index: int, message: WireMessage) -> bool:
        return _same_answer(message, self._tree.nodes[index].message) and super()._first_replay(index, message)


def _same_answer(message: WireMessage, answer: Message) -> bool:
    """Whether ``message`` can be ``answer`` truncated, without its reasoning, or with other white space."""
    if answer.tool_calls:
        return True  # distinguished by the ids of the calls
    one, other = (_squeezed(text) for text in (text_of(message.get("content")), answer.content))
    return one in other or other in one if one and other else one == other


def _squeezed(text: str | None) -> str:
    return "".join((text or "").split())
