"""The program that runs in a sandbox before any command: the text of ``supervisor.py``, for the Python that runs this
one."""

from __future__ import annotations

import functools
import json
import marshal
import sys
from collections.abc import Sequence
from importlib.resources import files

from openhands_rl_plugin.core.types import Frozen

_READ = """import marshal, os, sys
if sys.hexversion != {version}:
    sys.exit("the Python in the sandbox is another version than the one outside")
code = b""
while len(code) < {size}:
    code += os.read(0, {size} - len(code)) or sys.exit(1)
exec(marshal.loads(code))
"""


class Bound(Frozen):
    """What the supervisor counts: processes with their threads, bytes of memory, and bytes added to ``folder`` and
    those ``also`` named; 0: any.

    ``grouped``: a control group bounds processes and memory. ``isolated``: the sandbox has processes of its own.
    ``gives_way``: commands become less urgent after a moment, so that short ones of other sessions come first.
    """

    processes: int
    memory: int
    disk: int = 0
    folder: str = "/"
    also: tuple[str, ...] = ()
    grouped: bool = False
    isolated: bool = True
    gives_way: bool = False


def bounded(bound: Bound, python: str, command: Sequence[str]) -> list[str]:
    """``command`` below a process that counts, for a sandbox without a shell. ``python``: its path inside."""
    given = json.dumps(bound.model_dump(mode="json"))
    return [python, "-I", "-S", "-c", text_inside("supervisor"), given, *command]


@functools.cache
def supervisor_program() -> tuple[str, bytes]:
    """The text of a program, and what it reads from stdin and executes: the supervisor, compiled, because that takes as
    long as Python takes to start."""
    code = marshal.dumps(compile(text_inside("supervisor"), "<supervisor>", "exec", optimize=2))
    return _READ.format(size=len(code), version=sys.hexversion), code


@functools.cache
def text_inside(name: str) -> str:
    """The text of a program of this folder."""
    return files(__package__).joinpath(f"{name}.py").read_text(encoding="utf-8")
