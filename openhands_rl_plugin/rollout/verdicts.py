"""What a person says of episodes: verdicts, preferences and comments, and how the last of them is taken back.

They are labels, which are never rewards: ``score --reward human`` makes scores of them when somebody asks for it. A
score by hand (``score --value``) is asked for: it counts at once, and stands beside the verdict that it makes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.judgements import ALIKE, VERDICT, labels_of, scores_of, standing
from openhands_rl_plugin.core.protocols import TakesLabels, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryFilter
from openhands_rl_plugin.core.types import JsonObject, Score

SKIPPED = "skipped"
"""The tag of an episode, or of two, that somebody looked at without a verdict."""

_BEHIND = "label"
"""In the detail of a score by hand: the id of the verdict behind it."""
_Said = tuple[float | None, str, str]
"""Value, note and author: what a verdict and a score that an earlier version stored with it have in common."""


async def give_score(
    storage: TrajectoryStorage, trajectory_id: str, value: float | None, *, note: str = "", author: str = ""
) -> None:
    """Append a score by hand and the verdict behind it; ``None`` withdraws the one before. Raises ``StorageError``."""
    identity = uuid.uuid4().hex if isinstance(storage, TakesLabels) else ""
    # First, because it is what counts if the process ends in between.
    await _score(storage, trajectory_id, value, (note, author), identity)
    if isinstance(storage, TakesLabels):
        said = {"value": value, "text": note, "author": author}
        await _add(storage, trajectory_id, LabelKind.VERDICT, identity=identity, **said)


async def give_verdict(
    storage: TrajectoryStorage, trajectory_id: str, value: float, *, note: str = "", author: str = ""
) -> None:
    """Add a verdict; of several by one author the last one counts. Raises ``RLError``."""
    await _add(labelled(storage), trajectory_id, LabelKind.VERDICT, value=value, text=note, author=author)


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


async def is_done(storage: TrajectoryStorage, trajectory_id: str) -> bool:
    """Whether somebody gave a verdict on the episode, or none on purpose."""
    labels = standing(await labels_of(storage, [trajectory_id]))
    return any(map(_is_answer, labels))


def _is_answer(label: Label) -> bool:
    if label.kind is LabelKind.VERDICT:
        return label.node is None and label.value is not None
    return label.kind is LabelKind.TAG and label.text == SKIPPED and label.other is None


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
    await withdraw(storage, last, author=author)
    return last


async def withdraw(storage: TrajectoryStorage, label: Label, *, author: str = "") -> Label:
    """Append what says that ``label`` holds no more. If the newest score by hand was stored with it, the score before
    holds again. Returns what was appended. Raises ``RLError``."""
    labels = labelled(storage)
    if label.kind is LabelKind.VERDICT and label.node is None:
        known = await labels_of(storage, [label.trajectory_id])
        scores = (await scores_of(storage, [label.trajectory_id])).get(label.trajectory_id, ())
        scored = _scored(known, [score for score in scores if score.reward_version == VERDICT])
        if scored and scored[-1].id == label.id:
            before = [each for each in standing(known) if each in scored and each.id != label.id]
            value, said, identity = None, ("", author), ""
            if before:
                value, said, identity = before[-1].value, (before[-1].text, before[-1].author), before[-1].id
            await _score(storage, label.trajectory_id, value, said, identity)
    return await _add(labels, label.trajectory_id, label.kind, other=label.other, withdraws=label.id, author=author)


async def add_label(storage: TrajectoryStorage, trajectory_id: str, kind: LabelKind, **said: Any) -> Label:
    """Append a label with these fields. Raises ``RLError``."""
    return await _add(labelled(storage), trajectory_id, kind, **said)


def labelled(storage: TrajectoryStorage) -> TakesLabels:
    """The storage as one that keeps labels. Raises ``ConfigError`` for another."""
    if isinstance(storage, TakesLabels):
        return storage
    raise ConfigError(
        f"{type(storage).__name__} keeps no labels, only scores (openhands-rl score STORE --id ID --value 1, or none)"
    )


def _scored(labels: Iterable[Label], scores: Sequence[Score]) -> list[Label]:
    """The verdicts with which a score was stored, in the order of these scores. Those of earlier versions name no
    label: there a verdict and its score say the same."""
    verdicts = [label for label in labels if label.kind is LabelKind.VERDICT and label.withdraws is None]
    by_id = {label.id: label for label in verdicts}
    named = {str(score.detail.get(_BEHIND)) for score in scores}
    found: list[Label] = []
    for score in scores:
        label = by_id.get(str(score.detail.get(_BEHIND)))
        if _BEHIND not in score.detail:
            alike = [each for each in verdicts if each.id not in named and _said(each) == _said_by(score)]
            # One that is there already was said again, because what came after it was taken back.
            label = next((each for each in alike if each not in found), alike[0] if alike else None)
        if score.reward is None:
            found.clear()
        elif label is not None:
            found = [*(each for each in found if each.id != label.id), label]
    return found


def _said(label: Label) -> _Said:
    return label.value, label.text, label.author


def _said_by(score: Score) -> _Said:
    return score.reward, str(score.detail.get("note", "")), str(score.detail.get("author", ""))


async def _score(
    storage: TrajectoryStorage, trajectory_id: str, value: float | None, said: tuple[str, str], label: str
) -> None:
    known = {"note": said[0], "author": said[1], _BEHIND: label}
    detail: JsonObject = {name: text for name, text in known.items() if text}
    score = Score(trajectory_id=trajectory_id, reward=value, detail=detail, reward_version=VERDICT)
    await storage.add_scores([score])


async def _add(storage: TakesLabels, trajectory_id: str, kind: LabelKind, *, identity: str = "", **said: Any) -> Label:
    label = identity or uuid.uuid4().hex
    made = Label(id=label, trajectory_id=trajectory_id, kind=kind, at=time.time(), **said)
    await storage.add_labels([made])
    return made
