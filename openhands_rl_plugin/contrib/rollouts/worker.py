"""A worker: claims episodes, plays them, stores their results.

python -m openhands_rl_plugin.contrib.rollouts.worker       # its orders on stdin as JSON; ends with its stdin
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Protocol

from openhands_rl_plugin.apps.rollout.play import play
from openhands_rl_plugin.config.registry import build
from openhands_rl_plugin.contrib.rollouts.owners import living_owner
from openhands_rl_plugin.contrib.rollouts.queue import JobQueue
from openhands_rl_plugin.contrib.rollouts.requests import TaskRequest
from openhands_rl_plugin.contrib.rollouts.settings import ServiceOptions
from openhands_rl_plugin.contrib.rollouts.states import (
    ClaimedSession,
    Result,
    RolloutState,
    Timing,
    failed_result,
    played_result,
)
from openhands_rl_plugin.core.errors import CaughtFailure, EpisodeError, RLError, StorageError, boundary
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.redaction import redact_text, redacting_logger
from openhands_rl_plugin.core.types import Failure, FailureKind, Frozen
from openhands_rl_plugin.evals.runs.stages import Stage, Stages
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout

_LOG = redacting_logger(__name__)
_PAUSE = 0.2
"""Seconds between two looks into the queue."""
_CLOSE_SECONDS = 8.0
"""What episodes have to stop in, when the service is gone."""
_FIRST_DELAY, _LONGEST_DELAY = 5.0, 60.0
_STATES = {
    Stage.SET_UP: RolloutState.INITIALIZING,
    Stage.READY: RolloutState.READY,
    Stage.PLAY: RolloutState.RUNNING,
    Stage.PLAYED: RolloutState.POST_RUN,
    Stage.GRADE: RolloutState.EVALUATING,
}


class Orders(Frozen):
    """What a worker is told. ``folder``: the store and the queue; ``balancer``: the address of several endpoints."""

    folder: Path
    service: ServiceOptions
    balancer: str = ""

    @classmethod
    def from_line(cls, line: bytes) -> Orders:
        """From a line of JSON; not strictly, because JSON has no paths and no tuples."""
        return cls.model_validate_json(line, strict=False)


class SessionQueue(Protocol):
    """What a worker does with the queue, as ``JobQueue`` says."""

    def claim(self, owner: str) -> ClaimedSession | None:
        """The next episode, which is the owner's from now on."""
        ...

    def owned(self, owner: str) -> set[str]:
        """The episodes that still are the owner's."""
        ...

    def entered(self, session: ClaimedSession, owner: str, state: RolloutState) -> None:
        """An episode is in another stage."""
        ...

    def finish(self, session: ClaimedSession, owner: str, result: Result) -> bool:
        """Store the result."""
        ...

    def again(self, session: ClaimedSession, owner: str, *, delay: float, counts: bool = True) -> None:
        """Give an episode back."""
        ...


class _Held:
    """An episode that this worker has."""

    def __init__(self, session: ClaimedSession, tell: Callable[[ClaimedSession, RolloutState], None]) -> None:
        self.session = session
        self.task: asyncio.Task[None] | None = None
        self._tell = tell
        self._began = time.monotonic()
        self._times: dict[Stage, float] = {}

    def entered(self, stage: Stage) -> None:
        self._times[stage] = time.monotonic()
        if stage in _STATES:
            self._tell(self.session, _STATES[stage])

    @property
    def is_played(self) -> bool:
        return Stage.PLAYED in self._times

    def timing(self) -> Timing:
        now, at = time.monotonic(), self._times

        def between(first: Stage, then: Stage) -> float:
            return 1000 * (at.get(then, now) - at[first]) if first in at else 0.0

        begun = min(at.values(), default=now)
        return Timing(
            register_to_init_queue_ms=1000 * (begun - self._began),
            init_ms=between(Stage.SET_UP, Stage.READY),
            ready_queue_ms=between(Stage.READY, Stage.PLAY),
            run_ms=between(Stage.PLAY, Stage.PLAYED),
            postrun_queue_ms=between(Stage.PLAYED, Stage.GRADE) if Stage.GRADE in at else 0.0,
            postrun_ms=between(Stage.GRADE, Stage.GRADED),
            eval_ms=between(Stage.GRADE, Stage.GRADED),
            e2e_ms=1000 * (now - self._began),
        )


