from __future__ import annotations

import socket

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.servers import PortUnavailableError, listening, serving


async def _hello(_: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


APP = Starlette(routes=[Route("/", _hello)])


def test_an_application_that_cannot_start_is_one_clear_line() -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    with (
        listening("127.0.0.1", 0) as listener,
        pytest.raises(InfrastructureError, match="did not start"),
        serving(broken, listener, lifespan="on", log_level="critical"),
    ):
        pass


def test_an_occupied_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        in_use = f"^cannot listen on 127.0.0.1:{port}: the port is in use"
        with pytest.raises(PortUnavailableError, match=in_use), listening("127.0.0.1", port):
            pass
