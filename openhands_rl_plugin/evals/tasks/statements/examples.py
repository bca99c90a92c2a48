"""A piece of code that shows a failure without the test: the test's own lines, with all that they need."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from openhands_rl_plugin.evals.tasks.bugs.positions import DEFINITIONS, FUNCTIONS, Function, PythonSource, definitions
from openhands_rl_plugin.evals.tasks.hidden_tests import function_of
from openhands_rl_plugin.evals.tasks.sandbox import FailureNote
from openhands_rl_plugin.evals.tasks.statements.assertions import AssertedClaim, claim_of

MOST_LINES, MOST_SIGNS = 24, 1_600
_LONGEST_HELPER = 14
_CLASS = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_KNOWN = frozenset(dir(builtins)) | {"__name__"}


@dataclass(frozen=True)
class FailureExample:
    """Code that reproduces a failure of ``test``: the lines ``before``, then the failing ``claim``.

    ``needed``: the lines before a check of the claim, which include those of its expected value.
    """

    test: str
    before: tuple[str, ...]
    needed: tuple[str, ...]
    claim: AssertedClaim

    @property
    def code(self) -> str:
        """The code for the bug report."""
        return "\n".join([*self.before, *self.claim.shown])

    @property
    def script(self) -> str:
        """The script that checks whether the example fails."""
        return "\n".join([*self.needed, *self.claim.checked]) + "\n"


def example_of(text: str, test: str, note: FailureNote) -> FailureExample | None:
    """The example in a failed test; ``None`` when it needs fixtures, or more than can be shown."""
    for name in (name for name in note.values if name.startswith("self.")):
        text = re.sub(rf"\bself\.{name[5:]}\b", name[5:], text)
    try:
        source = PythonSource(text)
    except SyntaxError:
        return None
    function = _function(source, function_of(test), note.line)
    if function is None:
        return None
    before, failed = _split(function, note.line)
    claim = claim_of(source, failed) if failed is not None else None
    if failed is None or claim is None:
        return None
    values = {name.removeprefix("self."): value for name, value in note.values.items()}
    shown, needed = (_lines(source, values, before, names) for names in (claim.shown_names, claim.names))
    if shown is None or needed is None:
        return None
    example = FailureExample(test, tuple(shown), tuple(needed), claim)
    return example if fits(example.code) else None


def _lines(
    source: PythonSource, values: dict[str, str], before: Sequence[ast.stmt], names: frozenset[str]
) -> list[str] | None:
    """The lines that code which reads ``names`` depends on; ``None`` when unknown."""
    needs = _Needs(source, values)
    kept = needs.slice(before, names)
    lines = needs.resolved()
    if lines is None or any(_names_self(statement) for statement in kept):
        return None
    return [*lines, *(line for each in kept for line in shown(source, each))]


def body_of(text: str, test: str, note: FailureNote) -> str | None:
    """The lines of a failed test up to where it fails; ``None`` when they are too many."""
    try:
        source = PythonSource(text)
    except SyntaxError:
        return None
    function = _function(source, function_of(test), note.line)
    before, failed = _split(function, note.line) if function is not None else ((), None)
    if failed is None:
        return None
    code = "\n".join(line for each in (*before, failed) for line in shown(source, each))
    return code if fits(code) else None


def fits(code: str) -> bool:
    """Whether code is short enough for a report."""
    return len(code) <= MOST_SIGNS and code.count("\n") < MOST_LINES


def shown(source: PythonSource, statement: ast.stmt) -> list[str]:
    """The lines of a statement, moved to the left edge."""
    spans = any(
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and node.end_lineno != node.lineno
        for node in ast.walk(statement)
    )
    if spans or not source.stands_alone(statement):
        return ast.unparse(statement).splitlines()
    return textwrap.dedent(source.between(*source.lines(statement))).rstrip().splitlines()


def _function(source: PythonSource, name: str, line: int) -> Function | None:
    for _, node in definitions(source.tree):
        if isinstance(node, FUNCTIONS) and node.name == name and node.lineno <= line <= (node.end_lineno or 0):
            return node
    return None


def _split(function: Function, line: int) -> tuple[Sequence[ast.stmt], ast.stmt | None]:
    """The statements before the one that holds ``line``, and that one."""
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    for at, statement in enumerate(body):
        if statement.lineno <= line <= (statement.end_lineno or 0):
            return body[:at], statement
    return (), None


@dataclass
class _Needs:
    """What has to come before some statements of a test file so that they can be run alone."""

    source: PythonSource
    values: dict[str, str]
    names: set[str] = field(default_factory=set)
    bound: set[str] = field(default_factory=set)

    def slice(self, before: Sequence[ast.stmt], names: frozenset[str]) -> list[ast.stmt]:
        """The statements that what is named depends on, without checks that passed."""
        self.names = set(names)
        kept: list[ast.stmt] = []
        for statement in reversed(before):
            if isinstance(statement, ast.Assert) or claim_is_unittest(statement):
                continue
            used, made = loaded(statement), stored(statement)
            if made & self.names or used & (self.names - _KNOWN) - self._modules():
                kept.insert(0, statement)
                self.names |= used
                self.bound |= made
        return kept

    def resolved(self) -> list[str] | None:
        """Imports, helpers and values for every name that is not bound otherwise; ``None`` when one is unknown."""
        imports: list[str] = []
        others: list[str] = []
        waiting, seen = sorted(self.names - self.bound - _KNOWN), set[str]()
        while waiting:
            name = waiting.pop(0)
            if name in seen:
                continue
            seen.add(name)
            if (module := _CLASS.fullmatch(self.values.get(name, ""))) is not None:
                if _is_of_tests(module[1]):
                    return None
                imports.append(f"from {module[1]} import {module[2]}" + (f" as {name}" if name != module[2] else ""))
            elif name in self.values:
                others.append(f"{name} = {self.values[name]}")
            elif (imported := self._import(name)) is not None:
                imports.append(imported)
            elif (helper := self._helper(name)) is not None:
                others.insert(0, "\n".join(shown(self.source, helper)))
                waiting += sorted(loaded(helper) - stored(helper) - _KNOWN - {name} - _arguments(helper))
            else:
                return None
        return [*sorted(set(imports), key=lambda line: (line.startswith("from"), line)), *others]

    def _modules(self) -> set[str]:
        return {
            alias.asname or alias.name.partition(".")[0]
            for node in self.source.tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }

    def _import(self, name: str) -> str | None:
        star = None
        for node in _top_level(self.source.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if (alias.asname or alias.name.partition(".")[0]) == name:
                        return f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and not _is_of_tests(node.module or ""):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return f"from {node.module} import {alias.name}" + (
                            f" as {alias.asname}" if alias.asname else ""
                        )
                    if alias.name == "*":
                        star = f"from {node.module} import *"
        return star

    def _helper(self, name: str) -> ast.stmt | None:
        """A short function or a plain value at the top of the file."""
        for node in self.source.tree.body:
            if isinstance(node, DEFINITIONS) and node.name == name:
                length = (node.end_lineno or node.lineno) - node.lineno
                plain = not node.decorator_list and length <= _LONGEST_HELPER
                return node if plain and not name.lower().startswith("test") else None
            if isinstance(node, ast.Assign) and name in stored(node):
                return node if len(self.source.text(node)) <= 400 else None
        return None


def claim_is_unittest(statement: ast.stmt) -> bool:
    """Whether a statement is a check of ``unittest``'s."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and ast.unparse(call.func).startswith("self.assert")


def loaded(node: ast.AST) -> set[str]:
    """The names that are read in it."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def stored(node: ast.AST) -> set[str]:
    """The names that are bound in it."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    found |= {each.name for each in ast.walk(node) if isinstance(each, DEFINITIONS)}
    found |= {each.name for each in ast.walk(node) if isinstance(each, ast.ExceptHandler) and each.name}
    found |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    imports = (each for each in ast.walk(node) if isinstance(each, ast.Import | ast.ImportFrom))
    return found | {alias.asname or alias.name.partition(".")[0] for each in imports for alias in each.names}


def _arguments(node: ast.AST) -> set[str]:
    return {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}


def _names_self(node: ast.AST) -> bool:
    return "self" in loaded(node) and "self" not in _arguments(node)


def _top_level(tree: ast.Module) -> Iterable[ast.stmt]:
    """The statements of a module, those under conditions and in ``try`` too."""
    for statement in tree.body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from statement.body


def _is_of_tests(module: str) -> bool:
    return bool({"tests", "test", "conftest"} & set(module.split(".")))