class Worker:
    """Plays for ``owner`` what lies in ``queue``. The queue is used from one thread, so that its calls keep order."""

    def __init__(self, queue: SessionQueue, owner: str, orders: Orders, storage: TrajectoryStorage) -> None:
        service = orders.service
        self._queue = queue
        self._owner = owner
        self._service = service
        self._balancer = orders.balancer
        self._storage = storage
        self._stages = Stages(
            playing=service.playing,
            grading=service.grading,
            prepared=service.prepared,
            setup_timeout=service.setup_timeout,
        )
        self._held: dict[str, _Held] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-queue")

    async def run(self, stopped: asyncio.Event) -> None:
        """Play until ``stopped``; then what is not finished goes back into the queue. Raises ``StorageError``."""
        try:
            while not stopped.is_set():
                await self._stop_cancelled()
                if self._has_room() and (session := await self._call(self._queue.claim, self._owner)) is not None:
                    self._begin(session)
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), _PAUSE)
        finally:
            await self._stop(list(self._held.values()))
            for held in list(self._held.values()):
                await self._call(self._queue.again, held.session, self._owner, delay=0, counts=False)
            self._thread.shutdown()

    def _has_room(self) -> bool:
        before = sum(not held.is_played for held in self._held.values())
        places = self._service.playing + self._service.prepared
        return before < places and len(self._held) < places + self._service.grading

    def _begin(self, session: ClaimedSession) -> None:
        held = _Held(session, self._tell)
        self._held[session.session_id] = held
        held.task = asyncio.create_task(self._handle(held))

    def _tell(self, session: ClaimedSession, state: RolloutState) -> None:
        told = self._thread.submit(self._queue.entered, session, self._owner, state)
        told.add_done_callback(lambda done: None if done.exception() is None else _LOG.warning("%s", done.exception()))

    async def _stop_cancelled(self) -> None:
        """End what was taken away: the task was deleted, or the rest of its group is not wanted any more."""
        if not self._held:
            return
        owned = await self._call(self._queue.owned, self._owner)
        gone = [key for key in self._held if key not in owned]
        # One that has just ended is none of them: it leaves by itself.
        await self._stop([self._held[key] for key in gone])
        for key in gone:
            self._held.pop(key, None)

    async def _stop(self, these: list[_Held]) -> None:
        tasks = [held.task for held in these if held.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)

    async def _handle(self, held: _Held) -> None:
        session = held.session
        try:
            result = await self._result(held)
            if isinstance(result, Result):
                await self._call(self._queue.finish, session, self._owner, result)
            else:
                await self._call(self._queue.again, session, self._owner, delay=result)
        except StorageError as error:
            # Neither the store nor the queue takes it now; it was played, or will be, under the same name.
            _LOG.error("%s: %s", session.session_id, error)
            with suppress(StorageError):
                await self._call(self._queue.again, session, self._owner, delay=_FIRST_DELAY, counts=False)
        self._held.pop(session.session_id, None)

    async def _result(self, held: _Held) -> Result | float:
        """The result, or the seconds after which the episode is worth another try. Raises ``StorageError``."""
        session = held.session
        request = TaskRequest.model_validate_json(session.request)
        # Another try is another episode: of the former one the store has the failure.
        run_id = f"{session.run}~{session.attempt}" if session.attempt else session.run
        try:
            # The address names the episode, so that all of its calls go to one server.
            own = f"{self._balancer}/session/{session.session_id}/v1" if self._balancer else None
            options = request.options(self._service, session.sample, run_id, own)
            with boundary(FailureKind.INFRASTRUCTURE, "rollout.play"):
                stages = self._stages.telling(held.entered)
                played = await play(request.task, options, storage=self._storage, stages=stages)
                if options.timeout < self._service.timeout:
                    played = _bounded_by_its_task(played, request)
                result = played_result(session, played, request.told, held.timing(), self._owner)
        except CaughtFailure as caught:
            return self._failed(held, request, caught.failure)
        except EpisodeError as error:
            failure = Failure(kind=error.kind, message=str(error), boundary="rollout.play")
            return self._failed(held, request, failure)
        except StorageError:
            raise
        except RLError as error:
            return self._refused(held, request, str(error), "configuration")
        if played.failure is not None and self._is_worth_a_try(played.failure, session):
            return _delay(session)
        return result

    def _failed(self, held: _Held, request: TaskRequest, failure: Failure) -> Result | float:
        if self._is_worth_a_try(failure, held.session):
            return _delay(held.session)
        return self._refused(held, request, failure.message, failure.kind.value)

    def _refused(self, held: _Held, request: TaskRequest, why: str, kind: str) -> Result:
        session = held.session
        why, timing = redact_text(why), held.timing()
        return failed_result(session.session_id, session.task_id, why, request.told, kind=kind, timing=timing)

    def _is_worth_a_try(self, failure: Failure, session: ClaimedSession) -> bool:
        return failure.kind is FailureKind.INFRASTRUCTURE and session.attempt + 1 < self._service.attempts

    async def _call[**P, T](self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: call(*args, **kwargs))


def _bounded_by_its_task(played: PlayedRollout, request: TaskRequest) -> PlayedRollout:
    """A failure names the option that is to be raised, which here is not the service's."""
    if (failure := played.failure) is None:
        return played
    message = failure.message.replace("--timeout", request.bound)
    return played.model_copy(update={"failure": failure.model_copy(update={"message": message})})


def _delay(session: ClaimedSession) -> float:
    return min(_LONGEST_DELAY, _FIRST_DELAY * 2**session.attempt)


def store_in(folder: Path) -> TrajectoryStorage:
    """The episodes of a service, beside its queue. Raises ``StorageError``."""
    return build("storages", "file", {"path": str(folder)})


async def work(orders: Orders, stopped: asyncio.Event) -> None:
    """Play for the queue in the folder of ``orders``. Raises ``StorageError``."""
    queue = JobQueue(orders.folder)
    storage = store_in(orders.folder)
    try:
        with living_owner(orders.folder) as owner:
            await Worker(queue, owner, orders, storage).run(stopped)
    finally:
        await storage.close()
        queue.close()


async def _main() -> None:
    orders = Orders.from_line(sys.stdin.buffer.readline())
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    threading.Thread(target=_wait_for_the_end, args=(loop, stopped), daemon=True).start()
    await work(orders, stopped)


def _wait_for_the_end(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """The service closes this process's stdin, and so does the kernel when the service is killed."""
    sys.stdin.buffer.read()
    loop.call_soon_threadsafe(stopped.set)
    time.sleep(2 * _CLOSE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    os.environ.setdefault("LOG_LEVEL", "ERROR")  # otherwise OpenHands logs every step
    with redirect_stdout(sys.stderr):
        asyncio.run(_main())
