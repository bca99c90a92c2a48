"""The service: tasks, which wait in this process's memory, and the HTTP application in front of the Ray actors."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rollout import with_absolute_paths
from openhands_rl_plugin.contrib.rollouts.requests import Result, ServiceOptions, TaskRequest, session_result
from openhands_rl_plugin.core.errors import ConfigError, describe
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.servers import AccessRules, is_loopback, listening, required_key, serving
from openhands_rl_plugin.hosts.pool import cluster_machines, join_cluster

_STATES = ("REGISTERED", "RUNNING", "COMPLETED", "ERROR", "TIMEOUT", "CANCELLED")
_KEPT_SECONDS = 7 * 24 * 3600.0
"""How long a finished task and its results are kept."""


@dataclass
class Session:
    """One episode of a task. ``call``: of the actor that has it."""

    task: RolloutTask
    sample: int
    state: str = "REGISTERED"
    result: Result | None = None
    call: Any = None

    @property
    def session_id(self) -> str:
        """The session's name: the run and sample of its episode in the store."""
        return f"{self.task.run_id}-{self.sample}"

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.result is not None or self.state == "CANCELLED"


@dataclass
class RolloutTask:
    """A submitted task: ``running``, ``completed`` or ``cancelled``. ``collected``: its results were fetched."""

    request: TaskRequest
    run_id: str = field(default_factory=lambda: f"rollouts-{uuid.uuid4().hex[:12]}")
    status: str = "running"
    sessions: list[Session] = field(default_factory=list)
    updated: float = field(default_factory=time.time)
    collected: bool = False

    def to_json(self) -> str:
        """Polar's ``TaskStatus``, with the results that are there."""
        results = [each.result.body for each in self.sessions if each.result is not None]
        head = {"task_id": self.request.task_id, "status": self.status, "total_sessions": len(self.sessions)}
        head |= {"completed_sessions": len(results), "result_paths": []}
        # Results are JSON already, and may be long.
        return f'{json.dumps(head)[:-1]}, "results": [{",".join(results)}]}}'


class Rollouts:
    """The tasks of the service and its routes, for one event loop."""

    def __init__(self, service: ServiceOptions) -> None:
        self._service = service
        self._tasks: dict[str, RolloutTask] = {}
        self._numbers = itertools.count(1)
        self._waiting: asyncio.PriorityQueue[tuple[int, int, Session]] = asyncio.PriorityQueue()

    def _take(self, request: TaskRequest) -> str:
        """Take a task; its status. The same request again is the same task, until its results were fetched.

        Raises ``HTTPException`` for another task under the name of one that runs.
        """
        now, task_id = time.time(), request.task_id
        found = self._tasks.get(task_id)
        if found is not None and found.request == request and found.status != "cancelled" and not found.collected:
            return found.status
        if found is not None and found.status == "running":
            raise HTTPException(409, f"task {task_id} is already running, with another request")
        kept = now - _KEPT_SECONDS
        self._tasks = {k: v for k, v in self._tasks.items() if v.status == "running" or v.updated > kept}
        task = self._tasks[task_id] = RolloutTask(request)
        for sample in range(request.num_samples):
            session = Session(task, sample)
            task.sessions.append(session)
            self._waiting.put_nowait((-request.dispatch_priority, next(self._numbers), session))
        return task.status

    async def work(self, player: Any) -> None:
        """Give ``player``, an actor, one episode after the other."""
        import ray  # an extra

        while True:
            *_, session = await self._waiting.get()
            if session.ended:
                continue
            task = session.task
            session.state = "RUNNING"
            session.call = player.play.remote(task.request, session.session_id, task.run_id, session.sample)
            try:
                result: Result = await session.call
            except ray.exceptions.RayError as error:
                why = ("infrastructure", f"the Ray actors that had it ended: {describe(error)}")
                result = session_result(task.request, session.session_id, why, timing={})
            if not session.ended:  # else it was cancelled meanwhile
                self._end(session, result.state, result)
                if all(each.ended for each in task.sessions):
                    task.status, task.updated = "completed", time.time()

    def _end(self, session: Session, state: str, result: Result | None) -> None:
        session.result = result
        if session.call is not None and session.state == "RUNNING":
            import ray  # an extra

            ray.cancel(session.call)  # of no effect on what has ended
        session.call = None
        session.state = state

    async def health(self, _: Request) -> Response:
        """``GET /health``."""
        return JSONResponse({"status": "ok", "nodes": self._service.workers})

    async def submit(self, request: Request) -> Response:
        """``POST /rollout/task/submit``. What no episode can be rolled out with is refused here."""
        asked = TaskRequest.model_validate_json(await request.body())
        options = asked.options(self._service, 0, "check")
        assert asked.task
        await asyncio.to_thread(lambda: host_of(options.settings()))
        return JSONResponse({"task_id": asked.task_id, "status": self._take(asked)})

    async def get(self, request: Request) -> Response:
        """``GET /rollout/task/{task_id}``."""
        task = self._known(request)
        task.collected = task.status != "running"
        return Response(task.to_json(), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """``DELETE /rollout/task/{task_id}``."""
        if (task := self._known(request)).status == "running":
            for each in task.sessions:
                if not each.ended:
                    self._end(each, "CANCELLED", None)
            task.status, task.updated = "cancelled", time.time()
        return Response(task.to_json(), media_type="application/json")

    async def status(self, _: Request) -> Response:
        """``GET /rollout/status``: how many episodes are in each state, and how tasks stand."""
        states = [each.state for task in self._tasks.values() for each in task.sessions]
        counts = {state: states.count(state) for state in _STATES}
        pending = {"pending_sessions": counts["REGISTERED"] + counts["RUNNING"], "states": counts}
        return JSONResponse({"tasks": {name: task.status for name, task in self._tasks.items()}, "pipeline": pending})

    def _known(self, request: Request) -> RolloutTask:
        if (task := self._tasks.get(request.path_params["task_id"])) is None:
            raise HTTPException(404, "Task not found")
        return task

    def app(self, lifespan: Any) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/rollout/task/submit", self.submit, methods=["POST"]),
                Route("/rollout/task/{task_id}", self.get),
                Route("/rollout/task/{task_id}", self.delete, methods=["DELETE"]),
                Route("/rollout/status", self.status),
            ],
            exception_handlers={ValidationError: _refuse, HTTPException: _refuse, ConfigError: _refuse},
            lifespan=lifespan,
        )


