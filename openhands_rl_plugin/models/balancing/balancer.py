"""The proxy: ``/session/EPISODE/v1/...`` and ``/v1/...`` go to one of the servers, and to another where that fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.servers.listening import listening, serving
from openhands_rl_plugin.core.servers.metrics import Metrics
from openhands_rl_plugin.models.balancing.choice import ModelServer, OpenCall, ServerChoice

_LOG = redacting_logger(__name__)
_SENT = ("authorization", "content-type", "accept", "x-api-key")
_PASSED = ("content-type", "retry-after")
_AWAY = frozenset({502, 503, 504})
"""A server that is starting, stopping or gone behind its own proxy."""
_PAUSE = 0.2
_PROBE_SECONDS = 5.0
_MOST_BYTES = 256 * 1024**2


class Balancer:
    """``urls`` end with ``/v1``. ``timeout``: seconds of one call; ``patience``: seconds to wait for any server;
    ``probe``: seconds between two looks at an unhealthy one.

    An answer is passed on when it is whole, so that a call whose server dies is made again elsewhere; only a streamed
    one is passed on as it comes.
    """

    def __init__(
        self, urls: Sequence[str], *, timeout: float = 600.0, patience: float = 60.0, probe: float = _PROBE_SECONDS
    ) -> None:
        self.servers = tuple(ModelServer(url.rstrip("/")) for url in urls)
        self._choice = ServerChoice(self.servers)
        self._patience = patience
        self._looks: set[asyncio.Task[None]] = set()
        self._probe = probe
        self._free = asyncio.Event()
        self._free.set()
        self._lapse: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        secure = any(url.startswith("https:") for url in urls)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout, connect=10.0, pool=None), verify=secure, trust_env=secure, limits=limits
        )

    def app(self) -> Starlette:
        """The application; its lifespan looks at unhealthy servers."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self._loop = asyncio.get_running_loop()
            looking = asyncio.create_task(self._look_again())
            yield
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
            await self._client.aclose()

        methods = ["GET", "POST"]
        return Starlette(
            routes=[
                Route("/session/{episode}/v1/{path:path}", self.forward, methods=methods),
                Route("/v1/{path:path}", self.forward, methods=methods),
            ],
            lifespan=lifespan,
        )

    def hold(self, timeout: float, longest: float) -> int:
        """Begin no call until ``release``, for ``longest`` seconds at most: whoever holds them may have died. Once more
        begins these anew. How many are open after ``timeout`` seconds: if any is, calls go on. Blocks, in another
        thread.
        """
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(self._held(timeout, longest), self._loop).result()

    def release(self) -> None:
        """Let calls begin again. From another thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._go_on)

    async def _held(self, timeout: float, longest: float) -> int:
        until = time.monotonic() + timeout
        while True:
            self._free.clear()  # each time: who holds beside this may have given up, and let calls begin
            left = sum(server.open for server in self.servers)
            if left and time.monotonic() < until:
                await asyncio.sleep(_PAUSE)
                continue
            if left:
                self._go_on()
            else:
                self._hold_for(longest)
            return left

    def _hold_for(self, longest: float) -> None:
        def lapse() -> None:
            _LOG.warning("nobody resumed the calls of the model within %g s of the last pause: they go on", longest)
            self._go_on()

        if self._lapse is not None:
            self._lapse.cancel()
        self._lapse = asyncio.get_running_loop().call_later(longest, lapse)

    def _go_on(self) -> None:
        if self._lapse is not None:
            self._lapse.cancel()
        self._lapse = None
        self._free.set()

    async def forward(self, request: Request) -> Response:
        """The answer of a healthy server; 503, which clients try again, where there is none in time."""
        body = await request.body()
        headers = {name: request.headers[name] for name in _SENT if name in request.headers}
        episode, path = request.path_params.get("episode", ""), request.path_params["path"]
        tried: set[str] = set()
        until = time.monotonic() + self._patience
        while True:
            while not self._free.is_set():  # it may have been cleared again before this goes on
                await self._free.wait()
            server = self._choice.choose(episode, tried=tried)
            if server is None:
                if time.monotonic() > until:
                    named = ", ".join(each.url for each in self.servers)
                    return _refusal(f"no model server answers: {named}")
                tried.clear()
                await asyncio.sleep(_PAUSE)
                continue
            answer = await self._ask(server, request.method, path, body, headers)
            if answer is not None:
                return answer
            tried.add(server.url)

    async def _ask(
        self, server: ModelServer, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> Response | None:
        """``None`` where the server is away; it is skipped until it answers again."""
        with ExitStack() as opened:
            call = opened.enter_context(server.call())
            try:
                asked = self._client.build_request(method, f"{server.url}/{path}", content=body, headers=headers)
                answer = await self._client.send(asked, stream=True)
                if answer.status_code in _AWAY:
                    await answer.aclose()
                    return self._failed(server, f"status {answer.status_code}")
                passed = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
                # What is refused, or no completion, comes at once and says nothing of the speed.
                tells = method == "POST" and answer.is_success
                if "text/event-stream" in answer.headers.get("content-type", ""):
                    server.calls += 1
                    return _Streamed(answer, passed, call, opened.pop_all(), tells=tells)
                content = await _whole(answer)
                call.tells = tells
            except httpx.TransportError as error:
                return self._failed(server, describe(error))
        server.calls += 1
        return Response(content, answer.status_code, passed)

    def _failed(self, server: ModelServer, why: str) -> None:
        if server.healthy:
            _LOG.warning("the model server %s is away (%s); its calls go to the others", server.url, why)
        server.healthy = False
        server.failures += 1
        # A kept connection may have been closed by a server that is well.
        look = asyncio.create_task(self._look_at(server))
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(self._probe)
            await asyncio.gather(*(self._look_at(server) for server in self.servers if not server.healthy))

    async def _look_at(self, server: ModelServer) -> None:
        with suppress(httpx.HTTPError):
            answer = await self._client.get(f"{server.url}/models", timeout=10.0)
            # One that asks for a key is there.
            if answer.status_code not in _AWAY and answer.status_code != 500:
                _LOG.warning("the model server %s answers again", server.url)
                server.healthy = True
                server.forget()


@contextmanager
def running_balancer(balancer: Balancer, metrics: Metrics | None = None) -> Iterator[str]:
    """Serve it on loopback until the block ends; yields its URL, without ``/v1``. ``metrics`` learn of the servers."""
    if metrics is not None:
        _tell(balancer.servers, metrics)
    with (
        listening("127.0.0.1", 0) as listener,
        serving(balancer.app(), listener, max_body_bytes=_MOST_BYTES, lifespan="on", log_level="critical") as url,
    ):
        yield url


def _tell(servers: Sequence[ModelServer], metrics: Metrics) -> None:
    def each(field: str) -> list[tuple[dict[str, str], float]]:
        return [({"server": str(at)}, float(getattr(server, field))) for at, server in enumerate(servers)]

    metrics.read("model_server_healthy", "Whether a model server answers.", lambda: each("healthy"))
    metrics.read("model_server_open_calls", "Calls that it has not answered yet.", lambda: each("open"))
    metrics.read("model_server_calls_total", "Calls that it answered.", lambda: each("calls"), "counter")
    metrics.read("model_server_failures_total", "Calls that it did not.", lambda: each("failures"), "counter")


async def _whole(answer: httpx.Response) -> bytes:
    try:
        return await answer.aread()
    finally:
        await answer.aclose()


class _Streamed(StreamingResponse):
    """A stream as it comes. Its ``call`` is open until it ends, also where the client left before it began; one that
    was not heard to its end says nothing of the speed.
    """

    def __init__(
        self, answer: httpx.Response, headers: dict[str, str], call: OpenCall, opened: ExitStack, *, tells: bool
    ) -> None:
        self._answer, self._call, self._opened, self._tells = answer, call, opened, tells
        super().__init__(self._parts(), answer.status_code, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._opened:
            try:
                await super().__call__(scope, receive, send)
            finally:
                await self._answer.aclose()

    async def _parts(self) -> AsyncIterator[bytes]:
        async for part in self._answer.aiter_bytes():
            yield part
        self._call.tells = self._tells


def _refusal(message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "ServiceUnavailableError"}}, 503)
