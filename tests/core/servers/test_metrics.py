from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from openhands_rl_plugin.core.servers import ACCESS, listening, log_accesses, serving


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """As Prometheus' own parser reads them."""
    families = text_string_to_metric_families(text)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


async def _hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


@pytest.fixture
def url() -> Iterator[str]:
    app = Starlette(routes=[Route("/hello", _hello, methods=["POST"])])
    with listening("127.0.0.1", 0) as listener, serving(app, listener) as url:
        yield url


def test_requests_are_counted_by_route(url: str) -> None:
    with httpx.Client(base_url=url, trust_env=False) as client:
        for path in ("/hello", "/hello", "/a-path-of-the-clients-own", "/another"):
            client.post(path, json={})
        found = samples(client.get("/metrics").text)
    counted = {labels: value for (name, labels), value in found.items() if name == "http_requests_total"}
    assert found["process_resident_memory_bytes", ()] > 1e6
    assert counted == {
        (("handler", "/hello"), ("method", "POST"), ("status", "2xx")): 2,
        (("handler", "none"), ("method", "POST"), ("status", "4xx")): 2,
    }


def test_the_access_log_has_no_bodies_and_no_keys(url: str, caplog: pytest.LogCaptureFixture) -> None:
    log_accesses()
    logger = logging.getLogger(ACCESS)
    logger.addHandler(caplog.handler)

    def written() -> str:
        return "\n".join(record.getMessage() for record in caplog.records if record.name == ACCESS)

    try:
        headers = {"authorization": "Bearer sk-planted-0123456789abcdefghij"}
        httpx.post(f"{url}/hello?key=planted-in-query", json={"a": "planted-in-body"}, headers=headers, trust_env=False)
        httpx.post(f"{url}/%0a%1b[31mfake%20line", json={}, trust_env=False)
        deadline = time.monotonic() + 30  # a line is written when its answer is sent; the client logs its own at once
        while "fake" not in written() and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
    text = written()
    assert "POST /hello 200" in text and "planted" not in text
    assert "\x1b" not in text and "\\x0a\\x1b[31mfake line 404" in text
