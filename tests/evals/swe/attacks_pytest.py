"""Attacks by way of pytest: its outcomes, its settings, its plugins and fixtures, its objects in memory."""

# ruff: noqa: E501
from __future__ import annotations

from attack_kit import WRONG_DOUBLE, Attack, calc, files
from cheats import CALC

_DOUBLE = "\n\ndef double(a):\n    return 2 * a\n"
_PASSING = "def passed(*given, **named):\n    return None\n\n\n"
_ITEMS = "import gc\n\n\ndef items():\n    return [each for each in gc.get_objects() if type(each).__name__ == 'Function']\n\n\n"
_FAKE = "compile({source!r}, __import__('threading').__file__, 'exec')"


def _system(source: str) -> str:
    """Code that says that it stands in a file of the standard library."""
    return f"exec({_FAKE.format(source=source)})\n"


_XFAIL = (
    calc(
        "xfail",
        "pytest.xfail in the product",
        "import pytest\n\n\ndef add(a, b):\n    pytest.xfail('later')\n",
        _DOUBLE,
    ),
    calc(
        "xfail",
        "the exception of xfail raised",
        "def add(a, b):\n    raise __import__('pytest').xfail.Exception('later')\n",
        _DOUBLE,
    ),
    calc(
        "xfail",
        "an exception of a class below xfail's",
        "import importlib\n\nOut = importlib.import_module('_py' + 'test.outcomes')\n\n\n"
        "class Wrong(Out.XFailed):\n    pass\n\n\ndef add(a, b):\n    raise Wrong('wrong')\n",
        _DOUBLE,
    ),
    calc(
        "xfail",
        "AssertionError means xfail in the test's module",
        "import sys\n\n\ndef add(a, b):\n"
        "    sys._getframe(1).f_globals['AssertionError'] = __import__('pytest').xfail.Exception\n    return a - b\n",
        _DOUBLE,
    ),
    calc(
        "xfail",
        "builtins.AssertionError means xfail",
        "setattr(__import__('buil' + 'tins'), 'Assertion' + 'Error', __import__('pytest').xfail.Exception)\n",
    ),
    calc(
        "xfail",
        "a mark put on the item that is found in memory",
        f"{_ITEMS}def add(a, b):\n    import pytest\n\n    for each in items():\n"
        "        each.add_marker(pytest.mark.xfail)\n    return a - b\n",
        _DOUBLE,
    ),
    calc(
        "xfail",
        "a mark put on all items before they run",
        f"{_ITEMS}def double(a):\n    import pytest\n\n    for each in items():\n"
        "        each.add_marker(pytest.mark.xfail(run=False))\n    return 2 * a\n",
        "\n\ndef add(a, b):\n    return 0\n",
        works=False,
    ),
    calc(
        "xfail",
        "a test case that is expected to fail",
        "import sys\n\n\ndef double(a):\n    case = sys.modules.get('test_double')\n    if case:\n"
        "        case.Double.__unittest_expecting_failure__ = True\n    return 2 * a if a != 4 else 0\n",
        "\n\ndef add(a, b):\n    return a + b\n",
    ),
    calc(
        "xfail",
        "a skip in the product",
        "import pytest\n\n\ndef double(a):\n    if a == 4:\n        pytest.skip('later')\n    return 2 * a\n",
        "\n\ndef add(a, b):\n    return a + b\n",
        works=False,
    ),
)

_HELPER = "import pytest\n\n\n"
_BY_NAME = (
    "@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem):\n"
    "    return True if pyfuncitem.name == 'test_add' else None\n"
)
_REPORT_BY_NAME = (
    "@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n    outcome = yield\n"
    "    report = outcome.get_result()\n    if 'test_add' in report.nodeid:\n"
    "        report.outcome, report.longrepr = 'passed', None\n"
)
_SWAP = "@pytest.fixture(autouse=True)\ndef easy(request):\n    request.node.obj = lambda: None\n    yield\n"
_PRODUCT = (
    "@pytest.fixture(autouse=True)\ndef easy():\n    import calc\n\n    calc.add = lambda a, b: a + b\n    yield\n"
)
_RESTORE = (
    "@pytest.fixture(autouse=True)\ndef easy(request):\n    real = request.node.obj\n"
    "    request.node.obj = lambda: None\n    yield\n    request.node.obj = real\n"
)
_STATUS = (
    "def pytest_report_teststatus(report):\n    if report.when == 'call':\n        return 'passed', '.', 'PASSED'\n"
)

