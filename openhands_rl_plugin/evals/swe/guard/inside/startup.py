"""What Python runs first in a supervised process, as its ``sitecustomize``: before any file of the repository.

It takes the channel's key out of the environment and keeps it where only an audit hook reaches it, which Python cannot
remove (3.8 and later; before, the plugin itself holds it). The hook hears what else no code of a repository can hide
afterwards: which of its modules ran before pytest's plugins, and who changed functions, traced, or opened what.
"""

import gc
import os
import sys
from _blake2 import blake2b
from _json import encode_basestring_ascii
from _thread import get_ident
from typing import Any

GUARD, TOLD = "/guard", "OPENHANDS_RL_GUARD"
ROOT = "/testbed/"
CHANGED = ("__code__", "__defaults__", "__kwdefaults__")
LOOKED = {"gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._getframe", "sys._current_frames"}
LOOKED |= {"sys.settrace", "sys.setprofile", "sys.monitoring.register_callback", "open"}
LOOKED |= {"object.__getattr__", "object.__setattr__"}
LOOKED |= {"ctypes.cdata", "ctypes.cdata/buffer", "ctypes.addressof", "ctypes.string_at", "ctypes.dlsym"}
READ = ("tb_frame", "gi_frame", "cr_frame", "ag_frame", "__code__")
PLACES = ("/guard", "/eval.sh", "/proc/")
OFTEN = ("replaced", "replaced meanwhile", "swapped", "altered", "hook", "rebound", "named")


def text_of(value: Any) -> str:
    """JSON, without any code that could be replaced."""
    if value is None or value is True or value is False:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join([text_of(each) for each in value]) + "]"
    return encode_basestring_ascii(value if isinstance(value, str) else "?")


def sender(key: bytes, writing: int) -> Any:
    """What sends a record, with a digest by a key that is used once."""
    pid, node = os.getpid(), os.fstat(writing).st_ino
    getpid, fstat, write = os.getpid, os.fstat, os.write

    def send(record: Any) -> None:
        nonlocal key
        try:
            if getpid() != pid:
                return
            text = text_of(record).encode()
            line = blake2b(text, key=key, digest_size=32).hexdigest().encode() + b" " + text + b"\n"
            # Also where it cannot be written: what follows shows that something is missing.
            key = blake2b(key, digest_size=32).digest()
            if fstat(writing).st_ino != node:
                return
            while line:
                line = line[write(writing, line) :]
        except OSError:
            pass

    return send


def inside(file: Any) -> str:
    """The path in the repository; empty for other files."""
    if not isinstance(file, str) or not file or file[0] == "<":
        return ""
    if file[0] != "/":
        file = ROOT + file
    if not file.startswith(ROOT) or "/site-packages/" in file:
        return ""
    return file[len(ROOT) :]


def callers() -> Any:
    """Functions that say who calls; the frames of the hook's own functions are passed over by their number."""
    main, getframe, library = get_ident(), sys._getframe, os.path.dirname(os.__file__) + "/"

    def passing(file: str) -> bool:
        if file[:1] == "<":
            return True
        return file.startswith(library) and "/site-packages/" not in file

    def origin() -> Any:
        """The nearest line of the repository, unless other packages stand between; and the nearest file."""
        frame = getframe(3)
        nearest = frame.f_code.co_filename if frame is not None else ""
        while frame is not None:
            file = frame.f_code.co_filename
            path = inside(file)
            if path:
                return path, frame.f_lineno, nearest
            if not passing(file):
                break
            frame = frame.f_back
        return "", 0, nearest

    def strangers() -> list:
        """Files of the repository in the calls that led here, and whether another thread speaks."""
        frame = getframe(2)
        found = []  # type: Any
        while frame is not None:
            path = inside(frame.f_code.co_filename)
            if path and path not in found:
                found.append(path)
            frame = frame.f_back
        return found + (["<thread>"] if get_ident() != main else [])

    return origin, strangers


def functions_in(code: Any) -> Any:
    """A code and all those within it."""
    found = [code]
    for each in found:
        found += [inner for inner in each.co_consts if hasattr(inner, "co_consts")]
    return found


def code_of(value: Any) -> Any:
    return getattr(getattr(value, "__func__", value), "__code__", None)


def sealing(getframe: Any, telling: Any) -> Any:
    """Functions that keep what the plugin is made of, and say what of it is another now, or who else speaks for it."""
    codes = set()  # type: Any
    members = []  # type: Any
    held = []  # type: Any
    hooks = []  # type: Any
    tests = []  # type: Any

    def same(now: Any, kept: Any) -> bool:
        return len(now) == len(kept) and all(now.get(name) is kept[name] for name in kept)

    def seal(owners: Any) -> None:
        if members:
            return
        for owner in owners:
            for name, value in list(vars(owner).items()):
                code = code_of(value)
                if code is not None:
                    codes.update(functions_in(code))
                if code is not None or not name.startswith("__"):
                    members.append((owner, name, value, code))
        if hasattr(gc, "freeze"):
            gc.freeze()

    def keep(reporter: Any, manager: Any) -> None:
        if held:
            return
        for each in (reporter, reporter.everything, reporter.asserting, reporter.running, reporter.library):
            held.append((each, dict(vars(each))))
        for caller in manager.get_hookcallers(reporter):
            hooks.extend((caller, each, each.function) for each in caller.get_hookimpls() if each.plugin is reporter)
        tests.append((reporter.collected, dict(reporter.collected)))

    def changed(done: bool) -> str:
        frame = getframe(2)
        if codes and (frame.f_code is not telling or frame.f_back.f_code not in codes):
            return "another speaks for it"
        for owner, name, value, code in members:
            # Code that is put into a function is heard of by itself.
            if vars(owner).get(name) is not value or (done and code_of(value) is not code):
                return str(name)
        for thing, kept in held:
            if not same(vars(thing), kept):
                return "what it keeps"
        for now, kept in tests:
            # There may be thousands, and an event for each.
            if len(now) != len(kept) or (done and not same(now, kept)):
                return "the tests it keeps"
        for caller, each, function in hooks:
            if each.function is not function or each not in caller.get_hookimpls():
                return "its hooks"
        return ""

    return seal, keep, changed


