"""PYTEST_DONT_REWRITE. What the plugin compares: functions with what they were, and code with its file.

Nothing is imported here that pytest has not imported before: tests that run pytest in their own process take away what
it imported, so that each such run has modules of its own, unless somebody had imported them first.
"""

import ast
import builtins
import contextlib
import importlib
import os
import sys
import types
from typing import Any

ALWAYS = ("AssertionError", "isinstance", "issubclass", "len", "all", "any", "repr", "bool", "print", "getattr")
OURS = ("pytest", "_pytest", "pluggy")
CASES = "unittest.case"
UNITTEST = (
    "unittest",
    CASES,
    "unittest.loader",
    "unittest.main",
    "unittest.result",
    "unittest.runner",
    "unittest.suite",
)
MOST_MODULES = 32
MISSING = object()
KINDS = (types.FunctionType, types.ModuleType, type, staticmethod, classmethod)
_compile = compile  # type: Any
_open, _read, _close = os.open, os.read, os.close


def function_of(value: Any) -> Any:
    """The plain function behind a method, a property, a partial or a wrapper; ``None`` where there is none."""
    for _ in range(20):
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            value = value.__func__
        elif type(value) is property:
            value = value.fget
        elif type(value).__name__ == "partial" and hasattr(value, "func"):
            value = value.func
        else:
            break
    return value if isinstance(value, types.FunctionType) else None


def code_of(value: Any) -> Any:
    return getattr(function_of(value), "__code__", None)


def place_of(value: Any) -> str:
    return getattr(code_of(value), "co_filename", "")


def read(file: str) -> bytes:
    """The content of a file, past everything that Python code could have replaced."""
    number = _open(file, os.O_RDONLY)
    try:
        parts = []
        while True:
            part = _read(number, 1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)
    finally:
        _close(number)


def print_of(code: Any) -> Any:
    """What two compilations of the same source have in common."""
    constants = []
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            constants.append(print_of(each))
        elif isinstance(each, frozenset):
            constants.append(tuple(sorted(map(repr, each))))
        else:
            constants.append((type(each).__name__, repr(each)))
    return (code.co_name, code.co_firstlineno, code.co_code, code.co_names, code.co_varnames, tuple(constants))


def is_undecorated(node: Any) -> bool:
    return isinstance(node, ast.FunctionDef) and not node.decorator_list


class Sources:
    """The code of files, compiled anew as Python and as pytest would."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.known = {}  # type: Any
        self.plain = {}  # type: Any

    def has(self, code: Any) -> Any:
        """Whether the code is that of its file; ``None`` where that cannot be said."""
        file = code.co_filename
        if file not in self.known:
            self.known[file] = self.prints(file)
        prints, whole = self.known[file]
        return True if print_of(code) in prints else False if whole else None

    def prints(self, file: str) -> Any:
        """The prints of all code in a file, and whether pytest's own way of compiling it is among them."""
        try:
            text = read(file)
            found = [_compile(text, file, "exec", dont_inherit=True)]
        except (OSError, SyntaxError, ValueError):
            return frozenset(), True
        whole = False
        with contextlib.suppress(Exception):
            found.append(self.rewritten(text, file))
            whole = True
        prints = set()
        while found:
            code = found.pop()
            prints.add(print_of(code))
            found += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        return prints, whole

    def defines(self, file: str, case: str, name: str) -> bool:
        """Whether the file itself defines that test, in that class (empty: in none), without any decorator."""
        if file not in self.plain:
            found = set()
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                tree = _compile(read(file), file, "exec", ast.PyCF_ONLY_AST, True)  # type: Any
                bodies = [("", tree)] + [(each.name, each) for each in tree.body if isinstance(each, ast.ClassDef)]
                for owner, body in bodies:
                    if not getattr(body, "decorator_list", None):
                        found |= {(owner, each.name) for each in body.body if is_undecorated(each)}
            self.plain[file] = found
        return (case, name) in self.plain[file]

    def rewritten(self, text: bytes, file: str) -> Any:
        rewrite = importlib.import_module("_pytest.assertion.rewrite")  # type: Any
        tree = _compile(text, file, "exec", ast.PyCF_ONLY_AST, True)
        names = rewrite.rewrite_asserts.__code__.co_varnames
        # Before there was a source, the path was py's.
        old = (type(self.config.rootdir)(file), self.config)
        given = (text, file, self.config) if "source" in names else old
        rewrite.rewrite_asserts(tree, *given)
        return _compile(tree, file, "exec", dont_inherit=True)


