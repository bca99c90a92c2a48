"""Where agent and runtime of one OpenHands session meet: OpenHands makes them apart and does not register_runtime them.

Both know the session's id. The runtime says what it can do for a search; the agent says that one is under way, so that
whoever ends the session can end it first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary, WeakValueDictionary

from openhands_rl_plugin.core.concurrency import Job
from openhands_rl_plugin.core.types import Failure, JsonObject, Limits
from openhands_rl_plugin.hosts.shared.episode import SessionWorld


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


class _Decision(NamedTuple):
    """A job, and the id of the last event that its controller had heard of when it began."""

    job: Job[Any]
    heard: int


_runtimes: WeakValueDictionary[str, object] = WeakValueDictionary()
_decisions: dict[str, _Decision] = {}
# Runtime of a session -> the id of the last event with which it was stopped.
_stops: WeakKeyDictionary[object, float] = WeakKeyDictionary()
_lock = threading.Lock()


def register_runtime(session: str, runtime: object) -> None:
    """Let the agent of this session find its runtime, for as long as that lives."""
    with _lock:
        _runtimes[session] = runtime


def runtime_of(session: str) -> object | None:
    """The runtime that was introduced for this session, ``None`` for one that this package did not make."""
    with _lock:
        return _runtimes.get(session)


@contextmanager
def deciding(session: str, job: Job[Any], heard: int) -> Iterator[None]:
    """``job`` decides the session's next action meanwhile, for a controller that has heard of the events up to the id
    ``heard``. Where a stop came after that, which the controller will hear of next, the job is ended at once."""
    with _lock:
        _decisions[session] = _Decision(job, heard)
        runtime = _runtimes.get(session)
        stopped = runtime is not None and _stops.get(runtime, -math.inf) >= heard
    try:
        if stopped:
            job.cancel()
        yield
    finally:
        with _lock:
            del _decisions[session]


def stop_deciding(session: str, stop: float = math.inf) -> None:
    """End the decision that is under way or about to begin, and wait until nothing of it is left. Blocks.

    ``stop`` is the id of the event that stops the session; by default it is stopped for good. A controller that has
    heard of later events was set running again since, so that its decisions go on.
    """
    with _lock:
        if (runtime := _runtimes.get(session)) is not None:
            _stops[runtime] = max(stop, _stops.get(runtime, stop))
        decision = _decisions.get(session)
    if decision is not None and decision.heard <= stop:
        decision.job.cancel()
