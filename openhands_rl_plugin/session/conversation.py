"""How a host's prompts follow the tree of its session."""

from __future__ import annotations

from openhands_rl_plugin.core.messages import WireMessage, says
from openhands_rl_plugin.core.tree import EpisodeTree, HostConversation
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
        noted = self._tree.nodes[index].metadata
        if found and "replayed_as" in noted and self._said.has(self._tree.messages(index), message):
            del noted["replayed_as"]
        return found

    def unread(self, node: int) -> None:
        """The host could not read the answer ``node``: its next prompt goes on without it."""
        self._acted.discard(node)
        self._tree.head = self._tree.nodes[node].parent
