"""The conversation of a session in a workspace, some of whose messages search may have simulated."""

from __future__ import annotations

from openhands_rl_plugin.core.conversation import HostConversation
from openhands_rl_plugin.core.messages import WireMessage, says


class WorkspaceConversation(HostConversation):
    """Where the session's messages equal those of a simulation, the simulated nodes become the real ones."""

    def _is(self, index: int, message: WireMessage) -> bool:
        node = self._tree.nodes[index]
        simulated = not node.sampled and index not in self._forms
        return says(message, node.message) if simulated else super()._is(index, message)