def importing(plugin: str, once: Any) -> Any:
    """What hears of a module that runs: those before the plugin, and those that could stand before others."""
    loaded = False

    def ran(file: Any) -> None:
        nonlocal loaded
        if file == plugin:
            loaded = True
        path = inside(file)
        if path:
            parts = path.split("/")
            if not loaded:
                once("early", path)
            elif len(parts) == 1 or (len(parts) == 2 and parts[1] == "__init__.py") or path.endswith(".so"):
                once("module", path)

    return ran


def reaching(origin: Any, once: Any) -> Any:
    """What hears of functions that are changed, of frames, memory and files that are looked into."""

    getcwd = os.getcwd

    def looked(event: str, args: Any) -> None:
        about = ""
        if event == "open":
            about = args[0] if isinstance(args[0], str) else ""
            if about and about[0] != "/":
                about = getcwd() + "/" + about
            if not about.startswith(PLACES) and not (about.endswith(".py") and inside(about)):
                return
        elif event == "object.__setattr__":
            if args[1] not in CHANGED:
                return
            about = getattr(getattr(args[0], "__code__", None), "co_filename", "")
        elif event == "object.__getattr__":
            if args[1] not in READ:
                return
            about = args[0].__code__.co_filename if args[1] == "__code__" else args[1]
        elif event == "ctypes.dlsym":
            about = str(args[1])
        path, line, nearest = origin()
        if path or event == "object.__setattr__":
            once("looked", event, about, path, line, nearest)

    return looked


def listener(name: str, telling: Any, send: Any) -> Any:
    """The audit hook. ``name``: of the event by which the plugin tells what happened; ``telling``: the code that does.
    It is made of functions in functions: a class would be found among those below ``object``.
    """
    busy = set()  # type: Any
    said = set()  # type: Any
    watched = frozenset(LOOKED | {name, "exec", "import"})

    def once(*record: Any) -> None:
        if record not in said:
            said.add(record)
            send(record)

    getframe = sys._getframe
    origin, strangers = callers()
    seal, keep, changed = sealing(getframe, telling)
    ran, looked = importing(GUARD + "/" + name + ".py", once), reaching(origin, once)

    def hear(event: str, args: Any) -> None:
        if event == "exec":
            if getattr(args[0], "co_name", "") == "<module>":
                ran(args[0].co_filename)
        elif event == "import" and isinstance(args[1], str):
            ran(args[1])

    def hook(event: str, args: Any) -> None:
        if event not in watched:
            return
        if event == "object.__getattr__" and (args[1] not in READ or getframe(1).f_code.co_filename[:7] == "/guard/"):
            return
        me = get_ident()
        if me in busy:
            return
        busy.add(me)
        try:
            if event == name:
                why = changed(args[0] in ("softened", "finish"))
                if why:
                    once("tampered", why)
                if args[0] in ("seal", "kept"):
                    (seal if args[0] == "seal" else keep)(*args[1:])
                elif args[0] in OFTEN:
                    once(*args)
                else:
                    send([*args, strangers()] if args[0] == "report" else args)
            elif event in LOOKED:
                looked(event, args)
            else:
                hear(event, args)
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError):
            pass
        finally:
            busy.discard(me)

    return hook


class Finder:
    """Finds the plugin, which lies in no folder of the path."""

    def __init__(self, name: str) -> None:
        self.names = {name, name + "_checks", name + "_canaries"}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.names:
            return None
        self.names.discard(name)
        if not self.names:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
        external = sys.modules["_frozen_importlib_external"]
        return external.spec_from_file_location(name, GUARD + "/" + name + ".py")  # type: ignore[attr-defined]


def put_back(variable: str, before: str) -> None:
    if before[0] == "0":
        os.environ.pop(variable, None)
    else:
        os.environ[variable] = before[1:]


def begin() -> None:
    told = os.environ.pop(TOLD, "")
    sys.path[:] = [each for each in sys.path if each.rstrip("/") != GUARD]
    if told:
        reading, writing, name, options, path = told.split("\x1f")
        put_back("PYTHONPATH", path)
        key = os.read(int(reading), 32)
        os.close(int(reading))
        os.set_inheritable(int(writing), False)
        send = sender(key, int(writing))
        audit = getattr(sys, "audit", None)
        if audit is not None:

            def tell(*record: Any) -> None:
                audit(name, *record)

            sys.addaudithook(listener(name, tell.__code__, send))
            # What is there now is not found by ``gc.get_objects``.
            gc.collect()
            gc.freeze()
        else:
            said = set()  # type: Any

            def tell(*record: Any) -> None:
                if record[0] in ("seal", "kept") or (record[0] in OFTEN and record in said):
                    return
                if record[0] in OFTEN:
                    said.add(record)
                send([*record, []] if record[0] == "report" else record)

        # pytest has to read the option first.
        given = tell, lambda: put_back("PYTEST_ADDOPTS", options)
        sys.modules[name + "_tell"] = given  # type: ignore[assignment]
        sys.meta_path.insert(0, Finder(name))  # type: ignore[arg-type]
    # The one that would have run without this one. Without another, the import that runs this one wants it back.
    mine = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        if mine is not None:
            sys.modules["sitecustomize"] = mine


begin()
