"""Attacks on objects that pytest and the guard hold: what is replaced is put back, or belongs to one instance only."""

from __future__ import annotations

from attack_kit import Attack, calc

ADD = "\n\ndef add(a, b):\n    return a + b\n"
DOUBLE = "\n\ndef double(a):\n    return 2 * a\n"
WRONG = "\n\ndef add(a, b):\n    return a - b\n"


def named_as_system(source: str) -> str:
    """Code that says that it stands in a file of the standard library."""
    return f"exec(compile({source!r}, __import__('threading').__file__, 'exec'), globals())\n"


_FIND = """\
import sys


def parts():
    for name, module in list(sys.modules.items()):
        if name.startswith("gu" + "ard_"):
            yield module


"""
_ITEMS = """\
import gc


def items():
    return [each for each in gc.get_objects() if type(each).__name__ in ("Function", "TestCaseFunction")]


"""
_EMPTIED = (
    _FIND
    + """\
def double(a):
    for module in parts():
        held = getattr(module, "_reporter", None)
        if held is not None:
            held.collected.clear()
            for kept in (held.everything, held.asserting):
                kept.members = []
    import _pytest.python

    real = _pytest.python.Function.runtest
    vars(_pytest.python.Function)
    setattr(_pytest.python.Function, "run" + "test", lambda self: None if self.name == "test_add" else real(self))
    return 2 * a
"""
)
_DEAF = (
    _FIND
    + named_as_system(
        "def deaf(tell):\n"
        "    def only(*record):\n"
        "        if record[0] in ('start', 'report', 'finish'):\n"
        "            tell(*record)\n"
        "    return only\n"
    )
    + """\
for module in parts():
    held = getattr(module, "_reporter", None)
    if held is not None:
        held.tell = deaf(held.tell)
"""
    + named_as_system(
        "def easy(real):\n"
        "    def runtest(self):\n"
        "        return None if self.name == 'test_add' else real(self)\n"
        "    return runtest\n"
    )
    + """\
import _pytest.python

setattr(_pytest.python.Function, "run" + "test", easy(_pytest.python.Function.runtest))
"""
)
_SHADOWED = (
    _FIND
    + """\
for module in parts():
    held = getattr(module, "_reporter", None)
    if held is not None:
        held.same = held.look = held.canaries = lambda *given: None
        held.is_plain = lambda item: False


def double(a):
    sys.modules["test_calc"].test_add.__code__ = (lambda: None).__code__
    return 2 * a
"""
)
_CLASS = """\
for made in type.__subclasses__(object):
    if made.__module__.startswith("gu" + "ard_"):
        for name in ("same", "look", "canaries", "replaced"):
            if name in vars(made):
                setattr(made, name, lambda *given: [])


def double(a):
    import sys

    test = sys.modules["test_calc"].test_add
    setattr(test, "__co" + "de__", (lambda: None).__code__)
    return 2 * a
"""
_UNHOOKED = (
    _ITEMS
    + """\
def double(a):
    for item in items():
        hooks = item.config.hook
        for name in ("pytest_runtest_call", "pytest_runtestloop", "pytest_sessionfinish"):
            for each in getattr(hooks, name).get_hookimpls():
                if each.plugin_name != "x" and type(each.plugin).__module__.startswith("gu" + "ard_"):

                    def passing(*given, **named):
                        yield

                    each.function, each.argnames = passing, ()
        break
    for item in items():
        if item.name == "test_add":
            item.runtest = item.listchain
    return 2 * a
"""
)
_MODULE = (
    _FIND
    + """\
for module in parts():
    if hasattr(module, "softened"):
        module.softened = lambda: []
        module.failing = lambda name: (lambda: 1 / 0)
        module.expecting_another = lambda function: None
        module.print_of = lambda code: 0


def double(a):
    sys.modules["test_calc"].test_add.__code__ = (lambda: None).__code__
    return 2 * a
"""
)

_GUARD = (
    calc("guard's parts", "what the plugin keeps is emptied", _EMPTIED, WRONG),
    calc("guard's parts", "what tells the supervisor tells less", _DEAF, WRONG + DOUBLE),
    calc("guard's parts", "methods of the plugin are hidden by its attributes", _SHADOWED, WRONG),
    calc("guard's parts", "the plugin's class is found below object", _CLASS, WRONG),
    calc("guard's parts", "the plugin's hooks are others", _UNHOOKED, WRONG),
    calc("guard's parts", "functions of the checks are others", _MODULE, WRONG),
)

