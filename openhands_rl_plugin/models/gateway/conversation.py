"""The conversations of one session, as its clients tell them."""

from __future__ import annotations

from openhands_rl_plugin.core.conversation import HostConversation
from openhands_rl_plugin.core.messages import WireMessage, says, text_of
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Message


class ClientConversation(HostConversation):
    """Like a host's conversation, but of clients that ask for several answers, or in several places at a time.

    So an answer is looked for among all that were given below the same prompt: first the one that the client repeats to
    the letter, then one that it repeats in another form. Anything else is a message of the client's own.
    """

    def __init__(self, tree: EpisodeTree) -> None:
        super().__init__(tree)
        for index, node in enumerate(tree.nodes):
            if node.sampled:
                self._acted.add(index)
            else:
                self._forms[index] = node.message

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
    """Whether ``message`` can be ``answer`` in another form: cut, stripped of reasoning, with other white space."""
    if answer.tool_calls:
        return True  # told apart by the calls' ids
    one, other = (_squeezed(text) for text in (text_of(message.get("content")), answer.content))
    return one in other or other in one if one and other else one == other


def _squeezed(text: str | None) -> str:
    return "".join((text or "").split())
