"""The classes and functions of a Python file: what stands where, and what differs between two versions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from openhands_rl_plugin.evals.tasks.bugs.positions import FUNCTIONS, Definition, definitions, parse

_LONGEST = 2 * 2**20


class Scope(NamedTuple):
    """What a line belongs to: the class or function that counts as its module, and its function; empty for none."""

    module: str = ""
    function: str = ""


class Outline:
    """The outline of one file. Raises ``SyntaxError`` for text that is no Python, or too large.

    A function's lines are those from its first decorator to its end, with all that is defined within it. A class has
    those of its lines that belong to no function.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise SyntaxError(f"more than {_LONGEST} characters")
        try:
            tree = parse(text.removeprefix("\ufeff"))
        except (ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(str(error)) from error
        self._lines = [line.rstrip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
        self._scopes = [Scope()] * len(self._lines)
        self.scopes: dict[str, Scope] = {}
        """Every dotted name that is defined: functions and classes, and variables of the file and of classes."""
        for name, node in definitions(tree):
            scope = self._enclosing(name, function=isinstance(node, FUNCTIONS))
            self.scopes.setdefault(name, scope)
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            self._scopes[first - 1 : node.end_lineno] = [scope] * ((node.end_lineno or node.lineno) - first + 1)
        for name in _variables(tree):
            self.scopes.setdefault(name, Scope(module=name.rpartition(".")[0]))

    def _enclosing(self, name: str, *, function: bool) -> Scope:
        outer, _, _ = name.rpartition(".")
        above = self.scopes.get(outer, Scope())
        if above.function:
            return above
        return Scope(module=outer or name, function=name) if function else Scope(module=name)

    def at(self, first: int, last: int) -> frozenset[Scope]:
        """What the lines from ``first`` to ``last`` (from 1, inclusive) belong to."""
        return frozenset(self._scopes[max(0, first - 1) : max(0, last)])

    def named(self, name: str) -> Scope | None:
        """The scope of a name; of a method also without its class, where only one has that name."""
        if name in self.scopes:
            return self.scopes[name]
        last = [scope for each, scope in self.scopes.items() if scope.function == each and each.endswith(f".{name}")]
        return last[0] if len(last) == 1 else None

    def texts(self) -> Mapping[Scope, tuple[str, ...]]:
        """The lines of every scope, blank ones left out."""
        found: dict[Scope, list[str]] = {}
        for line, scope in zip(self._lines, self._scopes, strict=True):
            if line:
                found.setdefault(scope, []).append(line)
        return {scope: tuple(lines) for scope, lines in found.items()}


def changed(before: Outline, after: Outline) -> frozenset[Scope]:
    """The scopes of ``before`` in which ``after`` differs. What ``after`` adds belongs to its class."""
    old, new = before.texts(), after.texts()
    found = {scope for scope, lines in old.items() if new.get(scope) != lines}
    classes = {scope.module for scope in old}
    return frozenset(found | {Scope(scope.module) for scope in new.keys() - old.keys() if scope.module in classes})


def _variables(tree: ast.Module) -> Iterator[str]:
    """The variables that are assigned in the file, or in a class, by their dotted names."""
    holders: list[tuple[str, ast.Module | Definition]] = [("", tree)]
    holders += [(f"{name}.", node) for name, node in definitions(tree) if not isinstance(node, FUNCTIONS)]
    for prefix, holder in holders:
        for node in holder.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (f"{prefix}{each.id}" for each in targets if isinstance(each, ast.Name))
