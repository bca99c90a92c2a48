"""HTTP servers: who may use one, what stands in front of an ASGI application, and serving it from a thread.

They are made for this machine and its network. A public server belongs behind nginx, which bounds slow clients.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from openhands_rl_plugin.core.errors import (
    DEBUG,
    CaughtFailure,
    ConfigError,
    InfrastructureError,
    RLError,
    boundary,
    describe,
)
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import FailureKind

if TYPE_CHECKING:
    import uvicorn
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOG = redacting_logger(__name__)
API_KEY = "OPENHANDS_RL_API_KEY"
"""The environment variable of the key that clients of a server must send, unless an option names another."""
HEALTH = "/health"
STOP_SECONDS = 5
"""Time for running requests to end when the server is stopped."""
_START_SECONDS = 30.0
"""Far more than a start takes; until then a lifespan may open its store."""
_KEY_REMEDY = "start the server with a key and send it"
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:@/\s]+))(?::\d*)?")

Refusal = tuple[int, str, str]
"""Why a request is not answered: an HTTP status, one line, and the kind of error."""


@dataclass(frozen=True)
class AccessRules:
    """Checks a request by its headers. ``key``: what clients must send; empty: none is asked for.

    A key comes as ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``; ``/health`` needs none. Without one a browser is
    the danger: any page may send requests to this machine, and a name that resolves to 127.0.0.1 makes them its own
    (DNS rebinding). So the ``Host`` has to be loopback, an ``Origin`` the server's own, and a body JSON, which a page
    cannot send to another origin unasked.
    """

    key: str = ""

    def refusal(self, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
        """Why the request is refused, ``None`` if it is not. ``headers`` have lower-case names."""
        if self.key:
            open_to_all = path == HEALTH and method in ("GET", "HEAD")
            if open_to_all or self._has_key(headers):
                return None
            return 401, "The API key is missing or wrong.", "Unauthorized"
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_loopback(host_name(host)):
            return 403, f"The host {host[:100]!r} is not this machine's loopback; {_KEY_REMEDY}.", "Forbidden"
        foreign = origin is not None and origin.lower() != f"http://{host.lower()}"
        if foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            return 403, f"Web pages of other origins are refused; {_KEY_REMEDY}.", "Forbidden"
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if method not in ("GET", "HEAD", "OPTIONS") and has_body and not is_json(headers.get("content-type", "")):
            message = f"The body has to be sent as Content-Type: application/json, or {_KEY_REMEDY}."
            return 415, message, "UnsupportedMediaType"
        return None

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        sent = [headers.get(name, "").encode("utf-8", "surrogateescape") for name in ("authorization", "x-api-key")]
        wanted = f"Bearer {self.key}".encode(), self.key.encode()
        return any([*map(hmac.compare_digest, sent, wanted)])


def required_key(host: str, variable: str, *, protects: str) -> str:
    """The key in the environment variable ``variable``, empty for none. The one rule of all servers.

    Raises ``ConfigError`` when there is no key and ``host`` is reachable from the network; ``protects`` says what
    anybody there could use then.
    """
    key = os.environ.get(variable, "")
    if not key and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: others on the network could use {protects}; export "
            f"{variable or 'a key and name it with --api-key-env'}=..., or listen on 127.0.0.1"
        )
    return key


def named_key(variable: str, option: str) -> str:
    """The key in the environment variable that ``option`` names, empty for none. Raises ``ConfigError``."""
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ConfigError(f"{option}: the environment variable {variable} is not set; export {variable}=...")
    return sendable_key(key, option)


def sendable_key(key: str, option: str) -> str:
    """The key. Raises ``ConfigError`` for one that no HTTP header can hold."""
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{option}: no HTTP header may have the characters of the key: see that no line end is in it")
    return key


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's own, reachable from nowhere else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_name(host: str) -> str:
    """``127.0.0.1:8100`` -> ``127.0.0.1``; ``[::1]:8100`` -> ``::1``; empty for what is no host."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]) if found else ""


