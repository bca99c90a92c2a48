"""``openhands-rl label``: judge stored episodes one after another in the terminal.

examples:
  openhands-rl label ~/.openhands/rl_trajectories
  openhands-rl label ~/.openhands/rl_trajectories --run night-3 --actions 10
  openhands-rl label ~/.openhands/rl_trajectories --again --max-reward 0.5
  openhands-rl label ~/.openhands/rl_trajectories --pairs
  openhands-rl label ~/.openhands/rl_trajectories --id 3f2a --better-than 77b0 --note "a smaller change"
  openhands-rl label ~/.openhands/rl_trajectories --id 3f2a --comment "look at turn 7"
  openhands-rl label ~/.openhands/rl_trajectories --undo

Shows what was asked, the last actions, and the change (or the last answer). Answer y (1), n (0), a number, s (skip),
u (undo what you said last), m TEXT (a comment) or q (quit); what stands behind a verdict is kept as a note: `n broke
the tests`. Episodes that failed, that were judged or labelled before or that were skipped are not shown; --again shows
them too.

A label is never a reward. `openhands-rl score STORE --reward human` makes scores of the verdicts when you ask for it,
`train --reward human` learns from them. To score one at once by its id:
openhands-rl score STORE --id ID --value 1.

--pairs asks which of two attempts at one task is better: 1, 2, = (equally good), s, u or q. `train --algorithm dpo` and
`export --format preferences` use the answers, and the first rather than the rewards of the same two.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import AsyncIterator, Collection
from itertools import pairwise
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options import add_filters, add_store, author, filter_of, finite, open_store, positive
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.judgements import (
    ALIKE,
    asked_in_common,
    labels_of,
    newest_outcome,
    preferences,
    standing,
)
from openhands_rl_plugin.core.records import LabelKind, TrajectoryFilter
from openhands_rl_plugin.core.types import StopReason

if TYPE_CHECKING:
    from rich.console import Console

    from openhands_rl_plugin.core.protocols import TrajectoryStorage
    from openhands_rl_plugin.core.records import Label
    from openhands_rl_plugin.core.types import Trajectory


RESUME = "what was said is kept, and shown with --again; the same command goes on with the next"
_MOST, _WIDTH = (60, 6000), 160
_WHOLE_WORDS = {
    "yes": "y", "no": "n", "skip": "s", "quit": "q", "undo": "u", "comment": "m", "alike": "=", "first": "1",
    "second": "2",
}  # fmt: skip


def asked(question: str, words: Collection[str], *, numbers: bool = False) -> tuple[str, str] | None:
    """One of ``words`` (or, with ``numbers``, a number) and what stands behind it; ``None`` to quit, also at the end of
    the input."""
    while True:
        try:
            word, _, rest = input(question).strip().partition(" ")
        except EOFError:
            return None
        word = _WHOLE_WORDS.get(word.lower(), word.lower())
        if word == "q":
            return None
        if word in words or (numbers and _is_number(word)):
            if word != "m" or rest.strip():
                return word, rest.strip()
            print("say something behind m")
            continue
        print(f"{word!r} is none of {', '.join((*words, 'q'))}{' or a number' if numbers else ''}")


def show(out: Console, trajectory: Trajectory, actions: int, heading: str) -> None:
    """What was done last, and the change, or the last answer."""
    from openhands_rl_plugin.core.messages import one_line
    from openhands_rl_plugin.trajectories.exchange.rows import patch_of
    from openhands_rl_plugin.trajectories.view.episode import message_text, shortened

    messages = trajectory.messages()
    write(out, f"── {heading} ──", "bold")
    turns = [at for at, message in enumerate(messages) if message.role == "assistant"][-actions:]
    for at, message in enumerate(messages):
        if turns and at >= turns[0]:
            style = "green" if message.role == "assistant" else "dim"
            write(out, f"  {message.role}: {one_line(message_text(message), _WIDTH)}", style)
    if patch := patch_of(trajectory):
        write(out, shortened(patch, *_MOST), "yellow")
    elif turns:
        write(out, shortened(message_text(messages[turns[-1]]), *_MOST), "green")


def show_task(out: Console, trajectory: Trajectory) -> None:
    """What was asked."""
    from openhands_rl_plugin.trajectories.view.episode import shortened

    first = next((each.content for each in trajectory.messages() if each.role == "user"), "")
    write(out, shortened(trajectory.task.instruction or first or "", *_MOST), "cyan")


def undone(label: Label) -> str:
    """What was taken back."""
    about = label.trajectory_id if label.other is None else f"{label.trajectory_id} and {label.other}"
    said = label.kind.value if label.kind is not LabelKind.TAG else label.text
    return f"taken back: {said}{'' if label.value is None else f' {label.value:g}'} of {about}"


def write(out: Console, text: str, style: str) -> None:
    """A line in which nothing controls the terminal."""
    from rich.text import Text

    from openhands_rl_plugin.core.messages import visible

    out.print(Text(visible(text), style), soft_wrap=True)


def _is_number(word: str) -> bool:
    try:
        finite(word)
    except argparse.ArgumentTypeError:
        return False
    return True


_VERDICTS = {"y": 1.0, "n": 0.0}
_ASK = "solved? [y]es, [n]o, a number, [s]kip, [u]ndo, co[m]ment, [q]uit: "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The store, how much is shown, what is said by ids, and the filters."""
    add_store(parser)
    parser.add_argument("--actions", type=positive, default=5, metavar="COUNT", help="show so many of the last actions")
    again = "also show episodes or pairs that were judged before, and those that were skipped"
    parser.add_argument("--again", action="store_true", help=again)
    parser.add_argument("--author", default=author(), metavar="NAME", help="who labels (default: the user's name)")
    said = parser.add_argument_group("what is said", "Without one of these: a verdict on each episode.")
    what = said.add_mutually_exclusive_group()
    what.add_argument("--pairs", action="store_true", help="ask which of two attempts at one task is better")
    what.add_argument("--better-than", metavar="ID", help="say that --id is better than this one")
    what.add_argument("--as-good-as", metavar="ID", help="say that neither --id nor this one is better")
    what.add_argument("--comment", metavar="TEXT", help="add a remark to --id")
    what.add_argument("--undo", action="store_true", help="take back what you said last, whatever it was")
    said.add_argument("--id", metavar="ID", help="an episode's id, or a unique prefix of it")
    said.add_argument("--note", default="", metavar="TEXT", help="why, kept with a preference")
    add_filters(parser)


