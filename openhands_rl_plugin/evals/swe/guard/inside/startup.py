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
LOOKED |= {"sys.settrace", "sys.setprofile", "sys.monitoring.register_callback", "open", "object.__setattr__"}
LOOKED |= {"ctypes.cdata", "ctypes.cdata/buffer", "ctypes.addressof", "ctypes.string_at", "ctypes.dlsym"}
PLACES = ("/guard", "/eval.sh", "/proc/")


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
            if getpid() != pid or fstat(writing).st_ino != node:
                return
            text = text_of(record).encode()
            line = blake2b(text, key=key, digest_size=32).hexdigest().encode() + b" " + text + b"\n"
            key = blake2b(key, digest_size=32).digest()
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

    def looked(event: str, args: Any) -> None:
        about = ""
        if event == "open":
            about = args[0] if isinstance(args[0], str) else ""
            if not about.startswith(PLACES) and not (about.endswith(".py") and inside(about)):
                return
        elif event == "object.__setattr__":
            if args[1] not in CHANGED:
                return
            about = getattr(getattr(args[0], "__code__", None), "co_filename", "")
        elif event == "ctypes.dlsym":
            about = str(args[1])
        path, line, nearest = origin()
        if path or event == "object.__setattr__":
            once("looked", event, about, path, line, nearest)

    return looked


def listener(name: str, send: Any) -> Any:
    """The audit hook. ``name``: of the event by which the plugin tells what happened. It is made of functions in
    functions: a class would be found among those below ``object``.
    """
    busy = set()  # type: Any
    said = set()  # type: Any
    watched = frozenset(LOOKED | {name, "exec", "import"})

    def once(*record: Any) -> None:
        if record not in said:
            said.add(record)
            send(record)

    origin, strangers = callers()
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
        me = get_ident()
        if me in busy:
            return
        busy.add(me)
        try:
            if event == name:
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
        self.names = {name, name + "_checks"}

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
        if hasattr(sys, "addaudithook"):
            sys.addaudithook(listener(name, send))
            audit = sys.audit
            # What is there now is not found by ``gc.get_objects``.
            gc.collect()
            gc.freeze()

            def tell(*record: Any) -> None:
                audit(name, *record)
        else:

            def tell(*record: Any) -> None:
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
