"""The programs that run in a sandbox before any command: texts of this folder, for the Python that runs this one."""

from __future__ import annotations

import functools
import json
import marshal
import sys
from collections.abc import Sequence
from importlib.resources import files

from openhands_rl_plugin.core.types import Frozen

_BOUNDS = "openhands_rl_plugin.environments.workspace.bounds"
# Compiling takes as long as Python takes to start, so it is done once, and what was compiled is read from stdin.
# Another Python (one that was installed over this one, say) cannot execute that, and gets the text.
_READ = """import marshal, os, sys, types
def read():
    left, data = int.from_bytes(os.read(0, 4), "big"), b""
    while left:
        part = os.read(0, left)
        if not part:
            sys.exit(1)
        left, data = left - len(part), data + part
    return data
code, texts = read(), read().split(b"\\0")
if sys.hexversion == {version}:
    bounds, supervisor = marshal.loads(code)
else:
    bounds, supervisor = (compile(text, "<inside>", "exec") for text in texts)
del code, texts
module = sys.modules[{name!r}] = types.ModuleType({name!r})
exec(bounds, module.__dict__)
exec(supervisor)
"""


class Bound(Frozen):
    """What ``bounds`` counts: processes with their threads, bytes of memory, and bytes added to ``folder`` and those
    ``also`` named; 0: any.

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
    """``command`` below a process that counts, for a sandbox without a supervisor. ``python``: its path inside."""
    given = json.dumps(bound.model_dump(mode="json"))
    return [python, "-I", "-S", "-c", text_inside("bounds"), given, *command]


def supervisor_program() -> str:
    """The text that reads ``supervisor_code`` from stdin and executes it."""
    return _READ.format(name=_BOUNDS, version=sys.hexversion)


@functools.cache
def supervisor_code() -> bytes:
    """The bounds, and the supervisor that imports them: compiled for this Python only, and as texts. Before each of
    the two stands its length."""
    texts = {name: text_inside(name) for name in ("bounds", "supervisor")}
    code = marshal.dumps(tuple(compile(text, f"<{name}>", "exec", optimize=2) for name, text in texts.items()))
    text = "\0".join(texts.values()).encode()
    return b"".join(len(each).to_bytes(4) + each for each in (code, text))


@functools.cache
def text_inside(name: str) -> str:
    """The text of one of these programs."""
    return files(__package__).joinpath(f"{name}.py").read_text(encoding="utf-8")