async def run(args: argparse.Namespace) -> int:
    """Ask until all are judged or the user quits. Raises ``RLError`` when the store, an id or a filter is wrong."""
    by_id = args.better_than or args.as_good_as or args.comment
    if bool(by_id) != bool(args.id) or (args.note and not (args.better_than or args.as_good_as)):
        raise ConfigError(
            "say it of two episodes, --id ID --better-than ID (or --as-good-as ID) [--note TEXT], or of one, --id ID "
            "--comment TEXT; a score by hand is openhands-rl score STORE --id ID --value 1"
        )
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        if by_id:
            return await _say(args, storage)
        if args.undo:
            return await _take_back(args, storage)
        if args.pairs:
            return await compare(args, storage)
        return await _judge(args, storage)


async def _judge(args: argparse.Namespace, storage: TrajectoryStorage) -> int:
    from openhands_rl_plugin.rollout.scoring import SKIPPED, add_label, labelled, undo
    from openhands_rl_plugin.trajectories.view.terminal import console

    labelled(storage)
    where = filter_of(args).model_copy(update={"finished": True, "failed": False})
    ids = [summary.id async for summary in storage.summaries(where)]
    out, judged, old, at, again = console(), 0, 0, 0, args.again
    while at < len(ids):
        identity = ids[at]
        trajectory = await _open_one(args, storage, identity, again=again)
        if trajectory is None:
            old, at, again = old + 1, at + 1, args.again
            continue
        policy = trajectory.policy.served_name
        show_task(out, trajectory)
        show(out, trajectory, args.actions, f"{at + 1} of {len(ids)}: {identity} · {policy} · {trajectory.stop.value}")
        while (said := asked(_ASK, (*_VERDICTS, "s", "u", "m"), numbers=True)) is not None and said[0] == "m":
            await add_label(storage, identity, LabelKind.COMMENT, text=said[1], author=args.author)
        if said is None:
            break
        word, note = said
        if word == "u":
            label = await undo(storage, author=args.author)
            print(undone(label) if label else "there is nothing to take back")
            judged -= label is not None and label.value is not None and judged > 0
            if label is not None and label.trajectory_id in ids:
                at, again = ids.index(label.trajectory_id), True
            continue
        if word == "s":
            await add_label(storage, identity, LabelKind.TAG, text=SKIPPED, author=args.author)
        else:
            value = _VERDICTS[word] if word in _VERDICTS else float(word)
            await add_label(storage, identity, LabelKind.VERDICT, value=value, text=note, author=args.author)
            judged += 1
        at, again = at + 1, args.again
    print(f"{judged} labelled of {len(ids)} that match, {old} judged before; {RESUME}" if ids else "no episodes match")
    return 0


