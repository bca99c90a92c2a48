"""Keeps an episode's tree in step with the conversation that a host (OpenHands, or any client of a gateway) sends.

A host builds every prompt from scratch. As long as it only adds to it, the new messages become nodes below
the head; when it rewrites the past (a condenser, merged messages), the tree gets a branch where the rewriting begins.
An answer of the policy comes back re-serialised; it stays the node that was sampled, and the other form is noted.
"""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.core.messages import WireMessage, says, to_message
from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import Message, Observation

REPLAYED_AS = "replayed_as"
"""Key of an answer's metadata: the form in which the host repeats it, where that is another one."""


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
        self._settle(at, new)
        # The last action was executed even if it is no part of the prompt any more, so it gets its step all the same.
        tree.observe(Observation())
        tree.head = at
        for message in new:
            tree.head = tree.append(message)
            self._forms[tree.head] = message
        return rewritten

    def _settle(self, at: int | None, new: Sequence[Message]) -> None:
        """Called before the last action counts as executed: the prompt has the path to ``at``, and ``new`` after it."""

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
        children = reversed(self._tree.children(parent))
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
            node.metadata[REPLAYED_AS] = replay.model_dump(mode="json", exclude_defaults=True)
        return True


def _same_calls(one: Message, other: Message) -> bool:
    return [(call.id, call.name) for call in one.tool_calls] == [(call.id, call.name) for call in other.tool_calls]