async def _refuse(_: Request, error: Exception) -> Response:
    """``detail`` is where Polar's clients look, ``error`` where those of our other servers do."""
    status, why = (error.status_code, error.detail) if isinstance(error, HTTPException) else (422, str(error))
    if isinstance(error, ValidationError):
        why = "; ".join(f"{'.'.join(map(str, at['loc'])) or 'body'}: {at['msg']}" for at in error.errors()[:3])
    why = redact_text(why)[:2000]
    return JSONResponse({"detail": why, "error": {"message": why, "code": status}}, status)


@contextmanager
def running_service(service: ServiceOptions, store: str) -> Iterator[str]:
    """The service, with its actors on the Ray cluster; yields its URL. ``store``: a folder or the URI of a database.

    Raises ``ConfigError`` for options that no episode can be rolled out with and a public address without a key,
    ``PortUnavailableError``, and for a Ray cluster as ``join_cluster``.
    """
    key = required_key(service.listen, service.service_key_env, protects="the model and this machine's processors")
    service = with_absolute_paths(service)
    base_url = service.options().settings().serving.base_url
    join_cluster()
    if (machines := len(cluster_machines())) > 1 and is_loopback(urlsplit(base_url).hostname or ""):
        raise ConfigError(
            f"--base-url {base_url} is another server on each of the Ray cluster's {machines} machines; give an "
            "address that all of them reach"
        )
    rollouts = Rollouts(service)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        import ray  # an extra

        from openhands_rl_plugin.contrib.rollouts.player import Player

        kind = ray.remote(Player).options(
            num_cpus=1, max_concurrency=service.concurrency, max_restarts=-1, max_task_retries=2
        )
        players = [kind.remote(service, store) for _ in range(service.workers)]
        work = [asyncio.create_task(rollouts.work(player)) for player in players for _ in range(service.concurrency)]
        yield
        for each in work:
            each.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        for player in players:
            ray.kill(player)

    with (
        listening(service.listen, service.port) as listener,
        serving(rollouts.app(lifespan), listener, access=AccessRules(key), log_level="critical", lifespan="on") as url,
    ):
        yield url
