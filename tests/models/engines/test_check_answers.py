"""Whether something listens is asked as the engine would connect."""

from __future__ import annotations

import asyncio

import pytest

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.models.engines.client import HttpUpstream
from openhands_rl_plugin.models.engines.server_models import check_answers


def test_nothing_there_is_one_line() -> None:
    for away in ("https://127.0.0.1:9/v1", "http://127.0.0.1:9/v1"):
        with pytest.raises(InfrastructureError, match="no model server answers"):
            check_answers(away)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/v1", "ftp://127.0.0.1/v1", "http://[::1/v1"])
def test_a_wrong_url_names_the_option(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--base-url .* is not a URL"):
        check_answers(url)


@pytest.mark.parametrize("closes", [True, False])
async def test_what_comes_in_between_two_requests_is_no_answer(closes: bool) -> None:
    """Some proxies send 408 on an idle connection, and close it, or leave that to the client."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await asyncio.sleep(0 if closes else 1)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        upstream = HttpUpstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", None, 5.0, connections={})
        for _ in range(3):
            async with upstream.open("GET", "models", [], b"") as response:
                assert (response.status, await response.read()) == (200, b"{}")
            await asyncio.sleep(0.2)
