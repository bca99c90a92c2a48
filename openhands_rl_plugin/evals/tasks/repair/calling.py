"""Calls functions with given arguments and writes what came out. It imports nothing of this package.

``calling.py GIVEN RESULT``: both are JSON. ``GIVEN``: a list of ``{"text", "path", "name", "calls"}``; a call is
``[positional, keywords]`` of literals as text. ``RESULT``: for each a list of outcomes: the canonical text of the
value, ``list:`` and that of its items for an iterator, or null where there was none. Each function has a process of
its own.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import math
import os
import resource
import runpy
import signal
import sys
import tempfile
from typing import Any

CPU_SECONDS, SECONDS, MEMORY, LONGEST, MOST_ITEMS = 0.5, 30, 1 << 30, 200, 60


def canonical(value: Any) -> str:
    """The text of a literal, equal for equal values. Raises ``ValueError`` for what is none."""
    kind = type(value)
    if kind in (str, bytes, int, bool, type(None)) or (kind is float and math.isfinite(value)):
        return repr(value)
    if kind is dict:
        return "{" + ", ".join(f"{canonical(key)}: {canonical(each)}" for key, each in value.items()) + "}"
    if kind is list:
        return f"[{', '.join(map(canonical, value))}]"
    if kind is tuple:
        return f"({', '.join(map(canonical, value))}{',' if len(value) == 1 else ''})"
    if kind is set and value:
        return "{" + ", ".join(sorted(map(canonical, value))) + "}"
    raise ValueError("not a literal")


def outcome(function: Any, positional: list[str], keywords: dict[str, str]) -> str | None:
    """What a call gives; ``None`` where it raises or gives no literal."""
    given = [ast.literal_eval(each) for each in positional]
    named = {name: ast.literal_eval(each) for name, each in keywords.items()}
    text = None
    # Whatever a function raises, it gives nothing.
    with contextlib.suppress(Exception):
        value = function(*given, **named)
        if hasattr(value, "__next__"):
            items = list(itertools.islice(value, MOST_ITEMS + 1))
            text = None if len(items) > MOST_ITEMS else "list:" + canonical(items)
        else:
            text = canonical(value)
    return text if text is not None and len(text) <= LONGEST else None


def outcomes(item: dict[str, Any]) -> list[str | None]:
    """The outcomes of all calls of one function."""
    module = item["path"].removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    names: dict[str, Any] = {}
    with contextlib.suppress(Exception, SystemExit), tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(item["text"])
        file.flush()
        names = runpy.run_path(file.name, run_name=module)
    function = names.get(item["name"])
    return [None if function is None else outcome(function, *call) for call in item["calls"]]


def apart(item: dict[str, Any]) -> list[str | None] | None:
    """``outcomes`` in a process of bounded time, of the processor and in all; ``None`` for one that ended early."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            signal.alarm(SECONDS)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            quiet = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(quiet, number)
            text = json.dumps(outcomes(item)).encode()
            with os.fdopen(writing, "wb") as stream:
                stream.write(text)
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        text = stream.read()
    os.waitpid(child, 0)
    try:
        return json.loads(text)
    except ValueError:
        return None


def main(given: str, result: str) -> None:
    """Read, call, write."""
    sys.path[0] = os.getcwd()
    with open(given, encoding="utf-8") as file:
        items = json.load(file)
    found = [apart(item) for item in items]
    with open(result, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
