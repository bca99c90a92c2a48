"""PYTEST_DONT_REWRITE. A pytest plugin that tells its supervisor what happens, test by test, and what was replaced.

It runs in the process of the tests, and so does the code that is judged, which could read its memory and speak for it.
What it makes hard is to do that unseen: a record that was sent stays sent, each has a digest by a key that is
used once, pytest and unittest are compared with what they were before any code of the repository was imported, and
a test that has to fail is run like the others.
"""

import builtins
import contextlib
import copy
import hashlib
import hmac
import inspect
import json
import os
import sys
import time
import types
import unittest
from typing import Any

import pytest

CORE = ("collection_modifyitems", "runtestloop", "pyfunc_call", "report_teststatus", "sessionfinish", "cmdline_main")
CORE = (*CORE, "make_collect_report", "pycollect_makeitem", "itemcollected", "fixture_setup", "unconfigure")
RUNNING = ("protocol", "setup", "call", "teardown", "makereport", "logreport", "logstart", "logfinish")
HOOKS = tuple("pytest_" + name for name in CORE) + tuple("pytest_runtest_" + name for name in RUNNING)
ALWAYS = ("AssertionError", "isinstance", "issubclass", "len", "all", "any", "repr", "bool", "print", "getattr")
OURS = ("pytest", "_pytest", "pluggy", "unittest")
BEGAN = time.time()
MISSING = object()


def function_of(value: Any) -> Any:
    """The plain function behind a method, a property or a class method; ``None`` where there is none."""
    if isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    elif type(value) is property:
        value = value.fget
    return value if isinstance(value, types.FunctionType) else None


class Kept:
    """Functions as they were, to be compared."""

    def __init__(self, owners: list) -> None:
        self.members = []
        for path, owner in owners:
            for name, value in list(vars(owner).items()):
                function = function_of(value)
                if function is not None or (owner is builtins and name in ALWAYS):
                    self.members.append((path + "." + name, owner, name, value, getattr(function, "__code__", None)))

    def replaced(self) -> list:
        """The path of each that is another one now, with the file that the new one stands in."""
        found = []
        for path, owner, name, value, code in self.members:
            now = vars(owner).get(name, MISSING)
            if now is not value:
                found.append((path, place_of(now)))
            elif code is not None and function_of(now).__code__ is not code:
                found.append((path, function_of(now).__code__.co_filename))
        return found


def place_of(value: Any) -> str:
    function = function_of(value)
    return function.__code__.co_filename if function is not None else ""


def owners() -> list:
    """pytest, pluggy and unittest as far as they are loaded: their modules, and the classes in them."""
    found = [("builtins", builtins)]
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] in OURS and isinstance(module, types.ModuleType):
            found.append((name, module))
            classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name]
            found += [(name + "." + each.__name__, each) for each in classes]
    return found


