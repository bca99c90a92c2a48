"""The messages of an episode in the order in which they were said, however often its history was rewritten."""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.core.types import Message, Node, Trajectory


def transcript(trajectory: Trajectory) -> tuple[Message, ...]:
    """Every message once, in order. Without a rewritten history it is ``trajectory.messages()``."""
    return tuple(trajectory.nodes[at].message for at in transcript_nodes(trajectory))


def transcript_nodes(trajectory: Trajectory) -> Sequence[int]:
    """The nodes of ``transcript``. What a rewritten history repeats of the messages before is left out."""
    ends = trajectory.ends()
    if len(ends) < 2:
        return trajectory.path()
    told: list[int] = []
    known: set[Message] = set()
    for at in sorted({up for end in ends for up in trajectory.path(end)}):
        node = trajectory.nodes[at]
        if node.sampled or node.message not in known:
            told.append(at)
        known.update((node.message, _replayed(node)))
    return told


def _replayed(node: Node) -> Message:
    """The message in the form in which its host repeats it."""
    form = node.metadata.get("replayed_as")
    return Message.model_validate(form) if isinstance(form, dict) else node.message
