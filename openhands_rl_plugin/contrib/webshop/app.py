"""The shop as an ASGI application that speaks the simple protocol and AgentGym's on the same routes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus

from pydantic import JsonValue, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from openhands_rl_plugin.contrib.webshop import wire
from openhands_rl_plugin.contrib.webshop.engine import WebShop, WebShopSession
from openhands_rl_plugin.contrib.webshop.goals import SPLITS, Split
from openhands_rl_plugin.contrib.webshop.pages import page_html
from openhands_rl_plugin.contrib.webshop.sessions import SessionTable, TooManySessionsError, UnknownSessionError
from openhands_rl_plugin.core.errors import RLError

MAX_BODY_BYTES = 64 * 1024
_ENVIRONMENT_NUMBERS = 2**31
_SESSION_NAME_BYTES = 8


class BodyTooLargeError(RLError):
    """A request body is longer than any action needs."""

    def __init__(self) -> None:
        super().__init__(f"the request body is longer than {MAX_BODY_BYTES} bytes")


def create_app(
    world: WebShop,
    *,
    session_ttl_s: float = 1800.0,
    max_sessions: int = 10_000,
    evictable_after_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> Starlette:
    """An application over `world` with its own sessions.

    Args:
        world: the shop; shared, never changed.
        session_ttl_s: seconds without use after which a session expires.
        max_sessions: the most sessions at once; past it, finished or idle ones make room, else the answer is 429.
        evictable_after_s: seconds without use that count as idle when room is needed.
        clock: seconds that only grow.
    """
    sessions = SessionTable(limit=max_sessions, ttl_s=session_ttl_s, evictable_after_s=evictable_after_s, clock=clock)
    shop = _ShopRoutes(world, sessions)
    routes = [
        Route("/", shop.alive),
        Route("/health", shop.health),
        Route("/goals", shop.goals),
        Route("/create", shop.create, methods=["POST"]),
        Route("/reset", shop.reset, methods=["POST"]),
        Route("/step", shop.step, methods=["POST"]),
        Route("/fork", shop.fork, methods=["POST"]),
        Route("/close", shop.close, methods=["POST"]),
        Route("/list_envs", shop.list_environments),
        Route("/observation", shop.observation),
        Route("/available_actions", shop.available_actions),
        Route("/instruction_text", shop.instruction_text),
        Route("/state", shop.state),
    ]
    statuses: Mapping[type[RLError], HTTPStatus] = {
        wire.BadFieldError: HTTPStatus.UNPROCESSABLE_ENTITY,
        UnknownSessionError: HTTPStatus.NOT_FOUND,
        TooManySessionsError: HTTPStatus.TOO_MANY_REQUESTS,
        BodyTooLargeError: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    }
    handlers = {error: partial(_error_answer, status) for error, status in statuses.items()}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _error_answer(status: HTTPStatus, request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=status)


class _ShopRoutes:
    """The handlers. None of them awaits between reading and writing a session, so no lock is needed."""

    def __init__(self, world: WebShop, sessions: SessionTable) -> None:
        self._world = world
        self._sessions = sessions
        # The original protocol names no session: `idx` alone means the latest one that was started that way.
        self._latest: dict[int, str] = {}

    async def alive(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def health(self, request: Request) -> Response:
        counts = {"sessions": len(self._sessions), "goals": len(self._world.goals)}
        return JSONResponse({"status": "ok", **counts})

    async def goals(self, request: Request) -> Response:
        wanted = request.query_params.get("split")
        splits = SPLITS if wanted is None else (_split(wanted),)
        indices = [index for split in splits for index in self._world.goal_indices(split)]
        return JSONResponse({"count": len(indices), "indices": indices})

    async def create(self, request: Request) -> Response:
        env_idx = self._new_environment()
        goal_index = env_idx % len(self._world.goals)
        self._sessions.put(wire.environment_key(env_idx), self._world.session(goal_index))
        return JSONResponse(env_idx)

    def _new_environment(self) -> int:
        env_idx = secrets.randbelow(_ENVIRONMENT_NUMBERS)
        while wire.environment_key(env_idx) in self._sessions:
            env_idx = secrets.randbelow(_ENVIRONMENT_NUMBERS)
        return env_idx

    async def fork(self, request: Request) -> Response:
        body = await _body(request, _REFERENCE)
        twin = self._sessions.get(self._key(body)).fork()
        if body.speaks_agentgym:
            env_idx = self._new_environment()
            self._sessions.put(wire.environment_key(env_idx), twin)
            return JSONResponse(env_idx)
        key = secrets.token_hex(_SESSION_NAME_BYTES)
        self._sessions.put(key, twin)
        return JSONResponse({"session": key})

    async def reset(self, request: Request) -> Response:
        body = await _body(request, _RESET)
        if body.speaks_agentgym:
            key = self._key(body)
            goal_index = body.session_id
            if goal_index is None:
                goal_index = self._sessions.get(key).goal.index
            elif key not in self._sessions:
                raise UnknownSessionError(key)
            return JSONResponse([self._start(key, goal_index).observation, None])
        if body.idx is None:
            raise wire.BadFieldError("'idx' is missing: the index of the goal to start")
        key = body.session or secrets.token_hex(_SESSION_NAME_BYTES)
        session = self._start(key, body.idx)
        if body.session is None:
            self._latest[body.idx] = key
        return JSONResponse(wire.simple_reset_answer(key, session))

    def _start(self, key: str, goal_index: int) -> WebShopSession:
        if goal_index >= len(self._world.goals):
            raise wire.BadFieldError(f"there are {len(self._world.goals)} goals, so no goal {goal_index}")
        session = self._world.session(goal_index)
        self._sessions.put(key, session)
        return session

    def _key(self, reference: wire.SessionReference) -> str:
        """The key of the request's session; raises BadFieldError or UnknownSessionError."""
        key = reference.key()
        if key is not None:
            return key
        if reference.idx is None:
            raise wire.BadFieldError("one of 'session', 'idx', 'env_idx' is needed to say which session is meant")
        if reference.idx not in self._latest:
            raise UnknownSessionError(f"idx {reference.idx}")
        return self._latest[reference.idx]

    async def step(self, request: Request) -> Response:
        body = await _body(request, _STEP)
        session = self._sessions.get(self._key(body))
        result = session.step(body.action)
        if body.speaks_agentgym:
            return JSONResponse(wire.agentgym_step_answer(result))
        return JSONResponse(wire.simple_step_answer(session, result))

    async def close(self, request: Request) -> Response:
        reference = await _body(request, _REFERENCE)
        try:
            closed = self._sessions.close(self._key(reference))
        except UnknownSessionError:
            closed = False
        return JSONResponse(closed)

    async def list_environments(self, request: Request) -> Response:
        numbers = (wire.environment_index(key) for key in self._sessions.held())
        return JSONResponse([number for number in numbers if number is not None])

    async def observation(self, request: Request) -> Response:
        return JSONResponse(self._named_in_query(request).observation)

    async def available_actions(self, request: Request) -> Response:
        page = self._named_in_query(request).page
        clickables: list[JsonValue] = [text.lower() for text in page.clickables]
        return JSONResponse({"has_search_bar": page.has_search_bar, "clickables": clickables})

    async def instruction_text(self, request: Request) -> Response:
        return JSONResponse(f"Instruction: {self._named_in_query(request).goal.instruction}")

    async def state(self, request: Request) -> Response:
        session = self._named_in_query(request)
        return JSONResponse(
            {
                "url": f"{request.base_url}{session.page.path}",
                "html": page_html(session.page),
                "instruction_text": f"Instruction: {session.goal.instruction}",
            }
        )

    def _named_in_query(self, request: Request) -> WebShopSession:
        return self._sessions.get(self._key(_query_reference(request)))


def _split(name: str) -> Split:
    for split in SPLITS:
        if split == name:
            return split
    raise wire.BadFieldError(f"'split' is one of {', '.join(SPLITS)}, not '{name[:40]}'")


_RESET = TypeAdapter(wire.ResetBody)
_STEP = TypeAdapter(wire.StepBody)
_REFERENCE = TypeAdapter(wire.SessionReference)


async def _body[Body](request: Request, kind: TypeAdapter[Body]) -> Body:
    """The body as a `Body`; raises BadFieldError or BodyTooLargeError."""
    received = bytearray()
    async for chunk in request.stream():
        received += chunk
        if len(received) > MAX_BODY_BYTES:
            raise BodyTooLargeError
    try:
        return kind.validate_json(bytes(received) or b"{}")
    except ValidationError as error:
        raise wire.BadFieldError(_first_problem(error)) from error


def _query_reference(request: Request) -> wire.SessionReference:
    try:
        return _REFERENCE.validate_strings(dict(request.query_params))
    except ValidationError as error:
        raise wire.BadFieldError(_first_problem(error)) from error


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, problem["loc"])) or "body"
    return f"'{field}': {problem['msg']}"