class Kept:
    """Functions as they were, to be compared."""

    def __init__(self, owners: list, builtin: Any = None) -> None:
        members = []
        for path, owner in owners:
            for name, value in list(vars(owner).items()):
                function = function_of(value)
                if function is not None or (owner is builtins and (builtin is None or name in builtin)):
                    members.append((path + "." + name, owner, name, value, getattr(function, "__code__", None)))
        self.members = tuple(members)

    def others(self) -> list:
        """The path of each that is another one now, and what it is: quicker, and blind for other code in it."""
        now = [(path, value, vars(owner).get(name, MISSING)) for path, owner, name, value, _ in self.members]
        return [(path, new) for path, old, new in now if new is not old]

    def replaced(self) -> list:
        """The path of each that is another one now, with the new one's code."""
        found = []
        for path, owner, name, value, code in self.members:
            now = vars(owner).get(name, MISSING)
            if now is not value:
                found.append((path, getattr(function_of(now), "__code__", None)))
            elif code is not None and function_of(now).__code__ is not code:
                found.append((path, function_of(now).__code__))
        return found


def classes_of(name: str, module: Any) -> list:
    """A module and the classes that it made, with their paths."""
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == name]
    return [(name, module)] + [(name + "." + each.__name__, each) for each in classes]


class KeptLibrary:
    """unittest as it is imported, now or by tests: compared with its files first, then with what it was."""

    def __init__(self) -> None:
        self.files = {}  # type: Any
        self.kept = {}  # type: Any
        self.unlike = []  # type: Any

    def replaced(self, names: Any = UNITTEST) -> list:
        """As ``Kept.replaced``."""
        for name in names:
            module = sys.modules.get(name)
            if isinstance(module, types.ModuleType):
                self.keep(name, module, classes_of(name, module))
        return self.unlike + [each for name, _, kept in self.kept.values() if name in names for each in kept.replaced()]

    def keep(self, name: str, thing: Any, owners: Any) -> None:
        """Look at a module or a class of it from now on."""
        if id(thing) in self.kept or len(self.kept) == MOST_MODULES:
            return
        self.kept[id(thing)] = name, thing, Kept(owners)
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            named = self.named(name)
            for path, owner in owners:
                self.unlike += self.others(path, vars(owner), named.get(path[len(name) + 1 :], {}))

    def others(self, path: str, now: Any, named: dict) -> list:
        """The path and code of each function that is not the one its file defines under that name."""
        found = []
        for name, prints in named.items():
            function = function_of(now.get(name))
            code = getattr(function, "__code__", None)
            inner = function_of(getattr(function, "__wrapped__", None))
            near = code is not None and code.co_filename.startswith(os.path.dirname(os.__file__) + os.sep)
            codes = [code] + [each.__code__ for each in (inner,) if each is not None and near]
            if not any(each is not None and print_of(each) in prints for each in codes):
                found.append((path + "." + name, code))
        return found

    def named(self, name: str) -> dict:
        """The prints of a file's functions, by class (empty: of the module) and name."""
        if name not in self.files:
            end = "__init__.py" if name == "unittest" else name.split(".")[1] + ".py"
            file = os.path.join(os.path.dirname(os.__file__), "unittest", end)
            found = {}  # type: Any
            self.files[name] = found
            waiting = [("", _compile(read(file), file, "exec", dont_inherit=True))]
            while waiting:
                scope, code = waiting.pop()
                for each in [each for each in code.co_consts if isinstance(each, types.CodeType)]:
                    # The body of a class has no local variables of the fast kind.
                    if each.co_flags & 1:
                        found.setdefault(scope, {}).setdefault(each.co_name, set()).add(print_of(each))
                    elif not scope:
                        waiting.append((each.co_name, each))
            found.get("", {}).pop("<lambda>", None)
        return self.files[name]


def names_of(owner: Any) -> dict:
    """What functions, classes and modules the names of a module or a class stand for."""
    return {name: value for name, value in list(vars(owner).items()) if isinstance(value, KINDS)}


def rebound(owner: Any, before: dict) -> list:
    """Names that stand for something else now, or hide a built-in one; and the files of what they stand for."""
    now = names_of(owner)
    changed = [name for name in before if now.get(name, MISSING) is not before[name]]
    changed += [name for name in now if name not in before and hasattr(builtins, name)]
    found = []
    for name in changed:
        value = vars(owner).get(name)
        home = sys.modules.get(getattr(value, "__module__", None) or "")
        place = place_of(value) or str(getattr(home, "__file__", "") or "")
        found.append((name, place if isinstance(value, KINDS) else "<object>"))
    return found


def owners(*more: str) -> list:
    """pytest and pluggy as far as they are loaded: their modules, and the classes in them."""
    found = [("builtins", builtins)]  # type: Any
    for name, module in sorted(sys.modules.items()):
        if (name.split(".")[0] in OURS or name in more) and isinstance(module, types.ModuleType):
            found += classes_of(name, module)
    return found


def names_in(code: Any, word: str) -> bool:
    """Whether the code, or one within it, names something."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    texts = [*code.co_names, *(each for each in code.co_consts if isinstance(each, str))]
    return any(word in each.lower() for each in texts) or any(names_in(each, word) for each in inner)


def names_in_file(file: str, word: bytes) -> bool:
    try:
        return word in read(file).lower()
    except (OSError, ValueError):
        return False