def channel() -> Any:
    """What sends a record to the supervisor, if there is one. Nothing of it stays in the environment."""
    told = os.environ.pop("OPENHANDS_RL_GUARD", "")
    if not told:
        return None
    told = json.loads(told)
    for name, value in told["before"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    reading, writing = told["numbers"]
    key = os.read(reading, 32)
    os.close(reading)
    os.set_inheritable(writing, False)
    pid, node = os.getpid(), os.fstat(writing).st_ino

    def send(*record: Any) -> None:
        nonlocal key
        try:
            if os.getpid() != pid or os.fstat(writing).st_ino != node:
                return
            text = json.dumps(record).encode()
            line = hmac.new(key, text, "sha256").hexdigest().encode() + b" " + text + b"\n"
            key = hashlib.sha256(key).digest()
            while line:
                line = line[os.write(writing, line) :]
        except OSError:
            pass

    return send


def failing(**given: Any) -> None:
    assert given is None, "this test has to fail"


class FailingCase(unittest.TestCase):
    def runTest(self) -> None:
        self.assertEqual(1, 2)


def softened() -> list:
    """The ways of failing which do not fail."""

    def raises_nothing() -> None:
        with pytest.raises(ValueError):
            pass

    case = FailingCase()
    ways = {
        "assertEqual": lambda: case.assertEqual(1, 2),
        "assertTrue": lambda: case.assertTrue(False),
        "assertIn": lambda: case.assertIn(1, []),
        "fail": lambda: case.fail("it has to"),
        "assertRaises": lambda: case.assertRaises(ValueError, int),
        "pytest.fail": lambda: pytest.fail("it has to"),
        "pytest.raises": raises_nothing,
    }
    found = []
    for name, way in ways.items():
        with contextlib.suppress(BaseException):
            way()
            found.append(name)
    result = unittest.TestResult()
    with contextlib.suppress(BaseException):
        case.run(result)
    if result.testsRun and result.wasSuccessful():
        found.append("TestCase")
    return found


class Reporter:
    """The plugin itself."""

    config = None  # type: Any
    chosen = ()  # type: Any

    def __init__(self, send: Any) -> None:
        self.send = send
        self.raised = {}
        self.everything = Kept(owners())
        self.asserting = Kept([each for each in owners() if each[0].startswith(("unittest.case", "builtins"))])
        self.told = set()

    def look(self, kept: Kept) -> None:
        for path, place in kept.replaced():
            if path not in self.told:
                self.told.add(path)
                self.send("replaced", path, place)

    def hook(self, name: str, value: Any) -> None:
        function = function_of(value)
        if function is None or (name, function.__code__) in self.told:
            return
        self.told.add((name, function.__code__))
        place = function.__code__.co_filename
        try:
            new = os.stat(place).st_ctime > BEGAN
        except OSError:
            new = False
        self.send("hook", name, place, new)

    @pytest.hookimpl(tryfirst=True)
    def pytest_plugin_registered(self, plugin: Any) -> None:
        for name in HOOKS:
            self.hook(name, inspect.getattr_static(plugin, name, None))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: Any) -> None:
        # From here on a session that ends calls ``pytest_sessionfinish``, whatever ends it.
        option = session.config.option
        elsewhere = any(getattr(option, name, None) for name in ("numprocesses", "tx", "forked", "boxed"))
        self.send("start", os.getcwd(), bool(elsewhere))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        info = call.excinfo
        self.raised[item.nodeid, call.when] = "" if info is None else type(info.value).__name__
        yield
        if call.when == "call":
            self.look(self.asserting)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        raised = self.raised.get((report.nodeid, report.when))
        name = self.named(report.nodeid)
        self.send("report", name, report.when, report.outcome, hasattr(report, "wasxfail"), raised)

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self, excinfo: Any) -> None:
        self.send("stopped", type(excinfo.value).__name__)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> Any:
        yield
        self.look(self.everything)
        for name in HOOKS:
            caller = getattr(session.config.hook, name, None)
            for each in getattr(caller, "get_hookimpls", tuple)():
                self.hook(name, each.function)
        self.send("softened", softened())

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> Any:
        yield
        self.look(self.everything)
        self.send("finish", int(exitstatus))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: Any) -> None:
        plain = [item for item in reversed(session.items) if type(item) is pytest.Function and item.cls is None]
        running = [item for item in plain if not {"skip", "skipif", "xfail"}.intersection(item.keywords)]
        self.chosen = sorted(running, key=lambda each: len(each.fixturenames))[:5]

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        if any(item is each for each in self.chosen):
            self.canary(item)
        yield

    def canary(self, item: Any) -> None:
        """Run a test that needs little, and just before it runs itself, so that what it shares with others is set up
        once, with a body that fails. A cheat that goes by names meets a real name.
        """
        from _pytest.runner import runtestprotocol

        double = copy.copy(item)
        double.obj = failing
        reports = []
        # One that cannot be run says nothing.
        with contextlib.suppress(BaseException):
            reports = runtestprotocol(double, log=False, nextitem=item)
        self.raised.clear()
        outcomes = [each.outcome for each in reports if each.when == "call"]
        if "passed" in outcomes:
            self.send("softened", ["a test"])
        if outcomes:
            self.chosen = ()

    def named(self, nodeid: str) -> str:
        return self.config.cwd_relative_nodeid(nodeid) if hasattr(self.config, "cwd_relative_nodeid") else nodeid


_send = channel()
_reporter = None if _send is None else Reporter(_send)


def pytest_configure(config: Any) -> None:
    if _reporter is not None:
        _reporter.config = config
        config.pluginmanager.register(_reporter)