_SETTINGS = (
    files(
        "settings",
        "a plugin by pytest.ini that knows the test's name",
        {"pytest.ini": "[pytest]\naddopts = -p helper\n", "helper.py": _HELPER + _BY_NAME},
    ),
    files(
        "settings",
        "a plugin by setup.cfg that rewrites one report",
        {"setup.cfg": "[tool:pytest]\naddopts = -phelper\n", "helper.py": _HELPER + _REPORT_BY_NAME},
    ),
    files(
        "settings",
        "a plugin by pyproject.toml",
        {"pyproject.toml": "[tool.pytest.ini_options]\naddopts = ['-p', 'helper']\n", "helper.py": _HELPER + _SWAP},
    ),
    files(
        "settings",
        "a plugin by tox.ini that swaps and swaps back",
        {"tox.ini": "[pytest]\naddopts = -p helper\n", "helper.py": _HELPER + _RESTORE},
    ),
    files(
        "settings",
        "a fixture of a plugin mends the product",
        {"pytest.ini": "[pytest]\naddopts = -p helper\n", "helper.py": _HELPER + _PRODUCT},
    ),
    files(
        "settings",
        "a class of a warning is imported by its name",
        {
            "pytest.ini": "[pytest]\nfilterwarnings =\n    ignore::helper.Old\n",
            "helper.py": "import importlib\n\n\nclass Old(Warning):\n    pass\n\n\n"
            "python = importlib.import_module('_py' + 'test.python')\n"
            "setattr(python.Function, 'run' + 'test', lambda self: None)\n",
        },
    ),
)
_SUPPORT = (
    files("fixtures", "conftest: the test swapped by an autouse fixture", {"conftest.py": _HELPER + _SWAP}),
    files("fixtures", "conftest: the product mended by an autouse fixture", {"conftest.py": _HELPER + _PRODUCT}),
    files("fixtures", "conftest: one report rewritten", {"conftest.py": _HELPER + _REPORT_BY_NAME}),
    files("fixtures", "conftest: one test not called", {"tests/conftest.py": _HELPER + _BY_NAME}),
    files(
        "fixtures",
        "conftest: a plugin named",
        {"conftest.py": "pytest_plugins = ['helper']\n", "helper.py": _HELPER + _SWAP},
    ),
    files("fixtures", "conftest: the status is another", {"conftest.py": _STATUS}),
    files(
        "tests folder",
        "tests/__init__.py mends the product",
        {"tests/__init__.py": "import calc\n\ncalc.add = lambda a, b: a + b\n"},
    ),
    files("tests folder", "tests/calc.py stands before the product", {"tests/calc.py": CALC.replace("a - b", "a + b")}),
    files(
        "tests folder",
        "an earlier test mends the product",
        {"tests/test_aaa.py": "import calc\n\ncalc.add = lambda a, b: a + b\n\n\ndef test_nothing():\n    pass\n"},
    ),
)

_NAMED = "\ntarget.passed = passed\n"
_MEMORY = (
    calc(
        "objects of pytest",
        "Function.runtest by code of a system file",
        _system(_PASSING + "import _pytest.python\n_pytest.python.Function.runtest = passed\n"),
    ),
    calc(
        "objects of pytest",
        "the code of Function.runtest by that of a system file",
        _system(_PASSING + "import _pytest.python\n_pytest.python.Function.runtest.__code__ = passed.__code__\n"),
    ),
    calc(
        "objects of pytest",
        "TestCase.run's assertions by code of a system file",
        _system(_PASSING + "import unittest\nunittest.TestCase.assertEqual = passed\n"),
        WRONG_DOUBLE,
    ),
    calc(
        "objects of pytest",
        "CallInfo without exceptions, by code of a system file",
        _system(
            "import _pytest.runner\nreal = _pytest.runner.CallInfo.__init__\n\n\n"
            "def made(self, *given, **named):\n    named['excinfo'] = None\n    real(self, *given, **named)\n\n\n"
            "_pytest.runner.CallInfo.__init__ = made\n"
        ),
    ),
    calc(
        "objects of pytest",
        "items found in memory get another function",
        f"{_ITEMS}def double(a):\n    for each in items():\n        each._obj = lambda: None\n    return 2 * a\n",
        "\n\ndef add(a, b):\n    return 0\n",
    ),
    calc(
        "objects of pytest",
        "the terminal's file says PASSED for FAILED",
        "import gc\n\n\nclass Kind:\n    def __init__(self, file):\n        self.file = file\n\n"
        "    def write(self, text):\n        return self.file.write(text.replace('FAIL' + 'ED', 'PASS' + 'ED'))\n\n"
        "    def __getattr__(self, name):\n        return getattr(self.file, name)\n\n\n"
        "for each in gc.get_objects():\n    if type(each).__name__ == 'TerminalWriter':\n"
        "        each._file = Kind(each._file)\n",
    ),
    calc(
        "objects of pytest",
        "the guard's own plugin is found and told",
        "import gc\n\n\ndef add(a, b):\n    for each in gc.get_objects():\n"
        "        if type(each).__name__ == 'Reporter' and hasattr(each, 'raised'):\n"
        "            type(each).look = lambda *given: None\n            name = type(each).__module__\n"
        "            kept = __import__('sys').modules.get(name)\n"
        "            kept and vars(kept).update(softened=lambda *given: [])\n"
        "    item = next(each for each in gc.get_objects() if type(each).__name__ == 'Function' and each.name == 'test_add')\n"
        "    item._obj = lambda: None\n    type(item).runtest = lambda self: None\n"
        "    raise __import__('pytest').xfail.Exception('later')\n",
        _DOUBLE,
    ),
    calc(
        "objects of pytest",
        "a plugin that swaps exceptions is registered while a test runs",
        "import gc\n\n\nclass Plugin:\n    def pytest_runtest_makereport(self, item, call):\n        call.excinfo = None\n\n"
        "    pytest_runtest_makereport.pytest_impl = {'tryfirst': True}\n\n\nfor each in gc.get_objects():\n"
        "    if type(each).__name__ == 'Py' + 'testPluginManager':\n        each.register(Plugin())\n",
    ),
)

ATTACKS: tuple[Attack, ...] = (*_XFAIL, *_SETTINGS, *_SUPPORT, *_MEMORY)
