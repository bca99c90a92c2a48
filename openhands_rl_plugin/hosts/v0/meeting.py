"""Where agent and runtime of one OpenHands session meet: OpenHands makes them apart and does not introduce them.

Both know the session's id. The runtime says what it can do for a search; the agent says that one is under way, so that
whoever ends the session can end it first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable
from weakref import WeakValueDictionary

from openhands_rl_plugin.hosts.v0.background import Job
from openhands_rl_plugin.hosts.v0.episode import SessionWorld
from openhands_rl_plugin.types import Failure, JsonObject, Limits


@runtime_checkable
class EpisodeRuntime(Protocol):
    """A runtime that hands over what rewards will need before it is closed."""

    def conclude(self) -> tuple[JsonObject | None, Failure | None]:
        """The evidence, if there is any, and the environment's failure. Blocks; a second call repeats the answer."""
        ...


@runtime_checkable
class EnvironmentHost(Protocol):
    """A runtime with an environment behind it."""

    def world(self, limits: Limits) -> SessionWorld | None:
        """The live episode as search may see it, ``None`` when it cannot be forked."""
        ...


_runtimes: WeakValueDictionary[str, object] = WeakValueDictionary()
_decisions: dict[str, Job] = {}
_lock = threading.Lock()


def introduce(session: str, runtime: object) -> None:
    """Let the agent of this session find its runtime, for as long as that lives."""
    with _lock:
        _runtimes[session] = runtime


def runtime_of(session: str) -> object | None:
    """The runtime that was introduced for this session, ``None`` for one that this package did not make."""
    with _lock:
        return _runtimes.get(session)


@contextmanager
def deciding(session: str, job: Job) -> Iterator[None]:
    """``job`` decides the session's next action meanwhile."""
    with _lock:
        _decisions[session] = job
    try:
        yield
    finally:
        with _lock:
            del _decisions[session]


def stop_deciding(session: str) -> None:
    """End the decision that is under way, if there is one, and wait until nothing of it is left. Blocks."""
    with _lock:
        job = _decisions.get(session)
    if job is not None:
        job.cancel()
