"""What a server lets in, what it counts and logs, and what it does where something fails, over real sockets."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from raw_clients import connect, exchange, request, status
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.servers import (
    AccessRules,
    PortUnavailableError,
    listening,
    read_body,
    required_key,
    serving,
)

JSON = "application/json"


async def _echo(request: Request) -> Response:
    found = await read_body(await request.body(), lambda body: json.loads(body or b"{}"))
    return JSONResponse({"size": len(found)})


async def _broken(_: Request) -> Response:
    raise KeyError("a detail")


async def _halfway(_: Request) -> Response:
    async def parts():
        yield b"one"
        raise KeyError("a detail")

    return StreamingResponse(parts())


ROUTES = [
    Route("/", _echo, methods=["GET", "POST"]),
    Route("/health", _echo),
    Route("/broken", _broken),
    Route("/halfway", _halfway),
]


@contextmanager
def server(key: str = "") -> Iterator[str]:
    with (
        listening("127.0.0.1", 0) as listener,
        serving(Starlette(routes=ROUTES), listener, access=AccessRules(key), max_body_bytes=1000) as url,
    ):
        yield url


@pytest.fixture(autouse=True)
def no_handlers_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that serves in an earlier test may leave uvicorn a handler whose stream is closed."""
    for name in ("uvicorn", "uvicorn.error"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as url:
        yield url


HERE = {"host": "127.0.0.1", "content_type": f"{JSON}; charset=utf-8"}
SENT: list[tuple[dict[str, str], int]] = [
    *((HERE | {"host": host}, 200) for host in ("127.0.0.1", "LOCALHOST:99", "[::1]:80")),
    # A name that was rebound to this machine.
    *((HERE | {"host": host}, 403) for host in ("evil.example", "127.0.0.1.evil.example", "", "[::2]")),
    *((HERE | {"host": host}, 403) for host in ("[::1]evil.example", "127.0.0.1:80@evil.example")),
    # Pages of other origins.
    *((HERE | {"origin": f"{origin}"}, 403) for origin in ("http://evil.example", "http://localhost:3000", "null")),
    *((HERE | {"sec_fetch_site": site}, 403) for site in ("cross-site", "same-site")),
    # Bodies that a page could send unasked.
    *((HERE | {"content_type": kind}, 415) for kind in ("text/plain", "application/x-www-form-urlencoded", "")),
]


@pytest.mark.parametrize(("headers", "code"), SENT)
def test_without_a_key_programs_of_this_machine_are_let_in(url: str, headers: dict[str, str], code: int) -> None:
    assert status(exchange(url, request(**headers))) == code
    if code != 415:
        assert status(exchange(url, request(path="/health", method="GET", body=b"", **headers))) == code


def test_with_a_key_nothing_else_counts() -> None:
    with server("s3cret") as locked:
        for headers in ({"authorization": "Bearer s3cret"}, {"x_api_key": "s3cret"}):
            assert status(exchange(locked, request(host="far.example", origin="http://x", **headers))) == 200
        for headers in ({}, {"authorization": "Bearer no"}, {"x_api_key": "s3cre"}, {"authorization": "s3cret"}):
            answer = exchange(locked, request(host="127.0.0.1", content_type=JSON, **headers))
            assert status(answer) == 401 and b"s3cret" not in answer
        assert status(exchange(locked, request(path="/health", host="a", method="GET", body=b""))) == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_an_address_of_the_network_needs_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^--host .*: others on the network could use it; export A_KEY="):
        required_key(host, "A_KEY", protects="it")
    monkeypatch.setenv("A_KEY", "k")
    assert required_key(host, "A_KEY", protects="it") == "k"


def test_a_body_is_bounded_announced_or_not(url: str) -> None:
    assert httpx.post(url, json="x" * 900, trust_env=False).json() == {"size": 900}
    assert httpx.post(url, json="x" * 1100, trust_env=False).status_code == 413
    parts = iter([b'"' + b"x" * 600, b"x" * 600 + b'"'])
    assert httpx.post(url, content=parts, headers={"content-type": JSON}, trust_env=False).status_code == 413


def lines_of(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What was logged beyond requests: by our loggers, and by uvicorn's, which write to standard error."""
    formatter = logging.Formatter("%(message)s")
    ours = [formatter.format(each) for each in caplog.records if each.levelno > logging.INFO]
    return [line for each in [*ours, capfd.readouterr().err] for line in each.splitlines()]


def test_an_exception_is_one_line_with_a_number_and_the_client_gets_the_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OPENHANDS_RL_DEBUG", raising=False)
    with server() as url:
        answer = httpx.get(f"{url}/broken", trust_env=False)
        (line,) = lines_of(caplog, capfd)
        error = answer.json()["error"]
        assert "KeyError: 'a detail'" in line
        assert (answer.status_code, error["type"]) == (500, "InternalServerError")
        assert error["message"].rpartition(" ")[2].rstrip(".") in line and "detail" not in answer.text
        caplog.clear()
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{url}/halfway", trust_env=False)
    lines = lines_of(caplog, capfd)
    assert sum("KeyError" in line for line in lines) == 1 and not any("Traceback" in line for line in lines)


def test_a_server_that_stops_answers_half_requests_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("openhands_rl_plugin.core.servers.STOP_SECONDS", 0.3)
    with ExitStack() as clients:
        with server() as url:
            client = clients.enter_context(connect(url))
            client.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            client.sendall(b"Content-Length: 9\r\n\r\n{")
            time.sleep(0.3)
        assert client.recv(65536).startswith(b"HTTP/1.1 503")
    assert not any("Traceback" in line for line in lines_of(caplog, capfd))


def test_what_cannot_start_is_one_clear_line() -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    with (
        listening("127.0.0.1", 0) as listener,
        pytest.raises(InfrastructureError, match="did not start"),
        serving(broken, listener, lifespan="on", log_level="critical"),
    ):
        pass
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        in_use = f"^cannot listen on 127.0.0.1:{port}: Address already in use"
        with pytest.raises(PortUnavailableError, match=in_use), listening("127.0.0.1", port):
            pass
