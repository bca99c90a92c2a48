"""PYTEST_DONT_REWRITE. A pytest plugin that tells its supervisor what happens, test by test, and what was replaced.

It runs in the process of the tests, and so does the code that is judged, which could change it in memory. What it makes
hard is to do that unseen: what was told stays told, the channel's key is not here (see ``startup``), and what happened
is looked at from several sides. pytest and unittest are compared with what they were before any code of the repository
was imported, a test's code with its file and with itself after its call; at the end tests that have to fail are run.
"""

import collections
import contextlib
import gc
import importlib
import inspect
import os
import sys
import time
import types
from typing import Any

import pytest

checks = importlib.import_module(__name__ + "_checks")  # type: Any
canaries = importlib.import_module(__name__ + "_canaries")  # type: Any

CORE = ("collection_modifyitems", "runtestloop", "pyfunc_call", "report_teststatus", "sessionfinish", "cmdline_main")
CORE = (*CORE, "make_collect_report", "pycollect_makeitem", "itemcollected", "fixture_setup", "unconfigure")
RUNNERS = ("_pytest.python", "_pytest.runner", "_pytest.unittest", "_pytest.outcomes", "_pytest.reports", "pluggy")
RUNNING = ("protocol", "setup", "call", "teardown", "makereport", "logreport", "logstart", "logfinish")
HOOKS = tuple("pytest_" + name for name in CORE) + tuple("pytest_runtest_" + name for name in RUNNING)
BEGAN = time.time()
PARTS = (__name__, checks.__name__, canaries.__name__)
ROOT = "/testbed/"


def inside(file: str) -> bool:
    """Whether a file belongs to the repository, or is none: code that was made from text."""
    if not file.startswith("/"):
        return True
    return (file.startswith(ROOT) and "/site-packages/" not in file) or not os.path.exists(file)


Collected = collections.namedtuple("Collected", "code print wrappers")
"""A test as it was collected. ``code``: that of its function in its module's file; ``wrappers``: of what wraps it."""


def codes_of(item: Any) -> list:
    """The code of a test, of unittest's, too; before it those of what wraps it."""
    value = checks.function_of(getattr(item, "obj", None))
    found = [getattr(value, "__code__", None)]
    for _ in range(20):
        inner = getattr(value, "__wrapped__", None)
        if inner is None:
            break
        value = checks.function_of(inner)
        found.append(getattr(value, "__code__", None))
    return found


def code_of(item: Any) -> Any:
    """The code of a test, behind what wraps it."""
    return codes_of(item)[-1]


def collected(item: Any) -> Any:
    codes = codes_of(item)
    return Collected(codes[-1], None if codes[-1] is None else checks.print_of(codes[-1]), tuple(codes[:-1]))


