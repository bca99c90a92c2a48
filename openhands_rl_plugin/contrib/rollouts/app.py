"""The ASGI application of the service: Polar's routes over the queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.contrib.rollouts.events import EventStream
from openhands_rl_plugin.contrib.rollouts.keeper import Keeper
from openhands_rl_plugin.contrib.rollouts.node import ServiceNode
from openhands_rl_plugin.contrib.rollouts.queue import ConflictError, FullError, JobQueue
from openhands_rl_plugin.contrib.rollouts.requests import TaskRequest
from openhands_rl_plugin.contrib.rollouts.settings import ServiceOptions
from openhands_rl_plugin.contrib.rollouts.summaries import sessions_of, status_of, tasks_of
from openhands_rl_plugin.core.errors import ConfigError, StorageError
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.servers.bodies import BodyReader
from openhands_rl_plugin.core.servers.door import HEALTH, Door, Refusal
from openhands_rl_plugin.models.balancing.balancer import Balancer

_TOKEN = "x-polar-control-token"
_MOST_TASKS = 1000


@dataclass(frozen=True)
class RolloutDoor(Door):
    """As of the other servers; a key may come as Polar's clients send it."""

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """As in ``Door``."""
        if self.key and _TOKEN in headers:
            headers = {"x-api-key": headers[_TOKEN], **headers}
        return super().refusal(method, path, headers)


class Tasks:
    """The routes of tasks."""

    def __init__(self, queue: JobQueue, service: ServiceOptions) -> None:
        self._queue = queue
        self._service = service
        self._bodies = BodyReader()

    async def submit(self, request: Request) -> Response:
        """``POST /rollout/task/submit``."""
        asked = await self._bodies.read(await request.body(), TaskRequest.model_validate_json)
        # What cannot be played is said now, and not by each of its episodes.
        await asyncio.to_thread(self._check, asked)
        status = await asyncio.to_thread(self._queue.submit, asked)
        return JSONResponse({"task_id": asked.task_id, "status": status})

    def _check(self, asked: TaskRequest) -> None:
        options = asked.options(self._service, 0, "check")
        assert asked.task
        host_of(options.settings())

    async def get(self, request: Request) -> Response:
        """``GET /rollout/task/{task_id}``."""
        return _found(await asyncio.to_thread(self._queue.collect, request.path_params["task_id"]))

    async def delete(self, request: Request) -> Response:
        """``DELETE /rollout/task/{task_id}?register_if_missing=``."""
        missing = request.query_params.get("register_if_missing", "false").lower() in ("1", "true", "yes", "on")
        task_id = request.path_params["task_id"]
        if len(task_id) > 150:
            raise HTTPException(404, "Task not found")
        return _found(await asyncio.to_thread(self._queue.delete, task_id, register_if_missing=missing))

    async def status(self, _: Request) -> Response:
        """``GET /rollout/status``."""
        return JSONResponse(await asyncio.to_thread(status_of, self._queue.database))

    async def tasks(self, request: Request) -> Response:
        """``GET /tasks?status=&since=&limit=``."""
        asked = request.query_params
        try:
            limit, since = int(asked.get("limit", "200")), float(asked.get("since", "0"))
        except ValueError as error:
            raise HTTPException(400, "limit and since have to be numbers") from error
        if not 1 <= limit <= _MOST_TASKS:
            raise HTTPException(400, f"limit has to be between 1 and {_MOST_TASKS}")
        found = await asyncio.to_thread(tasks_of, self._queue.database, asked.get("status"), since, limit)
        return JSONResponse({"tasks": found})

    async def sessions(self, request: Request) -> Response:
        """``GET /tasks/{task_id}/sessions``."""
        task_id = request.path_params["task_id"]
        found = await asyncio.to_thread(sessions_of, self._queue.database, task_id)
        if found is None:
            raise HTTPException(404, "Task not found")
        return JSONResponse({"task_id": task_id, "sessions": found})


def build_app(
    queue: JobQueue,
    keeper: Keeper,
    service: ServiceOptions,
    started: Callable[[Callable[[], object]], None],
    balancer: Balancer | None = None,
) -> Starlette:
    """The application. ``started`` is given what ends the streams of events, to be called from any thread."""
    tasks, events = Tasks(queue, service), EventStream(queue.database)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok", "nodes": service.workers})

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        started(lambda: loop.call_soon_threadsafe(events.stop))
        kept = asyncio.create_task(keeper.run())
        yield
        kept.cancel()
        with suppress(asyncio.CancelledError):
            await kept

    return Starlette(
        routes=[
            Route(HEALTH, health),
            Route("/rollout/task/submit", tasks.submit, methods=["POST"]),
            Route("/rollout/task/{task_id}", tasks.get),
            Route("/rollout/task/{task_id}", tasks.delete, methods=["DELETE"]),
            Route("/rollout/status", tasks.status),
            Route("/tasks", tasks.tasks),
            Route("/tasks/{task_id}/sessions", tasks.sessions),
            Route("/events", events.stream),
            *ServiceNode(service, balancer).routes,
        ],
        exception_handlers=_HANDLERS,
        lifespan=lifespan,
    )


def _found(task: str | None) -> Response:
    if task is None:
        raise HTTPException(404, "Task not found")
    return Response(task, media_type="application/json")


def _refusal(status: int, message: str) -> Response:
    """``detail`` is where Polar's clients look, ``error`` where those of our other servers do."""
    said = redact_text(message)[:2000]
    return Response(
        json.dumps({"detail": said, "error": {"message": said, "code": status}}), status, media_type="application/json"
    )


async def _on_invalid(_: Request, error: ValidationError) -> Response:
    said = [f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors()[:3]]
    return _refusal(422, "; ".join(said))


async def _on_http(_: Request, error: HTTPException) -> Response:
    return _refusal(error.status_code, error.detail)


def _handler(status: int) -> Callable[[Request, Exception], Any]:
    async def answer(_: Request, error: Exception) -> Response:
        return _refusal(status, str(error))

    return answer


_HANDLERS: Mapping[Any, Callable[[Request, Any], Any]] = {
    ValidationError: _on_invalid,
    HTTPException: _on_http,
    ConflictError: _handler(409),
    FullError: _handler(503),
    ConfigError: _handler(422),
    StorageError: _handler(503),
}
