"""What nobody expected in a handler, a server that stops, and bodies that are dear to read."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest
from raw_clients import connect, exchange, status
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from openhands_rl_plugin.core.servers.bodies import MOST_VALUES, BodyReader, values_of
from openhands_rl_plugin.core.servers.listening import listening, serving

_BODIES = BodyReader()


async def _broken(request: Request) -> PlainTextResponse:
    raise KeyError("a detail")


async def _halfway(request: Request) -> StreamingResponse:
    async def parts():
        yield b"one"
        raise KeyError("a detail")

    return StreamingResponse(parts())


def _parse(body: bytes) -> list[object]:
    """As a library does that lets no other thread run meanwhile."""
    sum(range(100 * values_of(body)))
    return json.loads(body)


async def _parsed(request: Request) -> PlainTextResponse:
    found = await _BODIES.read(await request.body(), _parse)
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


def test_with_debugging_its_traceback_is_there_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENHANDS_RL_DEBUG", "1")
    with server() as url:
        assert httpx.get(f"{url}/broken", trust_env=False).status_code == 500
    assert sum("Traceback" in line for line in lines_of(caplog, capfd)) == 1


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
    monkeypatch.setattr("openhands_rl_plugin.core.servers.listening.STOP_SECONDS", 0.3)
    with ExitStack() as clients:
        with server() as url:
            client = clients.enter_context(connect(url))
            client.sendall(b"POST /parsed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            client.sendall(b"Content-Length: 9\r\n\r\n{")
            time.sleep(0.3)
        assert client.recv(65536).startswith(b"HTTP/1.1 503")
    assert not any("Traceback" in line for line in lines_of(caplog, capfd))


def test_what_comes_behind_a_broken_request_is_not_read(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with server() as url:
        assert status(exchange(url, b"no HTTP\r\n\r\n" + b"x" * 9000)) == 400
    assert not any("Traceback" in line for line in lines_of(caplog, capfd))


def test_more_values_than_are_read_are_refused_before_they_are() -> None:
    with server() as url, httpx.Client(base_url=url, trust_env=False) as client:
        assert client.post("/parsed", json=[1] * (MOST_VALUES - 2)).text == str(MOST_VALUES - 2)
        refused = client.post("/parsed", json=[1] * MOST_VALUES)
    assert refused.status_code == 413 and str(MOST_VALUES) in refused.json()["error"]["message"]


HEAD = b"POST /parsed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_OBJECTS = b"[" + b",".join([b'{"a":{"b":"c"}}'] * (MOST_VALUES // 3 - 1)) + b"]"
DEAR = {
    "chunks of one byte": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 60_000,
    "many values": HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(_OBJECTS), _OBJECTS),
}


@pytest.mark.parametrize("kind", DEAR)
def test_health_is_answered_while_eight_clients_send_what_is_dear_to_read(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openhands_rl_plugin.core.servers.listening.STOP_SECONDS", 0.2)
    until = time.monotonic() + 1.8

    def send(url: str) -> None:
        while time.monotonic() < until:
            with suppress(OSError), connect(url, seconds=0.5) as client:
                client.sendall(DEAR[kind])
                while client.recv(65536):
                    pass

    with server() as url:
        senders = [threading.Thread(target=send, args=(url,)) for _ in range(8)]
        for sender in senders:
            sender.start()
        time.sleep(0.3)
        took: list[float] = []
        while time.monotonic() < until:
            begun = time.monotonic()
            assert httpx.get(f"{url}/health", trust_env=False, timeout=20).text == "ok"
            took.append(time.monotonic() - begun)
        assert sorted(took)[len(took) // 2] < 3.0
    for sender in senders:
        sender.join(20)