class Reporter:
    """The plugin itself."""

    config = None  # type: Any
    sources = None  # type: Any

    def __init__(self, tell: Any) -> None:
        self.tell = tell
        self.raised = {}  # type: Any
        self.everything = checks.Kept(checks.owners(*PARTS))
        self.asserting = checks.Kept(checks.owners()[:1], checks.ALWAYS)
        self.running = checks.Kept([each for each in checks.owners() if each[0].startswith(RUNNERS)])
        self.library = checks.KeptLibrary()
        self.modules = {}  # type: Any
        self.collected = {}  # type: Any
        self.plain = ()  # type: Any
        self.expected = set()  # type: Any
        self.took = {}  # type: Any
        self.told = set()  # type: Any

    def look(self, replaced: Any, kind: str) -> None:
        for path, code in replaced:
            self.tell(kind, path, *self.whose(code))

    def whose(self, code: Any) -> Any:
        """The file of a code, and whether it stands there; ``None`` where that cannot be said."""
        if code is None:
            return "", None
        with contextlib.suppress(Exception):
            return code.co_filename, self.sources.has(code)
        return code.co_filename, None

    def hook(self, name: str, value: Any) -> None:
        function = checks.function_of(value)
        if function is None or (name, function.__code__) in self.told:
            return
        self.told.add((name, function.__code__))
        place = function.__code__.co_filename
        try:
            new = os.stat(place).st_ctime > BEGAN
        except OSError:
            new = False
        self.tell("hook", name, place, new, function.__code__.co_firstlineno)

    @pytest.hookimpl(tryfirst=True)
    def pytest_plugin_registered(self, plugin: Any) -> None:
        for name in HOOKS:
            self.hook(name, inspect.getattr_static(plugin, name, None))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: Any) -> None:
        # From here on a session that ends calls ``pytest_sessionfinish``, whatever ends it.
        option = session.config.option
        elsewhere = any(getattr(option, name, None) for name in ("numprocesses", "tx", "forked", "boxed"))
        self.tell("start", os.getcwd(), bool(elsewhere))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: Any) -> None:
        # What compiles and rewrites has to be what it was.
        self.look(self.everything.replaced(), "replaced")
        unlike = []
        for item in session.items:
            function = isinstance(item, pytest.Function)
            if function:
                known = self.collected[item] = collected(item)
                file = str(item.fspath)
                code = known.code
                if code is not None and code.co_filename != file:
                    self.tell("foreign", self.named(item.nodeid), *self.whose(code), code.co_firstlineno)
                    if self.is_other(item, file, code):
                        unlike.append(self.named(item.nodeid))
                elif code is not None and self.sources.has(code) is False:
                    unlike.append(self.named(item.nodeid))
            self.mark(item)
        for nodeid in unlike:
            self.tell("unlike", nodeid)
        self.library.replaced()
        for base in {base for item in self.collected for base in self.cases_of(item)}:
            self.library.keep(base.__module__, base, [(base.__module__ + "." + base.__name__, base)])
        found = {getattr(item, "module", None) for item in self.collected}
        kept = [each for each in found if isinstance(each, types.ModuleType)]  # type: Any
        kept += [made for each in kept for made in self.classes(each)]
        self.modules = {id(each): (each, checks.names_of(each)) for each in kept}
        self.plain = tuple(each for each in self.collected if self.is_plain(each))
        self.tell("kept", self, session.config.pluginmanager)

    def is_other(self, item: Any, file: str, code: Any) -> bool:
        """Whether a test's own file defines it, as it is, and the code stands in no file."""
        case = getattr(getattr(item, "cls", None), "__name__", "")
        written = self.sources.defines(file, case, item.name.split("[")[0])
        return written and self.sources.has(code) is not True

    def is_plain(self, item: Any) -> bool:
        """Whether a test needs nothing of the repository's fixtures: it can be run again without them."""
        known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", None)
        code = self.collected[item].code
        if known is None or code is None or code.co_argcount or code.co_kwonlyargcount:
            return False
        places = [checks.place_of(each.func) for found in known.values() for each in found]
        return not any(name.startswith("_xunit") for name in known) and not any(map(inside, places))

    def cases_of(self, item: Any) -> list:
        """unittest's own classes that a test's class is made of."""
        return [each for each in getattr(getattr(item, "cls", None), "__mro__", ()) if each.__module__ == checks.CASES]

    def classes(self, module: Any) -> list:
        return [made for made in vars(module).values() if isinstance(made, type) and made.__module__ == module.__name__]

    def mark(self, item: Any) -> None:
        """Tell where a test is said to be expected to fail."""
        case = getattr(item, "cls", None)
        unexpected = "__unittest_expecting_failure__"
        made = getattr(checks.function_of(getattr(item, "obj", None)), unexpected, False) or getattr(
            case, unexpected, False
        )
        if "xfail" not in item.keywords and not made:
            return
        self.expected.add(item.nodeid)
        self.tell("expected", self.named(item.nodeid), self.naming(item, made))

    def naming(self, item: Any, made: bool = False) -> list:
        """The files that could have said so: a test's own, and plugins, which name the mark."""
        word = b"expectedfailure" if made else b"xfail"
        plugins = [getattr(each, "__file__", None) for each in self.config.pluginmanager.get_plugins()]
        files = {str(item.fspath), *(each for each in plugins if each and inside(each))}
        return sorted(each for each in files if checks.names_in_file(each, word))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        known = self.collected.get(item)
        if known is None or known.code is None:
            yield
            return
        self.same(item, known)
        self.before(item)
        began, before, ran = time.time(), sys.getprofile(), []

        def seen(frame: Any, event: str, arg: Any) -> None:
            if frame.f_code is known.code or frame.f_code in known.wrappers:
                ran.append(1)
                sys.setprofile(None)

        if before is None:
            sys.setprofile(seen)
        yield
        if sys.getprofile() is seen:
            sys.setprofile(None)
        self.took[item] = time.time() - began
        if before is None and not ran:
            self.tell("idle", self.named(item.nodeid))
        self.same(item, known)

    def before(self, item: Any) -> None:
        """Tell of what is another before a test's call, also where it is put back meanwhile."""
        self.look([(path, checks.code_of(now)) for path, now in self.running.others()], "replaced")
        for name in ("runtest", "setup", "teardown", "ihook", "_testcase"):
            if name in vars(item) and checks.function_of(vars(item)[name]) is not None:
                self.tell("swapped", self.named(item.nodeid), *self.whose(checks.code_of(vars(item)[name])))
        self.rebound([getattr(item, "module", None), item.cls])
        base = (self.cases_of(item) or [None])[0]
        for name, value in list(vars(item.cls).items()) if base is not None else ():
            new = name not in self.modules.get(id(item.cls), ("", (name,)))[1]
            if new and hasattr(base, name) and checks.function_of(value) is not None:
                self.tell("rebound", item.cls.__name__ + "." + name, checks.place_of(value))

    def rebound(self, owners: list) -> None:
        for owner, names in [self.modules[id(each)] for each in owners if id(each) in self.modules]:
            for name, place in checks.rebound(owner, names):
                self.tell("rebound", owner.__name__ + "." + name, place)

    def same(self, item: Any, known: Any) -> None:
        """Tell of a test whose function or code is not the collected one."""
        place = str(item.fspath)
        if not place.endswith(item.nodeid.split("::")[0]):
            self.tell("named", self.named(item.nodeid), place)
        now = code_of(item)
        if now is not known.code:
            self.tell("swapped", self.named(item.nodeid), *self.whose(now))
        elif checks.print_of(now) != known.print:
            self.tell("altered", self.named(item.nodeid))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        info = call.excinfo
        self.raised[item.nodeid, call.when] = "" if info is None else type(info.value).__name__
        outcome = yield
        if call.when == "call":
            self.look(self.asserting.replaced() + self.library.replaced([checks.CASES]), "replaced meanwhile")
        with contextlib.suppress(Exception):
            if hasattr(outcome.get_result(), "wasxfail") and item.nodeid not in self.expected:
                self.unexpected(item, info)

    def unexpected(self, item: Any, info: Any) -> None:
        """Tell how a test came to be expected to fail that was not so when it was collected."""
        name = self.named(item.nodeid)
        codes = [] if info is None else [each.frame.code.raw for each in info.traceback]
        if info is None or type(info.value).__name__ != "XFailed" or len(codes) < 2:
            fixtures = [checks.function_of(each[-1].func) for each in item._fixtureinfo.name2fixturedefs.values()]
            near = [self.collected[item].code, *(each.__code__ for each in fixtures if each is not None)]
            files = [each.co_filename for each in near if each is not None and checks.names_in(each, "xfail")]
            self.tell("xfailed", name, (bool(files) and "conftest") or "", files)
            return
        caller, last = codes[-2], codes[-1]
        there = last.co_filename.endswith("outcomes.py") and last.co_name in ("xfail", "__call__")
        said = there and self.sources.has(last) is not False and checks.names_in(caller, "xfail")
        own = said and self.sources.has(caller) is True
        self.tell(
            "xfailed", name, "call" if own else "", [each.co_filename for each in codes if inside(each.co_filename)]
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: Any) -> None:
        raised = self.raised.get((report.nodeid, report.when))
        name = self.named(report.nodeid)
        why = ""
        if report.outcome == "failed":
            why = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))[:200]
        self.tell("report", name, report.when, report.outcome, hasattr(report, "wasxfail"), raised, why)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", None)
            lines = [each for each in str(crash or report.longrepr).splitlines() if each.strip()]
            self.tell("uncollected", self.named(report.nodeid), (lines or [""])[0 if crash else -1][:200])

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self, excinfo: Any) -> None:
        self.tell("stopped", type(excinfo.value).__name__)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> Any:
        yield
        self.look(self.everything.replaced() + self.library.replaced(), "replaced")
        self.rebound([owner for owner, _ in self.modules.values()])
        for name in HOOKS:
            caller = getattr(session.config.hook, name, None)
            for each in getattr(caller, "get_hookimpls", tuple)():
                self.hook(name, each.function)
        if hasattr(gc, "get_freeze_count") and hasattr(sys, "addaudithook") and not gc.get_freeze_count():
            self.tell("thawed")
        self.tell("softened", canaries.softened())
        if getattr(session, "items", None) and not session.config.option.collectonly:
            canaries.Canaries(session, self.collected, self.took, self.plain, self.tell).run(self.cases_of)
        for name, code, constant in canaries.equal_to_anything(inside):
            self.tell("equal", name, code.co_filename, code.co_firstlineno, constant)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> Any:
        yield
        self.look(self.everything.replaced() + self.library.replaced(), "replaced")
        self.tell("finish", int(exitstatus))

    def named(self, nodeid: str) -> str:
        return self.config.cwd_relative_nodeid(nodeid) if hasattr(self.config, "cwd_relative_nodeid") else nodeid


if str(getattr(sys.modules.get("sitecustomize"), "__file__", "")).startswith("/guard/"):
    del sys.modules["sitecustomize"]
_given = sys.modules.pop(__name__ + "_tell", None)  # type: Any
_tell, _put_back = _given or (None, lambda: None)
_put_back()
_reporter = None if _tell is None else Reporter(_tell)
if _tell is not None:
    _tell("seal", [made for name in PARTS for _, made in checks.classes_of(name, sys.modules[name])])


def pytest_plugin_registered(plugin: Any) -> None:
    # What is registered is no longer asked for by its name.
    if getattr(plugin, "__name__", "") == __name__:
        for name in PARTS:
            sys.modules.pop(name, None)


def pytest_configure(config: Any) -> None:
    if _reporter is not None:
        _reporter.config = config
        _reporter.sources = checks.Sources(config)
        config.pluginmanager.register(_reporter)
