"""What a server lets in, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from raw_clients import exchange, request, status
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.servers import AccessRules, listening, required_key, serving

JSON = "application/json"


async def _echo(request: Request) -> JSONResponse:
    return JSONResponse({"size": len(await request.body())})


async def _health(_: Request) -> JSONResponse:
    return JSONResponse({})


APP = Starlette(routes=[Route("/", _echo, methods=["GET", "POST"]), Route("/health", _health)])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening("127.0.0.1", 0) as listener, serving(APP, listener, max_body_bytes=1000) as url:
        yield url


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    with listening("127.0.0.1", 0) as listener, serving(APP, listener, access=AccessRules("s3cret")) as url:
        yield url


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:99", "[::1]:80", "127.0.0.2"])
def test_without_a_key_programs_of_this_machine_are_let_in(url: str, host: str) -> None:
    assert status(exchange(url, request(host=host, content_type="application/json; charset=utf-8"))) == 200
    assert status(exchange(url, request(host=host, method="GET", body=b""))) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "",
        "[::2]",
        "[::1]evil.example",
        "127.0.0.1:80@evil.example",
    ],
)
def test_a_name_that_was_rebound_to_this_machine_is_refused(url: str, host: str) -> None:
    for sent in (request(host=host, content_type=JSON), request(path="/health", host=host, method="GET", body=b"")):
        assert status(exchange(url, sent)) == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "https://127.0.0.1"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_pages_of_other_origins_are_refused(url: str, headers: dict[str, str]) -> None:
    answer = exchange(url, request(host="127.0.0.1", content_type=JSON, **headers))
    assert status(answer) == 403 and b"other origins" in answer


def test_a_page_of_the_server_itself_is_let_in(url: str) -> None:
    assert status(exchange(url, request(host="127.0.0.1:80", origin="http://127.0.0.1:80", content_type=JSON))) == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_that_a_page_could_send_unasked_is_refused(url: str, kind: str) -> None:
    answer = exchange(url, request(host="127.0.0.1", content_type=kind))
    assert status(answer) == 415 and b"Content-Type: application/json" in answer
    assert status(exchange(url, request(host="127.0.0.1", body=b""))) == 200


def test_with_a_key_nothing_else_counts(locked: str) -> None:
    for headers in ({"authorization": "Bearer s3cret"}, {"x_api_key": "s3cret"}):
        assert status(exchange(locked, request(host="far.example", origin="http://x", **headers))) == 200
    for headers in ({}, {"authorization": "Bearer no"}, {"x_api_key": "s3cre"}, {"authorization": "s3cret"}):
        answer = exchange(locked, request(host="127.0.0.1", content_type=JSON, **headers))
        assert status(answer) == 401 and b"s3cret" not in answer
    assert status(exchange(locked, request(path="/metrics", host="a", method="GET", body=b""))) == 401
    assert status(exchange(locked, request(path="/health", host="a", method="GET", body=b""))) == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_an_address_of_the_network_needs_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^--host .*: others on the network could use it; export A_KEY=") as caught:
        required_key(host, "A_KEY", protects="it")
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("A_KEY", "k")
    assert required_key(host, "A_KEY", protects="it") == "k"


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"9" * 30, b"\xb2"])
def test_a_length_that_is_none_is_refused(url: str, length: bytes) -> None:
    sent = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    assert status(exchange(url, sent + length + b"\r\nConnection: close\r\n\r\n{}")) in (400, 413)


def test_a_body_is_bounded_announced_or_not(url: str) -> None:
    assert httpx.post(url, json="x" * 900, trust_env=False).json() == {"size": 902}
    assert httpx.post(url, json="x" * 1100, trust_env=False).status_code == 413
    parts = iter([b'"' + b"x" * 600, b"x" * 600 + b'"'])
    headers = {"content-type": JSON}
    assert httpx.post(url, content=parts, headers=headers, trust_env=False).status_code == 413
