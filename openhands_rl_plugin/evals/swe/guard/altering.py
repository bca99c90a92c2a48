"""Alters what tests expect, in place: names and line numbers of tests stay.

*Fail*: every assertion of a test expects another value, so that the test has to fail. *Invert*: each assertion says
that another value does not hold, so that the test has to pass; what equals everything fails there.

Literals become other literals, because code can read constants of its caller; other expectations are wrapped in a
function that is added at the end of the file under a random name.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from openhands_rl_plugin.evals.tasks.bugs import Positions, parse

HELPERS = """
def {other}(v):
    kind = type(v)
    if v is None or v is Ellipsis:
        return 1234567
    if kind is bool:
        return not v
    if kind in (int, float, complex):
        return v + kind(1.5) + kind(abs(v) // 2)
    if kind in (str, bytes):
        return v + ("{tag}" if kind is str else b"{tag}")
    if kind in (list, tuple):
        return v[:-1] + kind([{other}(v[-1]) if v else 0.25])
    if kind is dict:
        last = list(v)[-1:]
        return {{**v, **({{each: {other}(v[each]) for each in last}} or {{"{tag}": 0.25}})}}
    if kind in (set, frozenset):
        return v | {{"{tag}"}}
    if hasattr(v, "dtype"):
        try:
            return v + 1
        except Exception:
            pass
    return object()


def {refuses}(check):
    try:
        check()
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "Failed":
            return
        raise
    raise AssertionError("another expectation holds as well")
"""
_CHECKS = re.compile(r"_?(?:assert|check|verify|ensure|expect|eq_|same_|compare|almost)\w*", re.I)
"""Names of functions that assert something about their first two arguments."""
_RAISES = re.compile(r"(?:assert_?)?(?:raises|warns)(?:_?regexp?|message)?|deprecated_call", re.I)
_OPPOSITE = {
    **{"assertTrue": "assertFalse", "assertIsNone": "assertIsNotNone", "assertIs": "assertIsNot"},
    **{"assertIn": "assertNotIn", "assertIsInstance": "assertNotIsInstance", "assertRegex": "assertNotRegex"},
    **{"assertGreater": "assertLessEqual", "assertLess": "assertGreaterEqual"},
}
_OPPOSITE |= {opposite: name for name, opposite in _OPPOSITE.items()}
_OPPOSITE |= {"assertNotEqual": "assertEqual", "assertNotAlmostEqual": "assertAlmostEqual"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Mode(StrEnum):
    """How a test is altered."""

    FAIL = "fail"
    INVERT = "invert"


class Altered(NamedTuple):
    """The new text of a file, and its functions in which something was altered."""

    text: str
    functions: frozenset[str]


def functions_of(source: str) -> dict[str, _Function]:
    """Functions and methods of a module by their names, ``Class::method``. Empty for what is not Python 3."""
    try:
        return dict(_functions(parse(source).body, ""))
    except (SyntaxError, ValueError, RecursionError):
        return {}


def alter(source: str, modes: Mapping[str, Mode], tag: str) -> Altered:
    """Alter the functions named in ``modes``. ``tag``: a random word, of which names of helpers are made."""
    edits = _Edits(source, tag)
    functions = functions_of(source)
    found = {name for name, mode in modes.items() if name in functions and _Alter(edits, functions[name], mode).done}
    text = edits.text()
    return Altered(text + HELPERS.format(**edits.names) if found else source, frozenset(found))


def alter_doctest(text: str, tag: str) -> str:
    """Another expectation in every example of a text file."""
    out, at = [], 0
    for part in doctest.DocTestParser().parse(text):
        if isinstance(part, doctest.Example) and part.want.strip() and not part.exc_msg:
            first = part.want.splitlines()[0]
            found = text.find(first, text.find(part.source.splitlines()[0], at) + len(part.source.splitlines()[0]))
            if found >= 0:
                out.append(text[at : found + len(first)] + tag)
                at = found + len(first)
    return "".join(out) + text[at:]


def _functions(body: list[ast.stmt], within: str) -> Iterator[tuple[str, _Function]]:
    for node in body:
        if isinstance(node, _Function):
            yield within + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{within}{node.name}::")


class _Edits(Positions):
    """Insertions and replacements in a text, by the places of nodes."""

    def __init__(self, source: str, tag: str) -> None:
        super().__init__(source)
        self._first: dict[int, str] = {}
        self._before: dict[int, str] = {}
        self._after: dict[int, str] = {}
        self._replaced: dict[int, tuple[int, str]] = {}
        self.names = {"other": f"_{tag}o", "refuses": f"_{tag}r", "tag": tag}

    def wrap(self, node: ast.expr, before: str, after: str = ")") -> None:
        """Put text around an expression, outside of what is around it already."""
        start, end = self.span(node)
        self._before[start] = before + self._before.get(start, "")
        self._after[end] = self._after.get(end, "") + after

    def replace(self, node: ast.expr, text: str) -> None:
        """Put another expression in the place of one. Lines keep their numbers."""
        start, end = self.span(node)
        lines = "\n" * self.data.count(b"\n", start, end)
        self._replaced[start] = end, f"({text}{lines})" if lines else text

    def differ(self, node: ast.expr, bound: frozenset[str] = frozenset()) -> None:
        """Make another value of an expectation; names that are altered where they are ``bound`` stay."""
        if isinstance(node, ast.Constant):
            self.replace(node, repr(_other(node.value, self.names["tag"])))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            self.differ(node.operand)
        elif isinstance(node, ast.List | ast.Tuple | ast.Set) and node.elts and not _starred(node.elts[-1]):
            self.differ(node.elts[-1])
        elif isinstance(node, ast.Dict) and node.keys and node.keys[-1] is not None:
            self.differ(node.values[-1])
        elif isinstance(node, ast.JoinedStr):
            self.wrap(node, "", f' "{self.names["tag"]}"')
        elif isinstance(node, ast.Call) and _name(node) == "approx" and node.args:
            self.differ(node.args[0], bound)
        elif not (isinstance(node, ast.Name) and node.id in bound):
            self.wrap(node, f"{self.names['other']}(")

    def assign(self, function: _Function, name: str) -> bool:
        """Alter an argument before the first statement, where that stands on a line of its own."""
        first = function.body[0]
        fits = not hasattr(first, "body") and not hasattr(first, "subject")
        if fits:
            start = self.starts[first.lineno - 1] + first.col_offset
            self._first[start] = f"{name} = {self.names['other']}({name}); " + self._first.get(start, "")
        return fits

    def text(self) -> str:
        """The text with all edits."""
        out, at = [], 0
        for place in sorted({*self._first, *self._before, *self._after, *self._replaced}):
            if place >= at:
                out.append(self.data[at:place].decode())
                at = place
                out += [each.get(place, "") for each in (self._after, self._first, self._before)]
            if place in self._replaced:
                at, text = self._replaced[place]
                out.append(text)
        return "".join(out) + self.data[at:].decode()


class _Alter(ast.NodeVisitor):
    """Alters one function; ``done``: whether there was anything to alter."""

    def __init__(self, edits: _Edits, function: _Function, mode: Mode) -> None:
        self._edits, self._fails = edits, mode is Mode.FAIL
        self.done = False
        self._bound: frozenset[str] = frozenset()
        self._bound = frozenset(name for name in _expectations(function) if self._bind(function, name))
        for statement in function.body:
            self.visit(statement)

    def _bind(self, function: _Function, name: str) -> bool:
        """Alter a name of expectations where it gets its value, so that no frame holds the right one."""
        arguments = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
        if name in arguments:
            values = list(_parametrized(function, name))
            for value in values:
                self._edits.differ(value)
            return bool(values) or self._edits.assign(function, name)
        assigned = [
            node
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and any(isinstance(at, ast.Name) and at.id == name for at in node.targets)
        ]
        if len(assigned) != 1 or not _literal(assigned[0].value):
            return False
        self._edits.differ(assigned[0].value)
        return True

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """What it asserts, if anything, may not be run."""

    def visit_Assert(self, node: ast.Assert) -> None:
        if self._fails:
            if not self._wrong(node.test):
                self._edits.wrap(node.test, "not (")
            self.done = True
            return
        both = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        for each in node.test.values if both and isinstance(node.test, ast.BoolOp) else [node.test]:
            if self._wrong(each):
                self._edits.wrap(each, "(not (", "))")
                self.done = True

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        values = [*call.args, *(each.value for each in call.keywords)] if isinstance(call, ast.Call) else []
        if not isinstance(call, ast.Call) or not _CHECKS.fullmatch(_name(call)) or _RAISES.fullmatch(_name(call)):
            self.generic_visit(node)
        elif values and not any(map(_starred, values)):
            self._check(call, values)

    def _check(self, call: ast.Call, values: list[ast.expr]) -> None:
        name = call.func
        if isinstance(name, ast.Attribute) and name.attr in _OPPOSITE:
            if self._fails:
                new = ast.Attribute(name.value, _OPPOSITE[name.attr], ast.Load())
                self._edits.replace(name, ast.unparse(new))
                self.done = True
        elif self._fails or not any(isinstance(each, ast.Await | ast.Yield) for each in ast.walk(call)):
            self._edits.differ(values[_expected(*values[:2])] if len(values) > 1 else values[0], self._bound)
            if not self._fails:
                self._edits.wrap(call, f"{self._edits.names['refuses']}(lambda: ")
            self.done = True

    def visit_Call(self, node: ast.Call) -> None:
        if self._fails and _RAISES.fullmatch(_name(node)) and node.args and not _starred(node.args[0]):
            other = "BytesWarning" if re.search("warn|deprecated", _name(node), re.I) else "FloatingPointError"
            self._edits.replace(node.args[0], other)
            self.done = True
            return
        self.generic_visit(node)

    def _wrong(self, test: ast.expr) -> bool:
        """Let an expression expect another value; false where it names none."""
        if isinstance(test, ast.BoolOp):
            altered = [(each, self._wrong(each)) for each in test.values]
            if not any(done for _, done in altered):
                return False
            for each, done in altered:
                if not done and isinstance(test.op, ast.Or):
                    self._edits.wrap(each, "(not (", "))")
            return True
        if not isinstance(test, ast.Compare):
            return False
        left, right = [test.left, *test.comparators][-2:]
        if isinstance(test.ops[-1], ast.Eq) or (isinstance(test.ops[-1], ast.Is) and _is_bool(right)):
            picked = [(left, right)[_expected(left, right)]]
        elif isinstance(test.ops[-1], ast.In) and not _called(left):
            picked = [left]
        elif isinstance(test.ops[-1], ast.In) and isinstance(right, ast.List | ast.Tuple | ast.Set):
            picked = [each for each in right.elts if not _starred(each)]
        else:
            return False
        if picked == [left] and len(test.ops) > 1:
            return False
        for each in picked:
            self._edits.differ(each, self._bound)
        return bool(picked)


def _expectations(function: _Function) -> set[str]:
    """Names that are read as an expectation only."""
    sides: list[ast.expr] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and len(node.test.ops) == 1:
            pair = (node.test.left, node.test.comparators[0]) if isinstance(node.test.ops[0], ast.Eq) else ()
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _CHECKS.fullmatch(_name(node.value)):
            pair = tuple(node.value.args[:2]) if _name(node.value) not in _OPPOSITE else ()
        else:
            continue
        if len(pair) == 2:
            sides.append(pair[_expected(*pair)])
    names = {side.id for side in sides if isinstance(side, ast.Name)} - {"self", "cls"}
    read = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return names - {node.id for node in read if not any(node is side for side in sides)}


def _parametrized(function: _Function, name: str) -> Iterator[ast.expr]:
    """The values that ``pytest.mark.parametrize`` gives to an argument, where all of them are literals."""
    for mark in function.decorator_list:
        if not isinstance(mark, ast.Call) or _name(mark) != "parametrize" or len(mark.args) < 2:
            continue
        try:
            names = ast.literal_eval(mark.args[0])
        except ValueError:
            continue
        names = [each.strip() for each in names.split(",")] if isinstance(names, str) else list(names)
        if name not in names or not isinstance(mark.args[1], ast.List | ast.Tuple):
            continue
        rows = [_row(each, len(names)) for each in mark.args[1].elts]
        if all(len(row) == len(names) and _literal(row[names.index(name)]) for row in rows):
            yield from (row[names.index(name)] for row in rows)


def _other(value: object, tag: str) -> object:
    """What the helper makes of a constant."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value + tag
    if isinstance(value, bytes):
        return value + tag.encode()
    if isinstance(value, int):
        return value + 1 + abs(value) // 2
    if isinstance(value, float):
        return value + 1.5 + abs(value) // 2
    return value + 1.5 if isinstance(value, complex) else 1234567


def _row(node: ast.expr, width: int) -> list[ast.expr]:
    if isinstance(node, ast.Call) and _name(node) == "param":
        return node.args
    return node.elts if width > 1 and isinstance(node, ast.Tuple | ast.List) else [node]


def _expected(left: ast.expr, right: ast.expr) -> int:
    """0 or 1: the side that is the expectation."""
    kinds: tuple[Callable[[ast.expr], bool], ...] = (_literal, _is_approx, lambda node: not _called(node))
    return next((side for good in kinds for side, node in ((1, right), (0, left)) if good(node)), 1)


def _literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _called(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call | ast.Await | ast.Yield) for each in ast.walk(node))


def _is_approx(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _name(node) == "approx"


def _is_bool(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


def _starred(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred | ast.GeneratorExp)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
