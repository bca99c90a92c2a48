"""The shop over HTTP: sessions, forks, and a server in a thread."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openhands_rl_plugin.contrib.webshop.engine import StepResult, WebShop, WebShopSession
from openhands_rl_plugin.core.errors import RLError, describe
from openhands_rl_plugin.core.servers import API_KEY, AccessRules, listening, required_key, serving

Index = Annotated[int, Field(ge=0, lt=2**53)]
SessionName = Annotated[str, Field(min_length=1, max_length=128)]


class BadFieldError(RLError):
    """A request lacks a field or has a wrong one."""


class ShopRequest(BaseModel):
    """Body of `POST /reset` (`idx`: the goal), `/step`, `/fork` and `/close`.

    `idx` without `session` means the latest session that was started so.
    """

    model_config = ConfigDict(strict=True, frozen=True)

    session: SessionName | None = None
    idx: Index | None = None


class StepBody(ShopRequest):
    """Body of `POST /step`."""

    action: str


def reset_response(key: str, session: WebShopSession) -> dict[str, JsonValue]:
    """The response to `POST /reset`."""
    return {
        "state": session.observation,
        "reward": 0.0,
        "done": False,
        "session": key,
        "info": {"goal_index": session.goal.index, "instruction": session.goal.instruction},
    }


def step_response(session: WebShopSession, result: StepResult) -> dict[str, JsonValue]:
    """The response to `POST /step`; `info` is filled when the episode is done."""
    return {
        "state": result.state,
        "reward": result.reward,
        "done": result.done,
        "truncated": result.truncated,
        "info": _evidence(session) if result.done else {},
    }


def _evidence(session: WebShopSession) -> dict[str, JsonValue]:
    bought = session.purchase
    parts = asdict(bought.breakdown) | {"asin": bought.asin, "options": dict(bought.options)} if bought else None
    goal = session.goal
    return {"goal_index": goal.index, "instruction": goal.instruction, "steps": session.steps, "purchase": parts}


class UnknownSessionError(RLError):
    """No session has that key: it was never started, was closed, or made room for others."""

    def __init__(self, key: str) -> None:
        super().__init__(f"no session '{key}': start one with /reset or /create")


class SessionTable:
    """Sessions by key. Where there are ``limit``, the one that was longest unused makes room. For one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: OrderedDict[str, WebShopSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def put(self, key: str, session: WebShopSession) -> None:
        """Start or replace the session of `key`."""
        self._sessions[key] = session
        self._sessions.move_to_end(key)
        if len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)

    def get(self, key: str) -> WebShopSession:
        """The session of `key`, which counts as a use; raises UnknownSessionError."""
        if key not in self._sessions:
            raise UnknownSessionError(key)
        self._sessions.move_to_end(key)
        return self._sessions[key]

    def close(self, key: str) -> bool:
        """Remove the session of `key`; returns whether there was one."""
        return self._sessions.pop(key, None) is not None


MAX_BODY_BYTES = 64 * 1024
_SESSION_NAME_BYTES = 8


def create_app(world: WebShop, *, max_sessions: int = 10_000) -> Starlette:
    """An application over `world`, which is shared and never changed, with at most `max_sessions` of its own."""
    sessions = SessionTable(max_sessions)
    shop = _ShopRoutes(world, sessions)
    routes = [
        Route("/health", shop.health),
        Route("/reset", shop.reset, methods=["POST"]),
        Route("/step", shop.step, methods=["POST"]),
        Route("/fork", shop.fork, methods=["POST"]),
        Route("/close", shop.close, methods=["POST"]),
    ]
    statuses: Mapping[type[RLError], HTTPStatus] = {
        BadFieldError: HTTPStatus.UNPROCESSABLE_ENTITY,
        UnknownSessionError: HTTPStatus.NOT_FOUND,
    }
    handlers = {error: partial(_error_response, status) for error, status in statuses.items()}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _error_response(status: HTTPStatus, request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=status)


class _ShopRoutes:
    """The handlers. None of them awaits between reading and writing a session, so no lock is needed."""

    def __init__(self, world: WebShop, sessions: SessionTable) -> None:
        self._world = world
        self._sessions = sessions
        # The original protocol names no session: `idx` alone means the latest one that was started that way.
        self._latest: dict[int, str] = {}

    async def health(self, request: Request) -> Response:
        counts = {"sessions": len(self._sessions), "goals": len(self._world.goals)}
        return JSONResponse({"status": "ok", **counts, "world": self._world.options})

    async def fork(self, request: Request) -> Response:
        key = secrets.token_hex(_SESSION_NAME_BYTES)
        self._sessions.put(key, self._sessions.get(self._key(await _body(request, ShopRequest))).fork())
        return JSONResponse({"session": key})

    async def reset(self, request: Request) -> Response:
        body = await _body(request, ShopRequest)
        if body.idx is None:
            raise BadFieldError("'idx' is missing: the index of the goal to start")
        key = body.session or secrets.token_hex(_SESSION_NAME_BYTES)
        if body.idx >= len(self._world.goals):
            raise BadFieldError(f"there are {len(self._world.goals)} goals, so no goal {body.idx}")
        session = self._world.session(body.idx)
        self._sessions.put(key, session)
        if body.session is None:
            self._latest[body.idx] = key
        return JSONResponse(reset_response(key, session))

    def _key(self, body: ShopRequest) -> str:
        """The key of the request's session; raises BadFieldError or UnknownSessionError."""
        if body.session is not None:
            return body.session
        if body.idx is None:
            raise BadFieldError("one of 'session', 'idx' is needed to say which session is meant")
        if body.idx not in self._latest:
            raise UnknownSessionError(f"idx {body.idx}")
        return self._latest[body.idx]

    async def step(self, request: Request) -> Response:
        body = await _body(request, StepBody)
        session = self._sessions.get(self._key(body))
        return JSONResponse(step_response(session, session.step(body.action)))

    async def close(self, request: Request) -> Response:
        body = await _body(request, ShopRequest)
        try:
            closed = self._sessions.close(self._key(body))
        except UnknownSessionError:
            closed = False
        return JSONResponse(closed)


async def _body[Body: ShopRequest](request: Request, kind: type[Body]) -> Body:
    """The body as a `Body`; raises BadFieldError. The server bounds its size."""
    try:
        return kind.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise BadFieldError(describe(error)) from error


_STOP_SECONDS = 2
"""A request takes milliseconds, so that is enough to finish running ones."""


@contextmanager
def running_webshop(
    world: WebShop | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    api_key_env: str = API_KEY,
) -> Iterator[str]:
    """Serve the shop from a background thread and yield its base URL, `http://host:port`; stop on exit.

    Args:
        world: the shop; the default one when None.
        host: the address to listen on; any but loopback needs a key.
        port: the port; 0 takes a free one.
        api_key_env: the environment variable with the key that clients must send; unset: no key is required.

    Raises:
        ConfigError: a public host has no key.
        PortUnavailableError: the address cannot be listened on; the message names the remedy.
    """
    rules = AccessRules(required_key(host, api_key_env, protects="its sessions"))
    with listening(host, port) as listener:
        app = create_app(world or WebShop())
        with serving(
            app,
            listener,
            access=rules,
            max_body_bytes=MAX_BODY_BYTES,
            lifespan="off",
            timeout_graceful_shutdown=_STOP_SECONDS,
        ) as url:
            yield url
