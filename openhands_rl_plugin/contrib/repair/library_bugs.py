"""Bugs in functions of Python's standard library, for drills."""

from __future__ import annotations

import ast
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from openhands_rl_plugin.contrib.repair.kinds import bugs_in
from openhands_rl_plugin.contrib.repair.slices import PackageSlicer, SlicedFunction, lone_function
from openhands_rl_plugin.contrib.repair.telling import is_told
from openhands_rl_plugin.evals.tasks.bugs.positions import parse

_Bugs = tuple[SlicedFunction, tuple[tuple[str, str], ...]]
"""A function, and of each bug the kind and the text with it."""
_LEFT_OUT = ("test/", "idlelib/", "lib2to3/", "turtledemo/", "ensurepip/", "site-packages/", "dist-packages/")
_MOST_OF_A_FUNCTION = 8
_MOST_OF_A_MODULE = 8
"""Where methods count, too: the functions of one module are alike."""


def library_bugs(
    source: random.Random, *, strange: frozenset[str], alone: bool
) -> Iterator[tuple[SlicedFunction, str]]:
    """Functions, and of each a text with a bug: one of every function before any has a second, and every kind of bug
    about as often. ``alone``: see ``library_functions``; else the repair can be told. None has a name in ``strange``.
    """
    known: list[_Bugs] = []
    kinds: Counter[str] = Counter()
    used: set[str] = set()
    for turn in range(_MOST_OF_A_FUNCTION):
        for function, found in known if turn else _functions(source, strange, alone):
            if not turn:
                known.append((function, found))
            bugs: dict[str, list[str]] = {}
            for kind, text in found:
                if text not in used:
                    bugs.setdefault(kind, []).append(text)
            if not bugs:
                continue
            # Every function can lose its "return", few have an index: the kind that was least often is next.
            kind = min(sorted(bugs), key=kinds.__getitem__)
            kinds[kind] += 1
            wrong = source.choice(bugs[kind])
            used.add(wrong)
            yield function, wrong


def _functions(source: random.Random, strange: frozenset[str], alone: bool) -> Iterator[_Bugs]:
    """With all bugs of each, which take a tenth of a second to find."""
    for function in library_functions(source, alone=alone):
        if function.name not in strange:
            bugs = bugs_in(function.text, function.name)
            yield function, tuple(bug for bug in bugs if alone or is_told(bug[1], function.text, function.name))


def library_functions(source: random.Random, *, alone: bool) -> Iterator[SlicedFunction]:
    """The functions of this Python's standard library that are short and, if ``alone``, need nothing else; else also
    methods. Module by module in the order of ``source``: all of them take seconds to read."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.py"))
    kept = [path for path in paths if not path.startswith(_LEFT_OUT) and "/test" not in path]
    source.shuffle(kept)
    for path in kept:
        try:
            text = (root / path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        try:
            tree = parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        if alone:
            slicer = PackageSlicer({path: text})
            names = (node.name for node in tree.body if isinstance(node, ast.FunctionDef))
            yield from filter(None, (slicer.slice(path, name) for name in names))
        else:
            nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            chosen = source.sample(nodes, min(_MOST_OF_A_MODULE, len(nodes)))
            yield from filter(None, (lone_function(path, node) for node in chosen))
