"""Calls functions with given arguments and writes what came out. It imports nothing of this package.

``calling.py GIVEN RESULT``: both are JSON. ``GIVEN``: a list of ``{"text", "path", "name", "calls"}``; a call is
``[positional, keywords]`` of literals as text; ``"kinds"``: values of classes derived from those of literals count as
these. ``RESULT``: for each a list of outcomes: the canonical text of the value, ``list:`` and that of its items for an
iterator, or null where there was none. Each function has a process of its own.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import itertools
import json
import math
import os
import resource
import select
import signal
import sys
import tempfile
import time
from typing import Any

CPU_SECONDS, SECONDS, MEMORY, LONGEST, MOST_ITEMS = 0.5, 30, 1 << 30, 200, 60
MOST_BYTES = 1 << 20
_KINDS: tuple[Any, ...] = (bool, int, float, str, bytes, dict, list, tuple, set)
_OWN: dict[Any, Any] = {
    int: int.__pos__,
    float: float.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__add__(b"", value),
}


def plain(value: Any) -> Any:
    """The literal that a value of a derived class (``defaultdict``, a named tuple) holds; its own methods are not
    called. Others as they are.
    """
    kind: Any = next((each for each in _KINDS if issubclass(type(value), each)), None)
    if kind is dict:
        return {plain(key): plain(each) for key, each in dict.items(value)}
    if kind in (list, tuple, set):
        return kind(plain(each) for each in kind.__iter__(value))
    own = _OWN.get(kind)
    return value if own is None else own(value)


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


def outcome(function: Any, positional: list[str], keywords: dict[str, str], *, as_kinds: bool) -> str | None:
    """What a call gives; ``None`` where it raises or gives no literal."""
    given = [ast.literal_eval(each) for each in positional]
    named = {name: ast.literal_eval(each) for name, each in keywords.items()}
    text = None
    # Whatever a function raises, it gives nothing.
    with contextlib.suppress(Exception):
        value = function(*given, **named)
        if hasattr(value, "__next__"):
            items = list(itertools.islice(value, MOST_ITEMS + 1))
            items = plain(items) if as_kinds else items
            text = None if len(items) > MOST_ITEMS else "list:" + canonical(items)
        else:
            text = canonical(plain(value) if as_kinds else value)
    return text if text is not None and len(text) <= LONGEST else None


def executed(path: str, text: bytes) -> dict[str, Any]:
    """The names of a module with that text, which may import what is beside it."""
    name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package = [os.path.abspath(os.path.dirname(path))] if os.path.basename(path) == "__init__.py" else None
    with tempfile.NamedTemporaryFile("wb", suffix=".py") as file:
        file.write(text)
        file.flush()
        found: Any = importlib.util.spec_from_file_location(name, file.name, submodule_search_locations=package)
        sys.modules[name] = module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    return vars(module)


def outcomes(item: dict[str, Any]) -> list[str | None]:
    """The outcomes of all calls of one function."""
    names: dict[str, Any] = {}
    with contextlib.suppress(Exception, SystemExit):
        names = executed(item["path"], item["text"].encode("utf-8", "surrogateescape"))
    function, as_kinds = names.get(item["name"]), bool(item.get("kinds"))
    return [None if function is None else outcome(function, *call, as_kinds=as_kinds) for call in item["calls"]]


def apart(item: dict[str, Any]) -> list[str | None] | None:
    """``outcomes`` in a process of bounded time, of the processor and in all; ``None`` for one that ended early."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            signal.alarm(SECONDS)
            most = resource.getrlimit(resource.RLIMIT_AS)[1]
            most = MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            quiet = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(quiet, number)
            text = json.dumps(outcomes(item)).encode()
            with os.fdopen(writing, "wb") as stream:
                stream.write(text)
        finally:
            os._exit(0)
    os.close(writing)
    text = received(reading)
    # It may have switched its timers off, and what it started may still hold the pipe.
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def received(reading: int) -> bytes:
    """What comes through a pipe until it is closed, or for ``SECONDS``, or ``MOST_BYTES`` of it."""
    data, end = b"", time.monotonic() + SECONDS
    while len(data) < MOST_BYTES:
        ready, _, _ = select.select([reading], [], [], max(0.0, end - time.monotonic()))
        part = os.read(reading, 65536) if ready else b""
        if not part:
            break
        data += part
    os.close(reading)
    return data


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
