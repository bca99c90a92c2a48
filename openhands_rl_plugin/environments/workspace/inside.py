"""The programs that run in a sandbox before any command: texts of this folder, for the Python that runs this one."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from importlib.resources import files

from openhands_rl_plugin.core.types import Frozen

_BOUNDS = "openhands_rl_plugin.environments.workspace.bounds"
_BOTH = """{before}import sys, types
module = sys.modules[{name!r}] = types.ModuleType({name!r})
exec({bounds!r}, module.__dict__)
exec({supervisor!r})
"""


class Bound(Frozen):
    """What ``bounds`` counts: processes with their threads, bytes of memory, and bytes added to ``folder``; 0: any.

    ``grouped``: a control group bounds processes and memory. ``isolated``: the sandbox has processes of its own.
    """

    processes: int
    memory: int
    disk: int = 0
    folder: str = "/"
    grouped: bool = False
    isolated: bool = True


def bounded(bound: Bound, python: str, command: Sequence[str]) -> list[str]:
    """``command`` below a process that counts, for a sandbox without a supervisor. ``python``: its path inside."""
    given = json.dumps(bound.model_dump(mode="json"))
    return [python, "-I", "-S", "-c", _text("bounds"), given, *command]


def supervisor_program(before: str = "") -> str:
    """The text of the supervisor, with the bounds that it imports; ``before`` is executed first."""
    return _BOTH.format(before=before, name=_BOUNDS, bounds=_text("bounds"), supervisor=_text("supervisor"))


@functools.cache
def _text(name: str) -> str:
    return files(__package__).joinpath(f"{name}.py").read_text(encoding="utf-8")
