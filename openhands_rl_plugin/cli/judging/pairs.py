"""``openhands-rl label STORE --pairs``: which of two attempts at one task is better."""

from __future__ import annotations

import argparse
import random
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.judging.shown import RESUME, asked, show, show_task, undone
from openhands_rl_plugin.cli.options.stored import filter_of
from openhands_rl_plugin.core.judgements import asked_in_common, labels_of, preferences, standing
from openhands_rl_plugin.core.records import LabelKind, TrajectoryFilter

if TYPE_CHECKING:
    from openhands_rl_plugin.core.protocols import TrajectoryStorage
    from openhands_rl_plugin.core.types import Trajectory

_ASK = "which is better? [1], [2], [=] alike, [s]kip, [u]ndo, [q]uit: "


async def compare(args: argparse.Namespace, storage: TrajectoryStorage) -> int:
    """Ask about neighbouring attempts at each task until all were compared or the user quits. Raises ``RLError``.

    The policy is hidden and the sides are shuffled, so that neither has a say in the answer.
    """
    from openhands_rl_plugin.rollout.scoring import labelled, prefer, skip, undo
    from openhands_rl_plugin.trajectories.view.terminal import console

    labelled(storage)
    where = filter_of(args).model_copy(update={"finished": True, "failed": False})
    pairs = [pair async for pair in _pairs(storage, where)]
    out, compared, at, again = console(), 0, 0, args.again
    while at < len(pairs):
        both = await _open_both(storage, pairs[at], again=again)
        if both is None:
            at, again = at + 1, args.again
            continue
        show_task(out, both[0])
        for side, trajectory in enumerate(both, 1):
            show(out, trajectory, args.actions, f"pair {at + 1} of {len(pairs)}: {side}")
        if (said := asked(_ASK, ("1", "2", "=", "s", "u"))) is None:
            break
        word, note = said
        first, second = (trajectory.id for trajectory in both)
        if word == "u":
            label = await undo(storage, author=args.author)
            print(undone(label) if label else "there is nothing to take back")
            compared -= label is not None and label.kind is LabelKind.PREFERENCE and compared > 0
            about = {label.trajectory_id, label.other} if label is not None else set()
            if (back := next((n for n, pair in enumerate(pairs) if {*pair} == about), None)) is not None:
                at, again = back, True
            continue
        if word == "s":
            await skip(storage, first, other=second, author=args.author)
        else:
            better, other = (second, first) if word == "2" else (first, second)
            await prefer(storage, better, other, alike=word == "=", note=note, author=args.author)
            compared += 1
        at, again = at + 1, args.again
    print(f"{compared} compared; {RESUME}" if pairs else "no two attempts at one task match")
    return 0


async def _pairs(storage: TrajectoryStorage, where: TrajectoryFilter) -> AsyncIterator[tuple[str, str]]:
    """Each attempt with the next one at the same task: so every attempt is seen, and n of them are n - 1 questions."""
    tasks: dict[tuple[str, str, str], list[str]] = {}
    async for trajectory, _ in storage.find(where):
        tasks.setdefault(asked_in_common(trajectory.task), []).append(trajectory.id)
    for attempts in tasks.values():
        for pair in pairwise(attempts):
            yield pair


async def _open_both(
    storage: TrajectoryStorage, pair: tuple[str, str], *, again: bool
) -> tuple[Trajectory, Trajectory] | None:
    """Both in random order, unless they were compared or skipped before, or are the same in all that is shown."""
    labels = await labels_of(storage, pair)
    tags = [label for label in standing(labels) if label.kind is LabelKind.TAG]
    known = frozenset(pair) in preferences(labels) or any({each.trajectory_id, each.other} == {*pair} for each in tags)
    if known and not again:
        return None
    found = [trajectory async for trajectory, _ in storage.find(TrajectoryFilter(ids=pair))]
    if len(found) < len(pair) or _is_same(*found):
        return None
    # The same order each time: who comes back to a pair finds it as it was.
    random.Random("\0".join(sorted(pair))).shuffle(found)
    return found[0], found[1]


def _is_same(one: Trajectory, other: Trajectory) -> bool:
    return one.messages() == other.messages() and one.evidence == other.evidence