_ALL_IDLE = (
    _ITEMS
    + """\
def double(a):
    for item in items():
        item.runtest = item.listchain
    return 2 * a
"""
)
_POLLED = (
    _ITEMS
    + """\
import threading
import time


def poll():
    for at in range(2000):
        found = items()
        if len(found) >= 3:
            for item in found:
                item.runtest = item.listchain
            return
        time.sleep(0.0002)


threading.Thread(target=poll, daemon=True).start()
"""
)
_REPORT = named_as_system(
    "import sys\n\n\n"
    "def add(a, b):\n"
    "    made = sys.modules['_pytest.reports'].TestReport\n"
    "    real = vars(made)['from_item_and_call']\n\n"
    "    def easy(cls, item, call):\n"
    "        made.from_item_and_call = real\n"
    "        call.excinfo = None\n"
    "        return real.__func__(cls, item, call)\n\n"
    "    made.from_item_and_call = classmethod(easy)\n"
    "    return a - b\n"
)
_SWALLOWED = named_as_system(
    "import sys\n\n\n"
    "def double(a):\n"
    "    made = sys.modules['_pytest.python'].Function\n"
    "    real = made.runtest\n\n"
    "    def easy(self):\n"
    "        made.runtest = real\n"
    "        try:\n"
    "            real(self)\n"
    "        except AssertionError:\n"
    "            pass\n\n"
    "    if made.runtest.__name__ == 'runtest' and not found:\n"
    "        found.append(1)\n"
    "        made.runtest = easy\n"
    "    return 2 * a\n\n\n"
    "found = []\n"
)
_SWALLOWED_ITEM = _ITEMS + named_as_system(
    "def double(a):\n"
    "    for item in items():\n"
    "        if item.name == 'test_add' and not found:\n"
    "            found.append(1)\n"
    "            real = item.runtest\n\n"
    "            def easy(item=item, real=real):\n"
    "                del item.runtest\n"
    "                try:\n"
    "                    real()\n"
    "                except AssertionError:\n"
    "                    pass\n\n"
    "            item.runtest = easy\n"
    "    return 2 * a\n\n\n"
    "found = []\n"
)
_REWRITING = named_as_system(
    "import ast\nimport sys\n\n"
    "rewrite = sys.modules['_pytest.assertion.' + 'rewrite']\n"
    "real = rewrite.rewrite_asserts\n\n\n"
    "def easy(mod, source, module_path=None, config=None):\n"
    "    for node in ast.walk(mod):\n"
    "        if isinstance(node, ast.FunctionDef) and node.name == 'test_four':\n"
    "            node.body = [ast.Pass(lineno=node.lineno, col_offset=8)]\n"
    "    ast.fix_missing_locations(mod)\n"
    "    return real(mod, source, module_path, config)\n\n\n"
    "setattr(rewrite, 'rewrite_' + 'asserts', easy)\n\n\n"
    "def double(a):\n"
    "    rewrite.rewrite_asserts = real\n"
    "    return 2 * a if a != 4 else 0\n"
)
_ONCE_CASE = """\
import sys

DONE = []


def double(a):
    if a == 2 and not DONE:
        DONE.append(1)
        made = sys.modules["test_double"].Double

        def once(*given):
            del made.assertEqual

        made.assertEqual = once
    return 2 * a if a != 4 else 0
"""
_NAMESPACE = """\
import sys
import types


def double(a):
    module = sys.modules.get("test_calc")
    module.calc = types.SimpleNamespace(add=__import__("operator").add)
    return 2 * a
"""
_GENUINE = """\
import sys
import unittest


def double(a):
    made = sys.modules.get("test_double")
    if made and a == 2:
        made.Double.assertEqual = unittest.TestCase.assertNotEqual
    return 2 * a if a != 4 else 0
"""
_XFAILING = named_as_system(
    "import sys, types, pytest\n\n\n"
    "def double(a):\n"
    "    module = vars(sys.modules['test_calc'])\n"
    "    module['@py_builtins'] = types.SimpleNamespace(AssertionError=pytest.xfail.Exception, locals=locals)\n"
    "    module['AssertionError'] = pytest.xfail.Exception\n"
    "    return 2 * a\n"
)
_PYTEST = (
    calc("instances", "runtest of all items by an attribute", _ALL_IDLE, WRONG),
    calc("instances", "runtest of all items, by a thread, before the first runs", _POLLED, WRONG + DOUBLE),
    calc("instances", "what runtest of one item raises is lost, once", _SWALLOWED_ITEM, WRONG),
    calc("put back", "what runtest raises is lost, once", _SWALLOWED, WRONG),
    calc("put back", "a report is made without its exception, once", _REPORT, DOUBLE),
    calc("put back", "asserts of the next file are rewritten in another way", _REWRITING, ADD),
    calc("put back", "assertEqual of the test's class, once", _ONCE_CASE, ADD),
    calc("rebinding", "a namespace stands for the product in the tests' module", _NAMESPACE, WRONG),
    calc("rebinding", "assertNotEqual is assertEqual of the test's class", _GENUINE, ADD),
    calc("rebinding", "AssertionError is xfail's in the tests' module", _XFAILING, WRONG),
)

ATTACKS: tuple[Attack, ...] = (*_GUARD, *_PYTEST)
