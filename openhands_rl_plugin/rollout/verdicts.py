"""What a person says of episodes: verdicts, preferences and comments, and how the last of them is taken back.

A verdict is a score, by which an episode is trained, listed and found, and a label that says who. The rest are labels.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.judgements import ALIKE, VERDICT, labels_of, standing
from openhands_rl_plugin.core.protocols import TakesLabels, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryFilter
from openhands_rl_plugin.core.types import JsonObject, Score

SKIPPED = "skipped"
"""The tag of an episode, or of two, that somebody looked at without a verdict."""


async def give_verdict(
    storage: TrajectoryStorage, trajectory_id: str, value: float | None, *, note: str = "", author: str = ""
) -> None:
    """Append a verdict; ``None`` withdraws the one before. Raises ``StorageError``."""
    # First, because it is what counts if the process ends in between.
    await _score(storage, trajectory_id, value, note, author)
    if isinstance(storage, TakesLabels):
        await _add(storage, trajectory_id, LabelKind.VERDICT, value=value, text=note, author=author)


async def prefer(
    storage: TrajectoryStorage, better: str, other: str, *, alike: bool = False, note: str = "", author: str = ""
) -> None:
    """Say that one episode is better than another, or, with ``alike``, that neither is. Raises ``RLError``."""
    value = ALIKE if alike else 1.0
    labels = labelled(storage)
    await _add(labels, better, LabelKind.PREFERENCE, value=value, other=other, text=note, author=author)


async def comment(storage: TrajectoryStorage, trajectory_id: str, text: str, *, author: str = "") -> None:
    """Add a remark. Raises ``RLError``."""
    await _add(labelled(storage), trajectory_id, LabelKind.COMMENT, text=text, author=author)


async def skip(storage: TrajectoryStorage, trajectory_id: str, *, other: str | None = None, author: str = "") -> None:
    """Note that somebody said nothing of an episode, or of two, so that it is not asked for again."""
    if isinstance(storage, TakesLabels):
        await _add(storage, trajectory_id, LabelKind.TAG, other=other, text=SKIPPED, author=author)


async def skipped(storage: TrajectoryStorage, trajectory_id: str) -> bool:
    """Whether somebody gave no verdict on the episode."""
    labels = standing(await labels_of(storage, [trajectory_id]))
    return any(label.kind is LabelKind.TAG and label.text == SKIPPED and label.other is None for label in labels)


async def undo(storage: TrajectoryStorage, *, author: str = "") -> Label | None:
    """Withdraw the newest label of ``author``; an earlier verdict of theirs holds again.

    Returns:
        The withdrawn label, ``None`` when there is none.

    Raises:
        RLError: the storage cannot be written, or keeps no labels.
    """
    labelled(storage)
    ids = [summary.id async for summary in storage.summaries(TrajectoryFilter(finished=None))]
    own = [label for label in standing(await labels_of(storage, ids)) if label.author == author]
    if not own:
        return None
    last = max(own, key=lambda label: label.at)
    await withdraw(storage, last, own, author=author)
    return last


async def withdraw(storage: TrajectoryStorage, label: Label, own: Iterable[Label], *, author: str = "") -> Label:
    """Append what says that ``label`` holds no more; among ``own``, its author's labels that hold, the verdict before
    holds again. Returns what was appended. Raises ``RLError``."""
    labels = labelled(storage)
    if label.kind is LabelKind.VERDICT and label.node is None:
        earlier = [each for each in own if _is_verdict_before(each, label)]
        value, note = (earlier[-1].value, earlier[-1].text) if earlier else (None, "")
        await _score(storage, label.trajectory_id, value, note, author)
    return await _add(labels, label.trajectory_id, label.kind, other=label.other, withdraws=label.id, author=author)


async def add_label(storage: TrajectoryStorage, trajectory_id: str, kind: LabelKind, **said: Any) -> Label:
    """Append a label with these fields, and the score of a verdict on the whole episode. Raises ``RLError``."""
    labels = labelled(storage)
    if kind is LabelKind.VERDICT and said.get("node") is None:
        await _score(storage, trajectory_id, said["value"], said.get("text", ""), said.get("author", ""))
    return await _add(labels, trajectory_id, kind, **said)


def labelled(storage: TrajectoryStorage) -> TakesLabels:
    """The storage as one that keeps labels. Raises ``ConfigError`` for another."""
    if isinstance(storage, TakesLabels):
        return storage
    raise ConfigError(
        f"{type(storage).__name__} keeps no labels, only verdicts (openhands-rl score STORE --id ID --value 1, or none)"
    )


def _is_verdict_before(label: Label, last: Label) -> bool:
    same = label.kind is LabelKind.VERDICT and label.trajectory_id == last.trajectory_id and label.node is None
    return same and label.id != last.id


async def _score(storage: TrajectoryStorage, trajectory_id: str, value: float | None, note: str, author: str) -> None:
    said: JsonObject = {name: text for name, text in (("note", note), ("author", author)) if text}
    score = Score(trajectory_id=trajectory_id, reward=value, detail=said, reward_version=VERDICT)
    await storage.add_scores([score])


async def _add(storage: TakesLabels, trajectory_id: str, kind: LabelKind, **said: Any) -> Label:
    made = Label(id=uuid.uuid4().hex, trajectory_id=trajectory_id, kind=kind, at=time.time(), **said)
    await storage.add_labels([made])
    return made
