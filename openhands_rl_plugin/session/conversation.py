"""How a host's prompts follow the tree of its session."""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.core.messages import WireMessage, says, text_of
from openhands_rl_plugin.core.tree import EpisodeTree, HostConversation
from openhands_rl_plugin.core.types import Message, Usage
from openhands_rl_plugin.session.sampled_texts import SampledTexts


class WorkspaceConversation(HostConversation):
    """Where the session's messages equal those of a simulation, the simulated nodes become the real ones.

    Of answers that ``said`` puts back the host's form is not noted: the model never sees it.
    """

    def __init__(self, tree: EpisodeTree, said: SampledTexts) -> None:
        super().__init__(tree)
        self._said = said

    def _is(self, index: int, message: WireMessage) -> bool:
        node = self._tree.nodes[index]
        simulated = not node.sampled and index not in self._forms
        return says(message, node.message) if simulated else super()._is(index, message)

    def _first_replay(self, index: int, message: WireMessage) -> bool:
        found = super()._first_replay(index, message)
        node = self._tree.nodes[index]
        if found and self._said.text(message, node.message) is not None:
            node.metadata.pop("replayed_as", None)
        return found

    def _settle(self, at: int | None, new: Sequence[Message]) -> None:
        """An answer was not executed when another one to its prompt was sent back, nor when the host goes on from that
        prompt without it: what it says instead is why."""
        tree, last = self._tree, self._tree.head
        path = tree.path(at) if at is not None else []
        if last is None or last in path or not tree.nodes[last].sampled:
            return
        asked = tree.nodes[last].parent
        left_out = at == asked and not (new and new[0].role == "assistant")
        if left_out and new:
            tree.nodes[last].metadata.setdefault("malformed", new[0].content)
        if left_out or any(tree.nodes[index].sampled and tree.nodes[index].parent == asked for index in path):
            tree.head = asked

    def unread(self, node: int) -> None:
        """The host could not read the answer ``node``: its next prompt goes on without it."""
        self._acted.discard(node)
        self._tree.head = self._tree.nodes[node].parent


class ClientConversation(WorkspaceConversation):
    """A conversation of clients that sample several choices, or continue several branches concurrently.

    An assistant message is matched with all answers to the same prompt: first with an equal one, then with one that the
    client sent back in another form. A message without a match is the client's own.
    """

    def __init__(self, tree: EpisodeTree, said: SampledTexts) -> None:
        super().__init__(tree, said)
        for index, node in enumerate(tree.nodes):
            if node.sampled:
                self._acted.add(index)
            else:
                self._forms[index] = node.message

    def _settle(self, at: int | None, new: Sequence[Message]) -> None:
        """What the client sent back was acted on."""
        super()._settle(at, new)
        tree = self._tree
        for index in tree.path(at) if at is not None else ():
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
    one, other = (squeezed(text) for text in (text_of(message.get("content")), answer.content))
    return one in other or other in one if one and other else one == other


def squeezed(text: str | None) -> str:
    """The text without white space."""
    return "".join((text or "").split())
