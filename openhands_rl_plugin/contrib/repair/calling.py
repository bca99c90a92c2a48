"""Calls a function with given arguments and prints what came out. It imports nothing of this package.

It reads ``{"path", "name", "calls"}`` as JSON from stdin; a call is ``[positional, keywords]`` of literals as text.
It prints a list of outcomes: the canonical text of the value, ``list:`` and that of its items for an iterator, or null
where there was none. Values of classes derived from those of literals count as these.
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
import sys
from typing import Any

CPU_SECONDS, MEMORY, LONGEST, MOST_ITEMS = 1, 1 << 30, 200, 60
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


def outcome(function: Any, positional: list[str], keywords: dict[str, str]) -> str | None:
    """The result of a call as text; ``None`` if it raises or returns no literal."""
    given = [ast.literal_eval(each) for each in positional]
    named = {name: ast.literal_eval(each) for name, each in keywords.items()}
    text = None
    # Whatever a function raises, it gives nothing.
    with contextlib.suppress(Exception):
        value = function(*given, **named)
        if hasattr(value, "__next__"):
            items = list(itertools.islice(value, MOST_ITEMS + 1))
            text = None if len(items) > MOST_ITEMS else "list:" + canonical(plain(items))
        else:
            text = canonical(plain(value))
    return text if text is not None and len(text) <= LONGEST else None


def main() -> None:
    """Read, call, print. What the function prints is dropped."""
    item = json.load(sys.stdin)
    printed, quiet = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.path[0] = os.getcwd()
    name = item["path"].removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    function = None
    with contextlib.suppress(Exception, SystemExit):
        found: Any = importlib.util.spec_from_file_location(name, item["path"])
        sys.modules[name] = module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        function = getattr(module, item["name"])
    outcomes = [None if function is None else outcome(function, *call) for call in item["calls"]]
    os.write(printed, json.dumps(outcomes).encode())
    os._exit(0)  # threads of the function may not end


if __name__ == "__main__":
    main()
