"""The studio's server: its document, its API and its modules, in a thread of its caller's process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple
from urllib.parse import urlencode

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openhands_rl_plugin.contrib.studio.access import COOKIE, SIGN_IN, StudioConfig, Tickets
from openhands_rl_plugin.contrib.studio.document import HEADERS, STATIC, content_security_policy, document
from openhands_rl_plugin.contrib.studio.episode import EpisodeResource
from openhands_rl_plugin.contrib.studio.listing import LabelResource, ListResource
from openhands_rl_plugin.contrib.studio.replies import ERROR_HANDLERS, reply
from openhands_rl_plugin.contrib.studio.reports import ExportResource
from openhands_rl_plugin.contrib.studio.reports import write_evaluation_report as write_evaluation_report
from openhands_rl_plugin.contrib.studio.reports import write_run_report as write_run_report
from openhands_rl_plugin.contrib.studio.runs import AdapterResource, EvaluationResource, EventResource, RunResource
from openhands_rl_plugin.contrib.studio.sources import EpisodeShelf, StudioSources, TokenText
from openhands_rl_plugin.core.servers import HEALTH, STOP_SECONDS, listening, serving

Endpoint = Callable[[Request], Awaitable[Response]]

_COMPRESSED_FROM = 1024


def build_app(
    config: StudioConfig,
    sources: StudioSources,
    tickets: Tickets,
    key: str = "",
    started: Callable[[Callable[[], object]], None] | None = None,
) -> Starlette:
    """The application. Its lifespan closes the sources. Raises ``ConfigError`` for a tokenizer that cannot be read.

    ``started`` is given what ends the streams of events, to be called from any thread.
    """
    entrance, events = Entrance(tickets, key), EventResource(sources)
    shelf, text = EpisodeShelf(sources), TokenText(config.tokenizer, sources.adapters)
    episodes, listing = EpisodeResource(sources, shelf, text), ListResource(sources, shelf)
    runs, evaluations = RunResource(sources), EvaluationResource(sources)

    async def about(request: Request) -> Response:
        folders = {"runs": sources.runs, "evaluations": sources.evaluations, "adapters": sources.adapters}
        named = {name: sorted(each) for name, each in folders.items()}
        return reply(request, {"stores": list(sources.stores), **named, "waiting": list(sources.waiting())})

    resources: Mapping[str, Endpoint] = {
        "/api/about": about,
        "/api/episodes": listing.page,
        "/api/facets": listing.facets,
        # An id may have slashes, so what stands behind it is looked for first.
        "/api/episodes/{id:path}/nodes/{node:int}/tokens": episodes.tokens,
        "/api/episodes/{id:path}/nodes": episodes.nodes,
        "/api/episodes/{id:path}": episodes.header,
        "/api/groups/{id:path}": episodes.group,
        "/api/compare": listing.compared,
        "/api/export": ExportResource(shelf, text).get,
        "/api/runs": runs.all,
        "/api/runs/{id:path}/metrics": runs.metrics,
        "/api/runs/{id:path}": runs.one,
        "/api/adapters": AdapterResource(sources).get,
        "/api/evaluations": evaluations.all,
        "/api/evaluations/{id:path}": evaluations.one,
        "/api/events": events.stream,
    }

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        if started is not None:
            started(lambda: loop.call_soon_threadsafe(events.stop))
        watch = asyncio.create_task(sources.watch())
        yield
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await sources.close()

    return Starlette(
        routes=[
            Route(HEALTH, _healthy),
            Route(SIGN_IN, entrance.sign_in, methods=["POST"]),
            *(Route(path, endpoint) for path, endpoint in resources.items()),
            Route("/api/labels", LabelResource(sources, config.author).post, methods=["POST"]),
            Route("/api/{rest:path}", _unknown),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/{page:path}", entrance.page),
        ],
        middleware=[Middleware(_Headers), Middleware(GZipMiddleware, minimum_size=_COMPRESSED_FROM, compresslevel=5)],
        exception_handlers=ERROR_HANDLERS,
        lifespan=lifespan,
    )


class Entrance:
    """The document, and how a browser becomes one that may read."""

    def __init__(self, tickets: Tickets, key: str) -> None:
        self._tickets = tickets
        self._key = key

    async def page(self, request: Request) -> Response:
        """The document; a token in its address is taken out of it, and the browser gets a cookie instead."""
        rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
        token = request.query_params.get("token")
        if token is None:
            headers = {"Content-Security-Policy": content_security_policy(), "Cache-Control": "no-cache"}
            return HTMLResponse(document(), headers=headers)
        # One slash, so that no address of another server can stand there.
        clean = "/" + request.url.path.lstrip("/\\") + (f"?{urlencode(rest)}" if rest else "")
        response = RedirectResponse(clean, 303)
        return self._let_in(response) if self._tickets.same(token, self._tickets.token) else response

    async def sign_in(self, request: Request) -> Response:
        """``{"key": ...}``, the key or the link's token, for a cookie."""
        try:
            given = str((await request.json())["key"])
        except (ValueError, TypeError, KeyError, RecursionError):
            given = ""
        if not any(secret and Tickets.same(given, secret) for secret in (self._key, self._tickets.token)):
            raise HTTPException(401, "The key or token is wrong.")
        return self._let_in(Response(status_code=204))

    def _let_in(self, response: Response) -> Response:
        response.headers["Cache-Control"] = "no-store"
        response.set_cookie(COOKIE, self._tickets.cookie, httponly=True, samesite="strict", path="/")
        return response


async def _healthy(_: Request) -> Response:
    return Response("ok", media_type="text/plain")


async def _unknown(_: Request) -> Response:
    raise HTTPException(404, "the API has no such path")


class _Headers:
    """Security headers on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                # Of whatever is opened by itself, an error or a module: nothing may run in it.
                headers.setdefault("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        await self._app(scope, receive, with_headers)


class RunningStudio(NamedTuple):
    """``url``: without a token; ``link`` opens a browser."""

    url: str
    tickets: Tickets

    @property
    def link(self) -> str:
        """The address with the token."""
        return f"{self.url}/?token={self.tickets.token}"


@contextmanager
def running_studio(config: StudioConfig, sources: StudioSources) -> Iterator[RunningStudio]:
    """A server in a background thread, which closes ``sources`` at the end.

    Raises ``ConfigError`` for a public host without a key and for a tokenizer that cannot be read,
    ``PortUnavailableError`` when the port is taken.
    """
    tickets = Tickets()
    access = config.access(tickets)
    stops: list[Callable[[], object]] = []
    app = build_app(config, sources, tickets, access.key, stops.append)
    with (
        listening(config.host, config.port) as listener,
        serving(
            app,
            listener,
            access=access,
            max_body_bytes=config.max_body_bytes,
            log_level="critical",
            lifespan="on",
            timeout_graceful_shutdown=STOP_SECONDS,
        ) as url,
    ):
        try:
            yield RunningStudio(url, tickets)
        finally:
            for stop in stops:
                stop()
