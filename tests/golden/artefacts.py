"""The artefacts: how each is made, where it can be made, and how exactly it is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import stores
from golden import run_script


@dataclass(frozen=True)
class Artefact:
    """``tolerance``: relative, for numbers with a fraction. ``needs``: a module without which it is not made."""

    make: Callable[[], Any]
    tolerance: float = 0.0
    needs: str = ""
    slow: bool = False


INPUTS: dict[str, Callable[[], Any]] = {
    "gradients_episodes": lambda: run_script("gradients.py", "episodes"),
    "sqlite_files": stores.make_sqlite_files,
    "mongodb_documents": stores.make_mongodb_documents,
}
ARTEFACTS = {
    "gradients": Artefact(lambda: run_script("gradients.py"), tolerance=1e-6, needs="torch"),
    "sqlite": Artefact(stores.read_sqlite),
    "mongodb": Artefact(stores.read_mongodb, needs="pymongo"),
}
