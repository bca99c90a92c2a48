"""The artefacts: how each is made, where it can be made, and how exactly it is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from golden import run_script


@dataclass(frozen=True)
class Artefact:
    """``tolerance``: relative, for numbers with a fraction. ``needs``: a module without which it is not made."""

    make: Callable[[], Any]
    tolerance: float = 0.0
    needs: str = ""
    slow: bool = False


INPUTS = {"gradients_episodes": ("gradients.py", "episodes")}
ARTEFACTS = {
    "gradients": Artefact(lambda: run_script("gradients.py"), tolerance=1e-6, needs="torch"),
}
