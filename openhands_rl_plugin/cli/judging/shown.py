"""Episodes in the terminal, and what is answered about them."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.stored import finite
from openhands_rl_plugin.core.records import LabelKind

if TYPE_CHECKING:
    from rich.console import Console

    from openhands_rl_plugin.core.records import Label
    from openhands_rl_plugin.core.types import Trajectory

RESUME = "what you said is kept; the same command goes on with the next"
_MOST_LINES, _MOST_CHARACTERS, _WIDTH = 60, 6000, 160
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
    from openhands_rl_plugin.trajectories.exchange.episodes import patch_of
    from openhands_rl_plugin.trajectories.view.tables import said_by

    messages = trajectory.messages()
    write(out, f"── {heading} ──", "bold")
    turns = [at for at, message in enumerate(messages) if message.role == "assistant"][-actions:]
    for at, message in enumerate(messages):
        if turns and at >= turns[0]:
            style = "green" if message.role == "assistant" else "dim"
            write(out, f"  {message.role}: {one_line(said_by(message), _WIDTH)}", style)
    if patch := patch_of(trajectory):
        write(out, _cut(patch), "yellow")
    elif turns:
        write(out, _cut(said_by(messages[turns[-1]])), "green")


def show_task(out: Console, trajectory: Trajectory) -> None:
    """What was asked."""
    said = next((each.content for each in trajectory.messages() if each.role == "user"), "")
    write(out, _cut(trajectory.task.instruction or said or ""), "cyan")


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


def _cut(text: str) -> str:
    lines = text[:_MOST_CHARACTERS].split("\n")
    shown = "\n".join(lines[:_MOST_LINES])
    cut = len(lines) > _MOST_LINES or len(text) > _MOST_CHARACTERS
    return f"{shown}\n… cut: {len(text):,} characters; `openhands-rl show --full` shows them" if cut else shown


def _is_number(word: str) -> bool:
    try:
        finite(word)
    except argparse.ArgumentTypeError:
        return False
    return True
