"""Short drills: a line with a bug and what changes of it, and nothing else.

Which edit repairs which bug is to be learnt from many examples, and of a drill in the form of a demonstration one token
in twenty is the fix. A short one has a third of its tokens. What it shows is used in the other form, too, if that has
been seen beside it.
"""

from __future__ import annotations

from openhands_rl_plugin.contrib.repair.edits import line_edit, sed_script
from openhands_rl_plugin.contrib.repair.oracle import END
from openhands_rl_plugin.contrib.repair.slices import SlicedFunction
from openhands_rl_plugin.contrib.repair.telling import function_told
from openhands_rl_plugin.core.types import Message, Node, Trajectory

_SYSTEM = "Repair the line."


def short_drill(episode: Trajectory, function: SlicedFunction, wrong: str) -> Trajectory:
    """An episode of one answer, the script of ``sed`` that makes the function's text of ``wrong``. ``episode``: any
    demonstration, which says what is not of the conversation. Line and head of the function must be enough for the
    repair (``is_told``)."""
    edit = line_edit(wrong, function.text)
    line = wrong.split("\n")[edit.first - 1].strip()
    told = f"The bug is in line {edit.first}{function_told(wrong, function.name, line)}\n{line}\n"
    # As in a command of the other form.
    answer = f"<<'{END}'\n{sed_script(wrong, function.text)}\n{END}"
    nodes = (
        Node(parent=None, message=Message(role="system", content=_SYSTEM)),
        Node(parent=0, message=Message(role="user", content=told)),
        Node(parent=1, message=Message(role="assistant", content=answer), sampled=True),
    )
    return episode.model_copy(update={"nodes": nodes, "head": 2})
