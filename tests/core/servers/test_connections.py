"""Slow, half and too many connections, over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from raw_clients import connect, exchange, request, rest, status
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from openhands_rl_plugin.core.servers.connections import ConnectionLimits
from openhands_rl_plugin.core.servers.listening import listening, serving

QUICK = ConnectionLimits(most=8, request=0.4, idle=0.4, reading=0.4)


async def _echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await request.body())))


async def _slow(request: Request) -> PlainTextResponse:
    await asyncio.sleep(1.0)
    return PlainTextResponse("at last")


async def _endless(request: Request) -> StreamingResponse:
    async def parts():
        while True:
            await asyncio.sleep(0)
            yield b"x" * 65536

    return StreamingResponse(parts())


ROUTES = [Route("/", _echo, methods=["POST"]), Route("/slow", _slow), Route("/endless", _endless)]


@contextmanager
def server(limits: ConnectionLimits = QUICK) -> Iterator[str]:
    app = Starlette(routes=ROUTES)
    with listening("127.0.0.1", 0) as listener, serving(app, listener, limits=limits, timeout_keep_alive=60) as url:
        yield url


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALVES = [
    b"",
    b"POST / HT",
    HEAD,
    HEAD + b"Content-Length: 9\r\n\r\n{",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
]


@pytest.mark.parametrize("half", HALVES)
def test_a_request_that_never_ends_is_dropped(half: bytes) -> None:
    with server() as url:
        started = time.monotonic()
        assert status(exchange(url, half)) in (0, 400)
        assert 0.3 < time.monotonic() - started < 3


def test_a_body_in_chunks_of_one_byte_is_dropped_before_it_takes_the_server_s_time() -> None:
    limits = ConnectionLimits(request=8, parsing=0.1)
    with server(limits) as url, connect(url, seconds=8) as client:
        client.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(100):
                client.sendall(b"1\r\na\r\n" * 20_000)
        large = request(body=b"1" * 8_000_000, host="localhost", content_type="application/json")
        assert exchange(url, large).endswith(b"8000000")
        assert metric(url, "http_connections_late_total") == 1


def test_a_byte_now_and_then_does_not_help() -> None:
    with server() as url, connect(url) as client:
        client.sendall(HEAD + b"Content-Length: 999\r\n\r\n")
        started = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - started < 3:
                client.sendall(b" ")
                time.sleep(0.05)


def test_a_second_request_has_to_end_too() -> None:
    with server() as url, connect(url) as client:
        client.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
        assert status(client.recv(65536)) == 200
        client.sendall(HEAD)
        started = time.monotonic()
        assert b"HTTP/1.1" not in rest(client) and time.monotonic() - started < 3


def test_an_answer_may_take_longer_than_a_request() -> None:
    with server() as url:
        assert httpx.get(f"{url}/slow", trust_env=False).text == "at last"


def test_a_client_that_does_not_read_is_dropped() -> None:
    with server() as url, connect(url) as client:
        client.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(1.5)
        assert metric(url, "http_connections_late_total") == 1
        assert len(rest(client)) < 10 * 1024**2


def test_half_requests_take_no_place_from_whole_ones() -> None:
    slow = ConnectionLimits(most=20, request=60)
    with server(slow) as url, ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(url)).sendall(HEAD)
        for _ in range(10):
            assert httpx.post(url, json={}, trust_env=False, timeout=5).text == "2"
        assert metric(url, "http_connections ") <= 20


def test_one_connection_too_many_is_told_so() -> None:
    with server(ConnectionLimits(most=2)) as url, ExitStack() as stack:
        for _ in range(2):
            client = stack.enter_context(connect(url))
            client.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.3)
        assert status(exchange(url, request(host="localhost", content_type="application/json"))) == 503
        time.sleep(1.2)
        assert httpx.post(url, json={}, trust_env=False).text == "2"
