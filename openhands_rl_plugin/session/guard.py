"""What stands in front of the gateway's handlers: who is let in, limits, errors as replies, metrics, an access log."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware

from openhands_rl_plugin.core.errors import CaughtFailure, StorageError, boundary
from openhands_rl_plugin.core.redaction import RedactingFilter
from openhands_rl_plugin.core.servers import HEALTH, METRICS, RequestMetrics
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.session.client_sessions import TooManySessions
from openhands_rl_plugin.session.gateway_config import GatewayConfig
from openhands_rl_plugin.session.model_server import UpstreamError
from openhands_rl_plugin.session.recorder import unexpected
from openhands_rl_plugin.session.replies import Reply, error_reply

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_LEFT = 499
_UNREAD = "UnsupportedMediaType"


class RequestGuard:
    """The middlewares of the gateway. ``busy``: how many requests are in flight for clients that left."""

    def __init__(self, config: GatewayConfig, metrics: RequestMetrics, busy: Callable[[], int]) -> None:
        self._config = config
        self._door = config.access()
        self._metrics = metrics
        self._left = busy
        self._in_flight = 0

    @property
    def busy(self) -> int:
        """How many requests are in flight, also to the model server for clients that left."""
        return self._in_flight + self._left()

    @property
    def middlewares(self) -> Sequence[Middleware]:
        """The outermost first."""
        return (self._observe, self._last_resort, self._let_in)

    @web.middleware
    async def _observe(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        started, status = time.perf_counter(), _LEFT
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            route = resource.canonical if resource is not None else "none"
            seconds = time.perf_counter() - started
            peer = request.transport.get_extra_info("peername") if request.transport is not None else None
            self._metrics.ended(request.method, request.rel_url.raw_path, status, seconds, peer, route)

    @web.middleware
    async def _last_resort(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors that nobody expected, in OpenAI's format."""
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "gateway"):
                return await handler(request)
        except CaughtFailure as caught:
            return response_of(unexpected(caught))

    @web.middleware
    async def _let_in(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check who asks, receive the body, and check the number of requests in flight; errors in OpenAI's format."""
        try:
            headers = {name.lower(): ",".join(request.headers.getall(name)) for name in request.headers}
            if (refused := self._door.refusal(request.method, request.path, headers)) is not None:
                return response_of(error_reply(refused.status, refused.message, refused.kind))
            if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
                # It would be a thousand times as large as it announces.
                return response_of(error_reply(415, "Compressed bodies are not read: send it as it is.", _UNREAD))
            await self._receive(request)
            if request.path in (HEALTH, METRICS):
                return await handler(request)
            if (busy := self.busy) >= self._config.max_in_flight:
                message = f"The gateway has {busy} requests in flight; retry later or raise --max-in-flight."
                return response_of(error_reply(503, message, "ServiceUnavailableError", {"retry-after": "1"}))
            self._in_flight += 1
            try:
                return await handler(request)
            finally:
                self._in_flight -= 1
        except UpstreamError as error:
            return response_of(error.reply)
        except TooManySessions as error:
            message = f"{error} The gateway's --max-open-sessions bounds them."
            return response_of(error_reply(429, message, "RateLimitError", {"retry-after": "60"}))
        except StorageError as error:
            return response_of(error_reply(503, str(error), "ServiceUnavailableError"))
        except web.HTTPRequestEntityTooLarge:
            message = f"The request body exceeds {self._config.max_body_bytes} bytes; raise --max-body-bytes."
            return response_of(error_reply(413, message, "BadRequestError"))
        except web.HTTPException as error:
            return response_of(
                error_reply(error.status, f"{request.method} {request.path}: {error.reason}", "NotFoundError")
            )

    async def _receive(self, request: web.Request) -> None:
        if not request.can_read_body:
            return
        if (request.content_length or 0) > self._config.max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._config.max_body_bytes, request.content_length or 0)
        try:
            await request.read()
        except (web.RequestPayloadError, aiohttp.ClientPayloadError, ConnectionError) as error:
            raise web.HTTPBadRequest(reason=f"the body broke off ({type(error).__name__})") from error


def library_logger() -> logging.Logger:
    """For aiohttp: a request that is no HTTP is one line, without the traceback of the parser."""
    logger = logging.getLogger(f"{__name__}.http")
    if not logger.filters:
        logger.addFilter(_without_tracebacks)
        logger.addFilter(RedactingFilter())
    return logger


def _without_tracebacks(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
        record.msg, record.args = "a request was refused: it is no valid HTTP (%s)", (type(error).__name__,)
    return True


def response_of(reply: Reply) -> web.Response:
    """A reply as aiohttp sends it."""
    return web.Response(
        status=reply.status, body=reply.body, headers={**reply.headers, "content-type": reply.content_type}
    )
