"""What nobody expected in a handler, and a server that stops."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from raw_clients import connect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from openhands_rl_plugin.core.servers import listening, read_body, serving


async def _broken(request: Request) -> PlainTextResponse:
    raise KeyError("a detail")


async def _halfway(request: Request) -> StreamingResponse:
    async def parts():
        yield b"one"
        raise KeyError("a detail")

    return StreamingResponse(parts())


async def _parsed(request: Request) -> PlainTextResponse:
    found = await read_body(await request.body(), json.loads)
    return PlainTextResponse(str(len(found)))


async def _health(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


ROUTES = [
    Route("/broken", _broken),
    Route("/halfway", _halfway),
    Route("/parsed", _parsed, methods=["POST"]),
    Route("/health", _health),
]


@contextmanager
def server() -> Iterator[str]:
    with listening("127.0.0.1", 0) as listener, serving(Starlette(routes=ROUTES), listener) as url:
        yield url


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
    assert "KeyError: 'a detail' (test_failures.py:" in line
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (500, "InternalServerError")
    assert error["message"].rpartition(" ")[2].rstrip(".") in line and "detail" not in answer.text


def test_a_stream_that_fails_is_cut_off_without_a_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with server() as url, pytest.raises(httpx.RemoteProtocolError):
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
            client.sendall(b"POST /parsed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            client.sendall(b"Content-Length: 9\r\n\r\n{")
            time.sleep(0.3)
        assert client.recv(65536).startswith(b"HTTP/1.1 503")
    assert not any("Traceback" in line for line in lines_of(caplog, capfd))
