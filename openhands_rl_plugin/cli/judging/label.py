"""``openhands-rl label STORE``: one stored episode after another, and a verdict on each."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.stored import add_filters, add_store, author, filter_of, finite, positive
from openhands_rl_plugin.cli.options.stores import open_store
from openhands_rl_plugin.core.judgements import newest_outcome
from openhands_rl_plugin.core.records import TrajectoryFilter

if TYPE_CHECKING:
    from rich.console import Console

    from openhands_rl_plugin.core.protocols import TrajectoryStorage
    from openhands_rl_plugin.core.types import Trajectory

RESUME = "verdicts are kept; the same command goes on with the next episode"
EPILOG = """examples:
  openhands-rl label ~/.openhands/rl_trajectories
  openhands-rl label ~/.openhands/rl_trajectories --run night-3 --actions 10
  openhands-rl label ~/.openhands/rl_trajectories --again --max-reward 0.5

Shows what was asked, the last actions, and the change (or the last answer). Answer y (1), n (0), a number, s (skip) or
q (quit); what stands behind it is kept as a note: `n broke the tests`. Episodes that failed, that were judged before or
that you skipped are not shown; --again shows them too. To judge one by its id: openhands-rl score STORE --id ID
--value 1.
"""
_VERDICTS = {"y": 1.0, "yes": 1.0, "n": 0.0, "no": 0.0}
_ASK = "solved? [y]es, [n]o, a number, [s]kip, [q]uit: "
_MOST_LINES, _MOST_CHARACTERS, _WIDTH = 60, 6000, 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The store, how much is shown, and the filters."""
    add_store(parser)
    parser.add_argument("--actions", type=positive, default=5, metavar="N", help="show the last N actions")
    again = "also show episodes that were judged before, and those that you skipped"
    parser.add_argument("--again", action="store_true", help=again)
    add_filters(parser)


async def run(args: argparse.Namespace) -> int:
    """Ask until all are judged or the user quits. Raises ``RLError`` when the store or a filter is wrong."""
    from openhands_rl_plugin.rollout.verdicts import give_verdict, skip
    from openhands_rl_plugin.trajectories.view.terminal import console

    where = filter_of(args).model_copy(update={"finished": True, "failed": False})
    out, judged = console(), 0
    async with open_store(args.store, skip_damaged=args.skip_damaged) as storage:
        ids = [summary.id async for summary in storage.summaries(where)]
        for at, identity in enumerate(ids):
            trajectory = await _open_one(storage, identity, again=args.again)
            if trajectory is None:
                continue
            _show(out, trajectory, args.actions, f"{at + 1} of {len(ids)}")
            said = _asked()
            if said is None:
                break
            value, note = said
            if value is None:
                await skip(storage, identity, author=author())
            else:
                await give_verdict(storage, identity, value, note=note, author=author())
                judged += 1
    print(f"{judged} judged; {RESUME}" if ids else "no episodes match")
    return 0


async def _open_one(storage: TrajectoryStorage, identity: str, *, again: bool) -> Trajectory | None:
    """The episode, unless it was judged or skipped before. Read one at a time: others may judge the same store."""
    from openhands_rl_plugin.rollout.verdicts import skipped

    async for trajectory, scores in storage.find(TrajectoryFilter(ids=(identity,))):
        if again or (newest_outcome(scores) is None and not await skipped(storage, identity)):
            return trajectory
    return None


def _asked() -> tuple[float | None, str] | None:
    """The verdict (``None``: skipped) and a note; ``None`` to quit, also at the end of the input."""
    while True:
        try:
            word, _, note = input(_ASK).strip().partition(" ")
        except EOFError:
            return None
        word = word.lower()
        if word in ("q", "quit"):
            return None
        if word in ("s", "skip"):
            return None, ""
        try:
            return _VERDICTS[word] if word in _VERDICTS else finite(word), note.strip()
        except argparse.ArgumentTypeError:
            print(f"{word!r} is none of y, n, s, q or a number")


def _show(out: Console, trajectory: Trajectory, actions: int, place: str) -> None:
    from openhands_rl_plugin.core.transcript import one_line
    from openhands_rl_plugin.trajectories.exchange.judgement import patch_of
    from openhands_rl_plugin.trajectories.view.pages import said_by

    messages = trajectory.messages()
    asked = trajectory.task.instruction or next((each.content for each in messages if each.role == "user"), "") or ""
    _print(out, f"── {place}: {trajectory.id} · {trajectory.policy.served_name} · {trajectory.stop.value} ──", "bold")
    _print(out, _cut(asked), "cyan")
    turns = [at for at, message in enumerate(messages) if message.role == "assistant"][-actions:]
    for at, message in enumerate(messages):
        if turns and at >= turns[0]:
            style = "green" if message.role == "assistant" else "dim"
            _print(out, f"  {message.role}: {one_line(said_by(message), _WIDTH)}", style)
    if patch := patch_of(trajectory):
        _print(out, _cut(patch), "yellow")
    elif turns:
        _print(out, _cut(said_by(messages[turns[-1]])), "green")


def _print(out: Console, text: str, style: str) -> None:
    from rich.text import Text

    from openhands_rl_plugin.core.transcript import visible

    out.print(Text(visible(text), style), soft_wrap=True)


def _cut(text: str) -> str:
    lines = text[:_MOST_CHARACTERS].split("\n")
    shown = "\n".join(lines[:_MOST_LINES])
    cut = len(lines) > _MOST_LINES or len(text) > _MOST_CHARACTERS
    return f"{shown}\n… cut: {len(text):,} characters; `openhands-rl show --full` shows them" if cut else shown