def is_json(content_type: str) -> bool:
    """Whether a ``Content-Type`` is that of JSON, which a page cannot send to another origin unasked."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


async def read_body[T](body: bytes, parse: Callable[[bytes], T]) -> T:
    """What ``parse`` makes of ``body``, a long one in a thread; its errors pass through."""
    return parse(body) if len(body) <= 2**18 else await asyncio.to_thread(parse, body)


def note_failure(error: BaseException) -> str:
    """Log in one line what nobody expected, with its traceback where ``DEBUG`` is set.

    The client gets a number that leads to the line, and nothing else.
    """
    number, shown = secrets.token_hex(4), error if os.environ.get(DEBUG) else None
    _LOG.error("request %s failed: %s (%s=1 shows where)", number, describe(error), DEBUG, exc_info=shown)
    return f"The server failed; its log has the cause under {number}."


class GuardMiddleware:
    """Starlette middleware: access, bodies of bounded size, and errors in OpenAI's form.

    The application gets a request when its body has arrived.
    """

    def __init__(self, app: ASGIApp, access: AccessRules | None = None, *, max_body_bytes: int = 2**24) -> None:
        self._app = app
        self._access = access or AccessRules()
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0
        failed: list[Message] = []

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            # Frameworks answer for an exception before they let it through, in another form.
            if status == 500:
                failed.append(message)
            else:
                await send(message)

        try:
            with boundary(FailureKind.INFRASTRUCTURE, "server"):
                await self._answer(scope, receive, observed)
            for message in failed:
                await send(message)
        except RLError as error:
            reason = note_failure(error.__cause__ if isinstance(error, CaughtFailure) and error.__cause__ else error)
            if status in (0, 500):
                await error_response(500, reason, "InternalServerError")(scope, receive, send)
        except asyncio.CancelledError:
            # The server stops, and waits no longer; what a client has half of is cut off.
            if not status:
                stopping = error_response(503, "The server is stopping.", "ServiceUnavailableError")
                await stopping(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:  # one that is given several times is joined, so that no check sees half
            key, text = name.decode("latin-1").lower(), value.decode("utf-8", "surrogateescape")
            headers[key] = f"{headers[key]},{text}" if key in headers else text
        if (refused := self._access.refusal(scope["method"], scope["path"], headers)) is not None:
            return await error_response(*refused)(scope, receive, send)
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._limit:
                over = f"The request body is over {self._limit} bytes; raise the server's --max-body-bytes."
                return await error_response(413, over, "BadRequestError")(scope, receive, send)
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def received() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, received, send)


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``, the form of OpenAI's and vLLM's servers."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_response(status: int, message: str, kind: str, param: str | None = None) -> Response:
    """``error_body`` as a response."""
    from starlette.responses import Response

    return Response(json.dumps(error_body(status, message, kind, param)), status, media_type="application/json")


class PortUnavailableError(ConfigError):
    """The address cannot be listened on: it is taken, forbidden or unknown. One line with the remedy."""


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens on ``host`` and ``port`` (0: a free one) until the block ends.

    Open it before anything slow (a model that is loaded), so that an occupied port shows at once. Raises
    ``PortUnavailableError``.
    """
    try:
        # A name such as "localhost" may have both kinds of address; clients that try one only try IPv4.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise PortUnavailableError(f"cannot listen on {host}:{port}: {why}; choose another host or port") from error
    with listener:
        # asyncio switches Nagle's algorithm off only where the protocol is named; left on, each answer waits 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


def url_of(listener: socket.socket) -> str:
    """``http://HOST:PORT`` of a socket that listens."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def serving(
    app: Any,
    listener: socket.socket,
    *,
    access: AccessRules | None = None,
    max_body_bytes: int = 2**24,
    **options: Any,
) -> Iterator[str]:
    """Serve an ASGI application from a thread until the block ends; yields its URL as soon as it answers.

    ``access``: who may use it; by default there is no key. ``options`` are those of ``uvicorn.Config``. Raises
    ``InfrastructureError`` when it does not start.
    """
    server = _server(app, access, max_body_bytes, options)
    thread = threading.Thread(target=server.run, args=([listener],), name="http-server", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not server.started:
            if not thread.is_alive() or time.monotonic() > deadline:
                raise InfrastructureError(f"the HTTP server at {url_of(listener)} did not start; see its log")
            time.sleep(0.01)
        yield url_of(listener)
    finally:
        server.should_exit = True
        thread.join()


@asynccontextmanager
async def serving_here(
    app: ASGIApp, listener: socket.socket, *, access: AccessRules, max_body_bytes: int, **options: Any
) -> AsyncIterator[str]:
    """``serving`` in this event loop, for an application that shares it with its caller. Signals stay the caller's."""
    server = _server(app, access, max_body_bytes, {"lifespan": "off", **options})
    task = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.001)
        yield url_of(listener)
    finally:
        server.should_exit = True
        await task


def _server(
    app: ASGIApp,
    access: AccessRules | None,
    max_body_bytes: int,
    options: Mapping[str, Any],
) -> uvicorn.Server:
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    common: dict[str, Any] = {
        "log_level": "warning",
        "log_config": None,
        "access_log": False,
        "timeout_graceful_shutdown": STOP_SECONDS,
        "timeout_keep_alive": 75,  # seconds
        "limit_concurrency": 1024,
        "http": "h11",
        "ws": "none",
        "server_header": False,
        "proxy_headers": False,
        **options,
    }
    guard = GuardMiddleware(app, access, max_body_bytes=max_body_bytes)
    return Server(uvicorn.Config(guard, **common))
