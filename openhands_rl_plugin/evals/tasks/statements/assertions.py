"""The assertion at the line where a test failed, in a form that can be run without the test."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from typing import Literal

from openhands_rl_plugin.evals.tasks.bugs.positions import PythonSource

type Kind = Literal["equal", "holds", "raises", "runs"]

_EQUAL = re.compile(r"self\.assert(Equal|Equals|DictEqual|ListEqual|TupleEqual|SetEqual|MultiLineEqual|SequenceEqual)")
_HOLDS = {
    "self.assertTrue": "{0}",
    "self.assertFalse": "not {0}",
    "self.assertIn": "{0} in {1}",
    "self.assertNotIn": "{0} not in {1}",
    "self.assertIs": "{0} is {1}",
    "self.assertIsNot": "{0} is not {1}",
    "self.assertIsNone": "{0} is None",
    "self.assertIsNotNone": "{0} is not None",
    "self.assertIsInstance": "isinstance({0}, {1})",
    "self.assertNotEqual": "{0} != {1}",
    "self.assertGreater": "{0} > {1}",
    "self.assertLess": "{0} < {1}",
}
_RAISING = {"pytest.raises", "self.assertRaises", "raises"}


@dataclass(frozen=True)
class AssertedClaim:
    """``equal``: ``actual`` is ``expected``. ``holds``: ``actual`` is true. ``raises``: the code in ``actual`` raises
    ``expected``. ``runs``: the code in ``actual`` raises nothing.

    ``names``: all names that it reads; ``of_actual``: those of ``actual``, where they differ. ``called``: the function
    whose result is checked, empty when unknown.
    """

    kind: Kind
    actual: str
    expected: str
    names: frozenset[str]
    called: str
    of_actual: frozenset[str] | None = None

    @property
    def shown_names(self) -> frozenset[str]:
        """The names that ``actual`` reads."""
        return self.names if self.of_actual is None else self.of_actual

    @property
    def shown(self) -> list[str]:
        """The last lines of the example."""
        return self.actual.splitlines()

    @property
    def checked(self) -> list[str]:
        """The last lines of the script that finds out: it binds ``ACTUAL``, ``EXPECTED`` and ``HOLDS``, or raises."""
        if self.kind == "equal":
            return [
                f"ACTUAL = (\n{self.actual}\n)",
                f"EXPECTED = (\n{self.expected}\n)",
                "HOLDS = bool(ACTUAL == EXPECTED)",
            ]
        if self.kind == "holds":
            return [f"ACTUAL = bool(\n{self.actual}\n)", "EXPECTED = True", "HOLDS = ACTUAL"]
        return [*self.actual.splitlines(), "HOLDS = True"]


def claim_of(source: PythonSource, statement: ast.stmt) -> AssertedClaim | None:
    """The claim of the statement at which a test failed; ``None`` when it needs the test around it."""
    claim = _claim(source, statement)
    return None if claim is None or "self" in claim.names else claim


def _claim(source: PythonSource, statement: ast.stmt) -> AssertedClaim | None:
    if isinstance(statement, ast.Assert):
        test = statement.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            return _equal(source, test.left, test.comparators[0])
        return _holds(source, _text(source, test), [test])
    if isinstance(statement, ast.With) and len(statement.items) == 1:
        return _raised_within(source, statement)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("self.assert"):
        return _unittest(source, call)
    code = textwrap.dedent(source.between(*source.lines(statement))).rstrip()
    return AssertedClaim("runs", code, "", _names(statement), called_in(source, statement))


def _unittest(source: PythonSource, call: ast.Call) -> AssertedClaim | None:
    name, texts = ast.unparse(call.func), [_text(source, each) for each in call.args]
    if call.keywords or any(isinstance(each, ast.Starred) for each in call.args):
        return None
    if _EQUAL.fullmatch(name) and len(texts) >= 2:
        return _equal(source, call.args[0], call.args[1])
    if name == "self.assertRaises" and len(texts) >= 2:
        code = f"{texts[1]}({', '.join(texts[2:])})"
        names = frozenset().union(*map(_names, call.args))
        return AssertedClaim("raises", code, _error_name(call.args[0]), names, texts[1])
    form = _HOLDS.get(name)
    if form is None or len(texts) < 1 + ("{1}" in form):
        return None
    used = call.args[: 1 + ("{1}" in form)]
    wrapped = [text if isinstance(each, _SOLID) else f"({text})" for text, each in zip(texts, used, strict=False)]
    return _holds(source, form.format(*wrapped), used)


_SOLID = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant, ast.List, ast.Dict)


def _equal(source: PythonSource, first: ast.expr, second: ast.expr) -> AssertedClaim:
    """The side that computes is the actual one; of two that do, the first."""
    if not _computes(first) and (_computes(second) or isinstance(first, ast.Constant)):
        first, second = second, first
    names, of_actual = _names(first) | _names(second), _names(first)
    return AssertedClaim(
        "equal", _text(source, first), _text(source, second), names, called_in(source, first), of_actual
    )


def _holds(source: PythonSource, text: str, parts: list[ast.expr]) -> AssertedClaim:
    names = frozenset().union(*map(_names, parts))
    called = next((found for part in parts if (found := called_in(source, part))), "")
    return AssertedClaim("holds", text, "", names, called)


def _raised_within(source: PythonSource, statement: ast.With) -> AssertedClaim | None:
    call = statement.items[0].context_expr
    if not (isinstance(call, ast.Call) and ast.unparse(call.func) in _RAISING and call.args):
        code = textwrap.dedent(source.between(*source.lines(statement))).rstrip()
        return AssertedClaim("runs", code, "", _names(statement), called_in(source, statement))
    code = textwrap.dedent(source.between(*source.lines(statement.body[0], statement.body[-1]))).rstrip()
    names = frozenset().union(*map(_names, statement.body))
    return AssertedClaim("raises", code, _error_name(call.args[0]), names, called_in(source, statement.body[-1]))


def called_in(source: PythonSource, node: ast.AST) -> str:
    """The outermost function that is called in ``node``, by the name that it is called by."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            name = source.text(each.func)
            return name if re.fullmatch(r"[A-Za-z_][\w.]*", name) and len(name) <= 60 else _last_name(each.func)
    return ""


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""


def _error_name(node: ast.expr) -> str:
    return ast.unparse(node).split(".")[-1] if isinstance(node, ast.Name | ast.Attribute) else ""


def _computes(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call | ast.BinOp | ast.Subscript | ast.Attribute) for each in ast.walk(node))


def _text(source: PythonSource, node: ast.expr) -> str:
    text = source.text(node)
    return text if "\n" not in text else ast.unparse(node)


def _names(node: ast.AST) -> frozenset[str]:
    """The names that are read in ``node`` and not bound there."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    bound = {each.id for each in names if not isinstance(each.ctx, ast.Load)}
    bound |= {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    return frozenset(each.id for each in names if isinstance(each.ctx, ast.Load)) - bound
