"""The shop over HTTP: sessions, forks, and a server in a thread."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openhands_rl_plugin.contrib.webshop.engine import WebShop, WebShopSession
from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.servers import API_KEY, AccessRules, listening, required_key, serving

Index = Annotated[int, Field(ge=0, lt=2**53)]
SessionName = Annotated[str, Field(min_length=1, max_length=128)]


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


MAX_BODY_BYTES = 64 * 1024
_SESSION_NAME_BYTES = 8


def create_app(world: WebShop, *, max_sessions: int = 10_000) -> Starlette:
    """An application over `world`, which is shared and never changed, with at most `max_sessions` of its own.

    The session that was longest unused makes room for another one.
    """
    shop = _ShopRoutes(world, max_sessions)
    posts = {"/reset": shop.reset, "/step": shop.step, "/fork": shop.fork, "/close": shop.close}
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
        self._sessions: OrderedDict[str, WebShopSession] = OrderedDict()
        # The original protocol names no session: `idx` alone means the latest one that was started that way.
        self._latest: dict[int, str] = {}

    async def health(self, request: Request) -> Response:
        counts = {"sessions": len(self._sessions), "goals": len(self._world.goals)}
        return JSONResponse({"status": "ok", **counts, "world": self._world.options})

    async def fork(self, request: Request) -> Response:
        _, session = self._session(await _body(request, ShopRequest))
        return JSONResponse({"session": self._put(session.fork())})

    async def reset(self, request: Request) -> Response:
        body = await _body(request, ShopRequest)
        if body.idx is None or body.idx >= len(self._world.goals):
            raise HTTPException(422, f"'idx' has to be the index of one of {len(self._world.goals)} goals")
        session = self._world.session(body.idx)
        key = self._put(session, body.session)
        if body.session is None:
            self._latest[body.idx] = key
        info = {"goal_index": body.idx, "instruction": session.goal.instruction}
        return JSONResponse({"state": session.observation, "reward": 0.0, "done": False, "session": key, "info": info})

    async def step(self, request: Request) -> Response:
        body = await _body(request, StepBody)
        _, session = self._session(body)
        result, goal, info = session.step(body.action), session.goal, {}
        if result.done:
            info = {"goal_index": goal.index, "instruction": goal.instruction, "steps": session.steps, "purchase": None}
        if result.done and (bought := session.purchase) is not None:
            info["purchase"] = {**asdict(bought.breakdown), "asin": bought.asin, "options": dict(bought.options)}
        return JSONResponse({**result._asdict(), "info": info})

    async def close(self, request: Request) -> Response:
        body = await _body(request, ShopRequest)
        try:
            key, _ = self._session(body)
        except HTTPException:
            return JSONResponse(False)
        del self._sessions[key]
        return JSONResponse(True)

    def _put(self, session: WebShopSession, key: str | None = None) -> str:
        key = key or secrets.token_hex(_SESSION_NAME_BYTES)
        self._sessions[key] = session
        self._sessions.move_to_end(key)
        if len(self._sessions) > self._most:
            self._sessions.popitem(last=False)
        return key

    def _session(self, body: ShopRequest) -> tuple[str, WebShopSession]:
        """The request's session, which counts as a use, and its key. Raises ``HTTPException``."""
        if body.session is None and body.idx is None:
            raise HTTPException(422, "one of 'session', 'idx' is needed to name the session")
        key = self._latest.get(body.idx or 0) if body.session is None else body.session
        if key is None or key not in self._sessions:
            raise HTTPException(404, f"no session {key or body.idx}: start one with /reset")
        self._sessions.move_to_end(key)
        return key, self._sessions[key]


async def _body[Body: ShopRequest](request: Request, kind: type[Body]) -> Body:
    """The body as a `Body`. Raises ``HTTPException``. The server bounds its size."""
    try:
        return kind.model_validate_json(await request.body() or b"{}")
    except ValidationError as error:
        raise HTTPException(422, describe(error)) from error


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
