"""Plays episodes with OpenHands' controller on a Ray cluster: actors instead of worker processes of this machine.

Everything else is as in ``workers``: the bound on episodes at a time, replaced workers, and one process (this one) that
stores for all of them. The machines of the cluster need this package, the model server's and the environment's
addresses, and the environment variables that the settings name; none of their values is sent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Any

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import (
    CaughtFailure,
    InfrastructureError,
    MissingExtraError,
    RLError,
    boundary,
    describe,
)
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import EpisodeRequest, FailureKind, Trajectory
from openhands_rl_plugin.environments.workspace.place import Place
from openhands_rl_plugin.hosts.pool.messages import (
    FROM_WORKER,
    FromWorker,
    Play,
    Played,
    Ready,
    Start,
    Store,
    Stored,
    from_line,
    to_line,
)
from openhands_rl_plugin.hosts.pool.processes import PoolWorker, WorkerPoolRunner
from openhands_rl_plugin.hosts.shared.options import HostOptions

_CLOSE_PATIENCE = 10.0
_START_PATIENCE = 600.0
_CALLS_BESIDE_EPISODES = 16
# Nothing is sent to anybody but the cluster; and on a busy machine its own processes take long to know each other.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "120000",
}


class RayPoolRunner(WorkerPoolRunner):
    """A ``WorkerPoolRunner`` of ``workers`` Ray actors, for each of which Ray finds a machine with ``cpus`` to spare.

    It uses the cluster of ``RAY_ADDRESS``, the one that this program has joined already, or starts one here. Raises
    ``MissingExtraError`` without Ray, ``InfrastructureError`` when the cluster does not answer.
    """

    def __init__(
        self,
        settings: RLSettings,
        options: HostOptions | None = None,
        *,
        workers: int = 2,
        storage: TrajectoryStorage | None = None,
        cpus: float = 1.0,
    ) -> None:
        super().__init__(settings, options, workers=workers, storage=storage)
        self._cpus = cpus
        _join_cluster()

    async def _start_worker(self) -> PoolWorker:
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        from openhands_rl_plugin.hosts.pool.ray_actor import EpisodeActor

        calls = (self._options.sessions or 1) + _CALLS_BESIDE_EPISODES
        actor = ray.remote(EpisodeActor).options(num_cpus=self._cpus, max_concurrency=calls).remote()
        start = Start(settings=self._settings, options=self._options, stores=self._storage is not None)
        return _RayWorker(actor, start, self._storage)


class _RayWorker:
    """One actor, and the episodes that it is playing."""

    def __init__(self, actor: Any, start: Start, storage: TrajectoryStorage | None) -> None:
        self._actor = actor
        self._storage = storage
        self._storing: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self._started = asyncio.create_task(self._start(start))
        self._listener = asyncio.create_task(self._listen())
        self.load = 0
        self.was_ready = False
        self.alive = True

    async def play(self, request: EpisodeRequest, place: Place | None, longest: float | None) -> Trajectory:
        """As in ``PoolWorker``; a ``place`` must be there on every machine of the cluster."""
        self._numbers += 1
        self.load += 1
        try:
            # One that gives up waiting leaves the others waiting.
            await asyncio.shield(self._started)
            async with asyncio.timeout(longest):
                play = Play(number=self._numbers, request=request, place=place)
                answer = await self._ask(self._actor.play.remote(to_line(play)))
        except TimeoutError as error:
            self._kill()
            raise InfrastructureError(f"an actor did not answer within {longest:g} s and was ended") from error
        finally:
            self.load -= 1
        if isinstance(answer, Played):
            return answer.trajectory
        raise _as_error(answer)

    async def close(self) -> None:
        """Let it close its sessions, then end it."""
        if self.alive:
            try:
                async with asyncio.timeout(_CLOSE_PATIENCE):
                    await _called(self._actor.leave.remote())
            except (TimeoutError, InfrastructureError):
                pass  # it is ended all the same
        self._kill()
        for task in (self._started, self._listener):
            task.cancel()
        await asyncio.gather(self._started, self._listener, *self._storing, return_exceptions=True)

    async def _start(self, start: Start) -> None:
        try:
            async with asyncio.timeout(_START_PATIENCE):
                answer = await self._ask(self._actor.start.remote(to_line(start)))
        except TimeoutError as error:
            self._kill()
            raise InfrastructureError(
                f"no actor was started within {_START_PATIENCE:g} s: has the cluster room for one more?"
            ) from error
        if not isinstance(answer, Ready):
            raise _as_error(answer)
        self.was_ready = True

    async def _listen(self) -> None:
        try:
            while True:
                for line in await _called(self._actor.outbox.remote()):
                    message = from_line(FROM_WORKER, line)
                    assert isinstance(message, Store)
                    storing = asyncio.create_task(self._store(message))
                    self._storing.add(storing)
                    storing.add_done_callback(self._storing.discard)
        except InfrastructureError:
            self.alive = False  # those who wait for an episode are told by Ray

    async def _store(self, message: Store) -> None:
        assert self._storage is not None
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "storage"):
                answer = await message.into(self._storage)
        except RLError as error:
            answer = Stored(number=message.number, error=str(error) or describe(error))
        try:
            await _called(self._actor.stored.remote(to_line(answer)))
        except InfrastructureError:
            self.alive = False

    async def _ask(self, call: Awaitable[bytes]) -> FromWorker:
        try:
            return from_line(FROM_WORKER, await _called(call))
        except InfrastructureError:
            self.alive = False
            raise

    def _kill(self) -> None:
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        self.alive = False
        ray.kill(self._actor)


async def _called[T](call: Awaitable[T]) -> T:
    """The result of a call to an actor. Raises ``InfrastructureError`` when the actor is gone."""
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "ray"):
            return await call
    except CaughtFailure as caught:
        raise InfrastructureError(f"a Ray actor ended: {caught.failure.message}") from caught


def _as_error(answer: FromWorker) -> RLError:
    assert not isinstance(answer, Ready | Played | Store)
    return answer.as_error()


def _join_cluster() -> None:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray  # pyright: ignore[reportMissingImports]  # an extra
    except ModuleNotFoundError as error:
        raise MissingExtraError("ray", "ray") from error
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"address": address} if address else {"address": "local", "include_dashboard": False}
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "ray"):
            ray.init(log_to_driver=False, configure_logging=False, **options)
    except CaughtFailure as caught:
        where = f"the Ray cluster at {address}" if address else "a Ray cluster on this machine"
        raise InfrastructureError(f"{where} cannot be used: {caught.failure.message}; see `ray status`") from caught
