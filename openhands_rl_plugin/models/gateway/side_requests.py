"""Tells what a client asks for beside its episode (a summary of the history, a title) from the turns of the episode.

A client does not say which is which. A request is aside when it opens a conversation of its own without any tools while
the session has some, or got some later. It is a condensation when a rewritten history quotes its answer, and nothing
went on from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.core.acted import CONDENSATION, KIND, SIDE, TURN, kind_of, path_to
from openhands_rl_plugin.core.messages import WireMessage, says
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.models.gateway.requests import ClientRequest

TOOLS = "tools"
"""The key of a sampled node's metadata with the tools of its request, where they are not those of the session."""
_SHORTEST_QUOTE = 8
"""Characters without white space; a shorter answer is in many texts by chance."""


class SideRequests:
    """The requests of one session that are no turns of its episode."""

    def __init__(self, tree: EpisodeTree) -> None:
        self._tree = tree
        self.found_later = False
        """Whether the kind of nodes, or the session's tools, became known after they were stored."""

    def begins(self, call: ClientRequest) -> bool:
        """Whether the request is aside, before it is part of the tree."""
        nodes = self._tree.nodes
        if not self._tree.tools or call.tools or not call.messages or not any(node.sampled for node in nodes):
            return False
        if any(message["role"] == "assistant" for message in call.messages):
            return False
        roots = [nodes[at] for at in self._tree.children(None) if kind_of(nodes[at]) == TURN]
        return not any(says(call.messages[0], root.message) for root in roots)

    def offer_tools(self, call: ClientRequest, messages: Sequence[WireMessage]) -> None:
        """Take the tools of the first request that has some as those of the session. What was asked before it is aside
        when it is no beginning of this conversation and nothing went on from it."""
        tree = self._tree
        if not tree.tools and call.tools:
            tree.tools = call.tools
            roots = tree.children(None)
            self._had_none(
                len(tree.nodes), {at for at in roots if messages and says(messages[0], tree.nodes[at].message)}
            )

    def remember_tools(self) -> None:
        """The same of a stored episode, in which the first request with tools has them noted."""
        tree = self._tree
        for at, node in enumerate(tree.nodes):
            if not tree.tools and isinstance(tools := node.metadata.get(TOOLS), list) and tools:
                tree.tools = tuple(tool for tool in tools if isinstance(tool, dict))
                self._had_none(at, {path_to(tree.nodes, at)[0]})

    def _had_none(self, stop: int, begun: set[int]) -> None:
        """The nodes before ``stop`` were asked for without tools; the session goes on from the roots ``begun``."""
        tree = self._tree
        for at, node in enumerate(tree.nodes[:stop]):
            self.found_later = True
            if node.sampled:
                node.metadata[TOOLS] = []
            if node.parent is None and at not in begun and kind_of(node) == TURN and self._is_alone(at):
                self._mark(at, SIDE)
        if tree.head is not None and kind_of(tree.nodes[tree.head]) == SIDE:
            tree.head = None

    def notice(self, first: int) -> None:
        """Look for quotes of side requests in the prompt up to the head; its nodes from ``first`` on are new."""
        tree = self._tree
        new = [at for at in tree.path() if at >= first and not tree.nodes[at].sampled]
        if not new or tree.nodes[new[0]].parent is None:
            return
        asked = [tree.nodes[at].message for at in new]
        told = _squeezed(" ".join(message.content or "" for message in asked if message.role != "assistant"))
        root = tree.path()[0]
        for at, node in enumerate(tree.nodes[:first]):
            if not node.sampled or kind_of(node) == CONDENSATION or node.message.tool_calls:
                continue
            path = path_to(tree.nodes, at)
            if path[0] == root or not self._is_alone(path[0]):
                continue
            if len(said := _squeezed(node.message.content)) >= _SHORTEST_QUOTE and said in told:
                self._mark(path[0], CONDENSATION)
                self.found_later = True

    def _is_alone(self, root: int) -> bool:
        """Whether nothing went on from the answers of the conversation that begins at ``root``."""
        return not any(self._tree.children(at) for at in self._below(root) if self._tree.nodes[at].sampled)

    def _mark(self, root: int, kind: str) -> None:
        for at in self._below(root):
            self._tree.nodes[at].metadata[KIND] = kind

    def _below(self, root: int) -> list[int]:
        found = [root]
        for at in found:
            found += self._tree.children(at)
        return found


def _squeezed(text: str | None) -> str:
    return "".join((text or "").split())