async def _open_one(
    args: argparse.Namespace, storage: TrajectoryStorage, identity: str, *, again: bool
) -> Trajectory | None:
    """The episode, unless it was judged or labelled before. Read one at a time: others may label the same store."""
    from openhands_rl_plugin.rollout.scoring import is_done

    async for trajectory, scores in storage.find(TrajectoryFilter(ids=(identity,))):
        if again or (newest_outcome(scores) is None and not await is_done(storage, identity)):
            return trajectory
    return None


async def _say(args: argparse.Namespace, storage: TrajectoryStorage) -> int:
    from openhands_rl_plugin.core.judgements import asked_in_common
    from openhands_rl_plugin.rollout.scoring import add_label
    from openhands_rl_plugin.trajectories.view.episode import find_episode

    one, _ = await find_episode(storage, args.id)
    if args.comment:
        await add_label(storage, one.id, LabelKind.COMMENT, text=args.comment, author=args.author)
        print(f"{one.id}: comment kept")
        return 0
    other, _ = await find_episode(storage, args.better_than or args.as_good_as)
    for episode in (one, other):
        if episode.stop is StopReason.UNFINISHED or episode.failure is not None:
            state = "has not ended yet" if episode.failure is None else f"failed ({episode.failure.kind})"
            raise ConfigError(f"{episode.id} {state}, so that no preference would count")
    if one.id == other.id:
        raise ConfigError(f"{one.id} is one episode: give the ids of two")
    if asked_in_common(one.task) != asked_in_common(other.task):
        raise ConfigError(f"{one.id} and {other.id} are of two tasks: only attempts at one task can be compared")
    alike = args.better_than is None
    preferred = {"value": ALIKE if alike else 1.0, "other": other.id, "text": args.note, "author": args.author}
    await add_label(storage, one.id, LabelKind.PREFERENCE, **preferred)
    print(f"{one.id}: {'as good as' if alike else 'better than'} {other.id}")
    return 0


async def _take_back(args: argparse.Namespace, storage: TrajectoryStorage) -> int:
    from openhands_rl_plugin.rollout.scoring import undo

    label = await undo(storage, author=args.author)
    print(undone(label) if label else f"there is nothing to take back that {args.author or 'you'} said")
    return 0 if label else 1


# --- pairs

_ASK_OF_TWO = "which is better? [1], [2], [=] alike, [s]kip, [u]ndo, [q]uit: "


async def compare(args: argparse.Namespace, storage: TrajectoryStorage) -> int:
    """Ask about neighbouring attempts at each task until all were compared or the user quits. Raises ``RLError``.

    The policy is hidden and the sides are shuffled, so that neither has a say in the answer.
    """
    from openhands_rl_plugin.rollout.scoring import SKIPPED, add_label, labelled, undo
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
        if (said := asked(_ASK_OF_TWO, ("1", "2", "=", "s", "u"))) is None:
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
            await add_label(storage, first, LabelKind.TAG, other=second, text=SKIPPED, author=args.author)
        else:
            better, other = (second, first) if word == "2" else (first, second)
            preferred = {"value": ALIKE if word == "=" else 1.0, "other": other, "text": note, "author": args.author}
            await add_label(storage, better, LabelKind.PREFERENCE, **preferred)
            compared += 1
        at, again = at + 1, args.again
    print(f"{compared} compared of {len(pairs)} that match; {RESUME}" if pairs else "no two attempts at one task match")
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
