"""PYTEST_DONT_REWRITE. Tests that have to fail, run after all others: a test whose result is as wanted whatever it
expects is none.

Nothing is imported here that pytest has not imported before, as in ``checks``.
"""

import ast
import contextlib
import importlib
import inspect
import linecache
import os
import pathlib
import random
import signal
import string
import sys
import threading
import types
from typing import Any

import pytest

checks = importlib.import_module(__name__.replace("_canaries", "_checks"))  # type: Any

MOST = 6
LONGEST = 0.5
_compile = compile  # type: Any
_open, _write, _close, _stat, _utime = os.open, os.write, os.close, os.stat, os.utime
_random = random.SystemRandom()


def softened() -> list:
    """The ways of failing which do not fail; those of unittest where tests have imported it."""

    def raises_nothing() -> None:
        with pytest.raises(ValueError):
            pass

    ways = {"pytest.fail": lambda: pytest.fail("it has to"), "pytest.raises": raises_nothing}  # type: Any
    unittest = sys.modules.get("unittest")  # type: Any
    made = getattr(unittest, "TestCase", None)  # type: Any
    case = made("run") if isinstance(made, type) else None  # type: Any
    if case is not None:
        ways["assertEqual"] = lambda: case.assertEqual(1, 2)
        ways["assertTrue"] = lambda: case.assertTrue(False)
        ways["assertIn"] = lambda: case.assertIn(1, [])
        ways["fail"] = lambda: case.fail("it has to")
        ways["assertRaises"] = lambda: case.assertRaises(ValueError, int)
    found = []
    for name, way in ways.items():
        with contextlib.suppress(BaseException):
            way()
            found.append(name)
    if case is not None:
        with contextlib.suppress(BaseException):
            failing_case = type("FailingCase", (made,), {"runTest": lambda self: self.assertEqual(1, 2)})()
            result = failing_case.defaultTestResult()
            failing_case.run(result)
            if result.testsRun and result.wasSuccessful():
                found.append("TestCase")
    return found


def word() -> str:
    return "test_" + "".join(_random.choice(string.ascii_lowercase) for _ in range(12))


@contextlib.contextmanager
def limited(seconds: float) -> Any:
    """Raise after that time, where a signal can."""

    def late(number: int, frame: Any) -> None:
        raise TimeoutError

    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def equal_to_anything(inside: Any) -> list:
    """Classes of the repository whose objects say that they equal whatever they are compared with: name, code, and
    whether no other value can have a part in it.
    """
    found = []
    seen = set()  # type: Any
    waiting = list(type.__subclasses__(object))
    while waiting:
        made = waiting.pop()
        if made in seen:
            continue
        seen.add(made)
        waiting += type.__subclasses__(made) if made is not type else []
        function = checks.function_of(vars(made).get("__eq__"))
        if function is None or not inside(function.__code__.co_filename):
            continue
        with contextlib.suppress(BaseException), limited(0.5):
            thing = made.__new__(made)
            small = _random.sample(range(-99, 100), 3)
            others = (checks.MISSING, word(), 10**9 + 7, (checks.MISSING,), *small)
            equal = [function(thing, other) is True for other in others]
            if any(equal[:4]) or sum(equal) > 1:
                code = function.__code__
                found.append((made.__qualname__, code, not all(equal) or not code.co_names))
    return found


def failing(name: str) -> Any:
    """A test that fails, with a name."""
    left, right = _random.sample(range(10**6), 2)
    text = "def " + name + "():\n    assert " + str(left) + " == " + str(right) + "\n"
    made = _compile(text, "<test>", "exec")
    code = next(each for each in made.co_consts if isinstance(each, types.CodeType))
    return types.FunctionType(code, {"__builtins__": checks.builtins}, name)


