"""Modules of the ``swebench`` package as they are, without what its ``__init__`` files import beside them: clients of
containers and of a cloud, and a library of data sets, which take many seconds and are used for nothing here.

The modules are in a table of their own; ``sys.modules``, and so everybody else's ``import swebench``, is left alone.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, resolve_name
from types import ModuleType
from typing import Any

_PACKAGE = "swebench"
_BARE = (_PACKAGE, f"{_PACKAGE}.harness")
"""Packages whose ``__init__`` is not run."""

_LOCK = threading.RLock()
_loaded: dict[str, ModuleType] = {}


class _LeftOut(ModuleType):
    """Has a class of every name, of which nothing is ever made."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


_LEFT_OUT = {name: _LeftOut(name) for name in ("datasets",)}


def import_module(name: str) -> ModuleType:
    """A module of the package by its full name. Raises ``ModuleNotFoundError`` as an import does."""
    with _LOCK:
        parent, _, child = name.rpartition(".")
        # To import the parent may import this one.
        folders = import_module(parent).__path__ if parent else None
        if name in _loaded:
            return _loaded[name]
        spec = PathFinder.find_spec(name, folders)
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = _loaded[name] = module_from_spec(spec)
        if name not in _BARE:
            # An import statement asks the builtins of its own module.
            module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del _loaded[name]
                raise
        if parent:
            setattr(_loaded[parent], child, module)
        return module


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """What an import statement in the package calls."""
    full = resolve_name("." * level + name, (globals or {})["__package__"]) if level else name
    root = full.partition(".")[0]
    if root in _LEFT_OUT:
        return _LEFT_OUT[root]
    if root != _PACKAGE:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    module = import_module(full)
    if not fromlist:
        return import_module(_PACKAGE)
    for each in fromlist:
        if not hasattr(module, each) and hasattr(module, "__path__"):
            with suppress(ModuleNotFoundError):
                import_module(f"{full}.{each}")
    return module
