"""A person's verdict on an episode: a score, by which it is trained, listed and found, and a label that says who."""

from __future__ import annotations

import time
import uuid

from openhands_rl_plugin.core.judgements import VERDICT
from openhands_rl_plugin.core.protocols import TakesLabels, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.core.types import JsonObject, Score

SKIPPED = "skipped"
"""The tag of an episode that somebody looked at without a verdict."""


async def give_verdict(
    storage: TrajectoryStorage, trajectory_id: str, value: float | None, *, note: str = "", author: str = ""
) -> None:
    """Append a verdict; ``None`` withdraws the one before. Raises ``StorageError``."""
    said: JsonObject = {name: text for name, text in (("note", note), ("author", author)) if text}
    score = Score(trajectory_id=trajectory_id, reward=value, detail=said, reward_version=VERDICT)
    # First, because it is what counts if the process ends in between.
    await storage.add_scores([score])
    await _add_label(storage, trajectory_id, LabelKind.VERDICT, value, note, author)


async def skip(storage: TrajectoryStorage, trajectory_id: str, *, author: str = "") -> None:
    """Note that somebody gave no verdict, so that it is not asked for again. Raises ``StorageError``."""
    await _add_label(storage, trajectory_id, LabelKind.TAG, None, SKIPPED, author)


async def skipped(storage: TrajectoryStorage, trajectory_id: str) -> bool:
    """Whether somebody gave no verdict on the episode."""
    labels = await storage.labels([trajectory_id]) if isinstance(storage, TakesLabels) else ()
    return any(label.kind is LabelKind.TAG and label.text == SKIPPED for label in labels)


async def _add_label(
    storage: TrajectoryStorage, trajectory_id: str, kind: LabelKind, value: float | None, text: str, author: str
) -> None:
    if isinstance(storage, TakesLabels):
        made = Label(
            id=uuid.uuid4().hex,
            trajectory_id=trajectory_id,
            kind=kind,
            value=value,
            text=text,
            author=author,
            at=time.time(),
        )
        await storage.add_labels([made])
