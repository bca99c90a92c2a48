"""The conversation of a session in a workspace, whose next messages search may have seen coming."""

from __future__ import annotations

from openhands_rl_plugin.core.conversation import HostConversation
from openhands_rl_plugin.core.messages import WireMessage, says


class WorkspaceConversation(HostConversation):
    """Where a simulation was told the same as the session is now, its nodes become the real ones."""

    def _is(self, index: int, message: WireMessage) -> bool:
        node = self._tree.nodes[index]
        simulated = not node.sampled and index not in self._forms
        return says(message, node.message) if simulated else super()._is(index, message)
