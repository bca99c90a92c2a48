"""The shop over HTTP: sessions, and a server in a thread."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openhands_rl_plugin.contrib.webshop.engine import WebShop, WebShopSession
from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.servers import API_KEY, AccessRules, listening, required_key, serving


class ShopRequest(BaseModel):
    """Body of `POST /reset` (`idx`: the goal), and with the `session` that it returns of `/step` and `/close`."""

    model_config = ConfigDict(strict=True, frozen=True)

    session: str = Field(default="", max_length=128)
    idx: int = Field(default=-1, ge=-1)
    action: str = ""


MAX_BODY_BYTES = 64 * 1024
_SESSION_NAME_BYTES = 8


def create_app(world: WebShop, *, max_sessions: int = 10_000) -> Starlette:
    """An application over `world`, which is shared and never changed, with at most `max_sessions` of its own.

    The oldest session makes room for another one.
    """
    shop = _ShopRoutes(world, max_sessions)
    posts = {"/reset": shop.reset, "/step": shop.step, "/close": shop.close}
    routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()]
    return Starlette(routes=[Route("/health", shop.health), *routes], exception_handlers={HTTPException: _refuse})


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code)


class _ShopRoutes:
    """The handlers. None of them awaits between reading and writing a session, so no lock is needed."""

    def __init__(self, world: WebShop, most: int) -> None:
        self._world = world
        self._most = most
        self._sessions: dict[str, WebShopSession] = {}

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "sessions": len(self._sessions), "goals": len(self._world.goals)})

    async def reset(self, request: Request) -> Response:
        index = (await _body(request)).idx
        if not 0 <= index < len(self._world.goals):
            raise HTTPException(422, f"'idx' has to be the index of one of {len(self._world.goals)} goals")
        session = self._world.session(index)
        info = {"goal_index": index, "instruction": session.goal.instruction}
        body = {"state": session.observation, "reward": 0.0, "done": False, "session": self._put(session), "info": info}
        return JSONResponse(body)

    async def step(self, request: Request) -> Response:
        body = await _body(request)
        session = self._session(body)
        result, goal = session.step(body.action), session.goal
        info: dict[str, object] = {}
        if result.done:
            info = {"goal_index": goal.index, "instruction": goal.instruction, "steps": session.steps, "purchase": None}
        if result.done and (bought := session.purchase) is not None:
            info["purchase"] = {**asdict(bought.breakdown), "asin": bought.asin, "options": dict(bought.options)}
        return JSONResponse({**result._asdict(), "info": info})

    async def close(self, request: Request) -> Response:
        return JSONResponse(self._sessions.pop((await _body(request)).session, None) is not None)

    def _put(self, session: WebShopSession) -> str:
        key = secrets.token_hex(_SESSION_NAME_BYTES)
        self._sessions[key] = session
        if len(self._sessions) > self._most:
            del self._sessions[next(iter(self._sessions))]
        return key

    def _session(self, body: ShopRequest) -> WebShopSession:
        """The request's session. Raises ``HTTPException``."""
        if body.session not in self._sessions:
            raise HTTPException(404, f"no session {body.session!r}: start one with /reset")
        return self._sessions[body.session]


async def _body(request: Request) -> ShopRequest:
    """The body. Raises ``HTTPException``. The server bounds its size."""
    try:
        return ShopRequest.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise HTTPException(422, describe(error)) from error


_STOP_SECONDS = 2
"""A request takes milliseconds, so that is enough to finish running ones."""


@contextmanager
def running_webshop(
    world: WebShop | None = None, *, host: str = "127.0.0.1", port: int = 0, api_key_env: str = API_KEY
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
