"""The artefacts: how each is made, where it can be made, and how exactly it is compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Any, Literal

import gateway_sessions
import parsing
import sessions
import stores
import verdicts
import worlds
from golden import run_script


@dataclass(frozen=True)
class Artefact:
    """``tolerance``: relative, for numbers with a fraction. ``host``: the environment in which it is made.

    ``variable``: of the environment, without which it is not made.
    """

    make: Callable[[], Any]
    tolerance: float = 0.0
    host: Literal["v0", "v1"] = "v0"
    slow: bool = False
    sandboxed: bool = False
    variable: str = ""


HOSTS = {"v0": ("openhands-ai", "1.6.0"), "v1": ("openhands-sdk", "1.58.0")}


def missing_host(host: str) -> str:
    """Why it cannot be made here: a golden file is of one release of OpenHands. V0 brings the SDK of V1 along."""
    found = {each.metadata["Name"]: each.version for each in distributions()}
    name, release = HOSTS[host]
    there = found.get(name) == release and (host == "v0" or HOSTS["v0"][0] not in found)
    return "" if there else f"needs {name} {release}"


# Inputs that are kept as they are: gradients_episodes, mongodb_documents, sqlite_files, swe_local_rows, texts.
ARTEFACTS = {
    "gradients": Artefact(lambda: run_script("gradients.py"), tolerance=1e-6, slow=True),
    # Logprobs of these stores have 64 bits, and are read with 32.
    "sqlite": Artefact(stores.read_sqlite, tolerance=2**-24),
    "mongodb": Artefact(stores.read_mongodb, tolerance=2**-24),
    "v0_sessions": Artefact(lambda: sessions.record_all("v0"), sandboxed=True),
    "v1_sessions": Artefact(lambda: sessions.record_all("v1"), host="v1", sandboxed=True),
    "gateway_sessions": Artefact(gateway_sessions.both),
    "parsing": Artefact(parsing.parse_all),
    "verdicts": Artefact(verdicts.grade, slow=True, sandboxed=True, variable="OPENHANDS_RL_SWE_CACHE"),
    "worlds": Artefact(worlds.episodes, tolerance=1e-9),
}