def another(value: Any) -> Any:
    """Another value of the same kind, and near: what equals small numbers only has to equal it too."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + _random.randint(1, 9)
    return word().encode() if isinstance(value, bytes) else word()


class Expecting(ast.NodeVisitor):
    """Puts another value in the place of what a test expects. ``places``: where in the text it stands, and the new."""

    def __init__(self) -> None:
        self.places = []  # type: Any
        self.changed = 0

    def change(self, node: Any) -> None:
        name = node._fields[0]  # before Python 3.8 "n", "s" or "value"
        new = another(getattr(node, name))
        setattr(node, name, new)
        self.changed += 1
        if getattr(node, "end_lineno", None) == node.lineno:
            self.places.append((node.lineno, node.col_offset, node.end_col_offset, repr(new).encode()))

    def literal(self, node: Any) -> Any:
        """The first constant that a display of constants begins with; ``None`` for other expressions."""
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return next((self.literal(each) for each in node.elts), None)
        if isinstance(node, ast.Dict):
            return next((self.literal(each) for each in node.values), None)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
            return self.literal(node.operand)
        return node if type(node).__name__ in ("Constant", "Num", "Str", "Bytes", "NameConstant") else None

    def expected(self, sides: list) -> Any:
        """Change a constant among the sides of a comparison; what else stands for the last of them, where none is."""
        for each in reversed(sides):
            found = self.literal(each)
            if found is not None:
                self.change(found)
                return each
        old, text = sides[-1], word()
        if getattr(old, "end_lineno", None) == old.lineno:
            self.places.append((old.lineno, old.col_offset, old.end_col_offset, repr(text).encode()))
        self.changed += 1
        return ast.copy_location(ast.Str(text) if sys.version_info < (3, 8) else ast.Constant(text), old)

    def visit_Assert(self, node: Any) -> Any:
        test = node.test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
            new = self.expected([test.left, test.comparators[0]])
            if new is not test.left:
                test.comparators[0] = new

    def visit_Call(self, node: Any) -> Any:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "assertEqual" and len(node.args) >= 2:
            new = self.expected(node.args[:2])
            if new is not node.args[0]:
                node.args[1] = new


def expecting_another(function: Any) -> Any:
    """The test with other values expected, and its file with the same change; ``None`` where it compares nothing at
    its own level.
    """
    code = function.__code__
    if code.co_freevars or function.__closure__:
        return None
    text = checks.read(code.co_filename)
    tree = _compile(text, code.co_filename, "exec", ast.PyCF_ONLY_AST, True)  # type: Any
    bodies = [tree.body] + [each.body for each in tree.body if isinstance(each, ast.ClassDef)]
    for node in [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]:
        first = min([node.lineno] + [each.lineno for each in node.decorator_list])
        if node.name != code.co_name or first != code.co_firstlineno or node.decorator_list:
            continue
        change = Expecting()
        change.visit(node)
        if not change.changed:
            return None
        tree.body, node.lineno = [node], node.lineno
        made = _compile(ast.fix_missing_locations(tree), code.co_filename, "exec", dont_inherit=True)
        inner = [each for each in made.co_consts if isinstance(each, types.CodeType) and each.co_name == code.co_name]
        function = types.FunctionType(inner[0], function.__globals__, function.__name__, function.__defaults__)
        return function, written(text, change.places)
    return None


def written(text: bytes, places: list) -> bytes:
    lines = text.splitlines(keepends=True)
    for line, begin, end, new in sorted(places, reverse=True):
        lines[line - 1] = lines[line - 1][:begin] + new + lines[line - 1][end:]
    return b"".join(lines)


@contextlib.contextmanager
def standing(file: str, text: bytes) -> Any:
    """For that time the file holds the text: what reads there what a test expects shall read the other value."""
    kept, told = checks.read(file), _stat(file)
    try:
        # A file that cannot be written keeps what it says; the test's code expects another value all the same.
        with contextlib.suppress(OSError):
            put(file, text)
        yield
    finally:
        with contextlib.suppress(OSError):
            put(file, kept)
            _utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))


def put(file: str, text: bytes) -> None:
    number = _open(file, os.O_WRONLY | os.O_TRUNC)
    try:
        while text:
            text = text[_write(number, text) :]
    finally:
        _close(number)
    linecache.cache.pop(file, None)


@contextlib.contextmanager
def named(owner: Any, name: str, value: Any) -> Any:
    """For that time the name stands for another test there."""
    kept = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


class Canaries:
    """Of one session. ``collected``: its tests as they were; ``took``: the seconds of each."""

    def __init__(self, session: Any, collected: Any, took: Any, plain: Any, tell: Any) -> None:
        self.session, self.collected, self.took, self.plain, self.tell = session, collected, took, plain, tell

    def run(self, cases_of: Any) -> None:
        """Each on an item of its own and without a fixture: one with a random name, one with the name of a real test,
        and real tests that expect other values.
        """
        real = [each for each in self.session.items if each in self.collected]
        names = [(word(), None)] + [(each.name, each) for each in real[-1:]]
        for name, like in names:
            self.fails(name, like, failing(word()), "a test")
        self.functions()
        self.cases(cases_of)

    def functions(self) -> None:
        done = 0
        for item in self.plain:
            function = checks.function_of(item.obj)
            if done == MOST or self.took.get(item, 0) > LONGEST or function is None or item.cls is not None:
                continue
            if self.collected[item].code is not function.__code__:
                continue
            with contextlib.suppress(Exception):
                other = expecting_another(function)
                if other is not None:
                    done += 1
                    with standing(function.__code__.co_filename, other[1]), named(item.module, item.name, other[0]):
                        self.fails(item.name, item, other[0], "another value expected by " + item.name)

    def cases(self, cases_of: Any) -> None:
        """The same for a few test cases of unittest that set nothing up for their class."""
        done = 0
        for item in self.took:
            made = item.cls
            if done == MOST or not cases_of(item) or self.took[item] > LONGEST:
                continue
            if any(name in each.__dict__ for each in made.__mro__[:-2] for name in ("setUpClass", "setUp", "run")):
                continue
            with contextlib.suppress(Exception):
                function = checks.function_of(inspect.getattr_static(made, item.name))
                other = expecting_another(function)
                if other is None or function.__code__ is not self.collected[item].code:
                    continue
                done += 1
                case = made(item.name)
                result = case.defaultTestResult()
                setattr(case, item.name, types.MethodType(other[0], case))
                with standing(function.__code__.co_filename, other[1]), contextlib.suppress(BaseException), limited(5):
                    case.run(result)
                    if result.testsRun and result.wasSuccessful() and not result.skipped:
                        self.tell("softened", ["another value expected by " + item.name])

    def fails(self, name: str, like: Any, function: Any, said: str) -> None:
        from _pytest.runner import runtestprotocol

        reports = []  # type: Any
        # One that cannot be run says nothing.
        with contextlib.suppress(BaseException), limited(5.0):
            item = self.item(name, like, function)
            reports = runtestprotocol(item, log=False, nextitem=None)
        called = [each.outcome for each in reports if each.when == "call"]
        if "passed" in called or any(hasattr(each, "wasxfail") for each in reports):
            self.tell("softened", [said])

    def item(self, name: str, like: Any, function: Any) -> Any:
        """A test of a module of its own, which looks like another's."""
        session = self.session
        path = str(like.fspath) if like is not None else os.path.join(str(session.fspath), word() + ".py")
        module = types.ModuleType(os.path.basename(path)[:-3])
        node = self.module(session, path)
        node._obj = module
        if like is not None:
            node._nodeid = like.nodeid.split("::")[0]
        setattr(module, name.split("[")[0], function)
        info = self.fixtureinfo()
        if hasattr(pytest.Function, "from_parent"):
            return pytest.Function.from_parent(node, name=name, callobj=function, fixtureinfo=info)
        return pytest.Function(name, node, callobj=function, fixtureinfo=info)

    def module(self, session: Any, path: str) -> Any:
        like = type(session.fspath)
        if not hasattr(pytest.Module, "from_parent"):
            return pytest.Module(like(path), session)
        from_parent = pytest.Module.from_parent  # type: Any
        try:
            return from_parent(session, path=pathlib.Path(path))
        except TypeError:
            return from_parent(session, fspath=like(path))

    def fixtureinfo(self) -> Any:
        """What says that a test uses no fixture, not even those that all use."""
        from _pytest.fixtures import FuncFixtureInfo

        empty = {"argnames": (), "initialnames": (), "names_closure": [], "name2fixturedefs": {}}  # type: Any
        try:
            return FuncFixtureInfo(**empty)
        except TypeError:
            del empty["initialnames"]
            return FuncFixtureInfo(**empty)
