"""Several model servers behind one address: sticky, fewest open calls, one of them killed and started again."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect

from evaluation.performance.serving.balance import CALLS_OF_AN_EPISODE, ideal_seconds, played, stub
from openhands_rl_plugin.core.servers.listening import listening, serving
from openhands_rl_plugin.core.servers.metrics import Metrics
from openhands_rl_plugin.models.balancing.balancer import Balancer, running_balancer
from openhands_rl_plugin.models.balancing.choice import ModelServer, ServerChoice


def test_the_choice_is_sticky_and_else_the_fewest_open_calls():
    """Of servers that nothing is known of."""
    one, two, three = servers = [ModelServer(name) for name in ("one", "two", "three")]
    choice = ServerChoice(servers)
    assert choice.choose("a") is one
    with one.call(), three.call():
        assert choice.choose("b") is two and choice.choose("") is two
        assert choice.choose("a") is one, "its prefix is cached there"
    two.healthy = False
    moved = choice.choose("b")
    assert moved is one
    two.healthy = True
    assert choice.choose("b") is moved, "it has moved for good"
    assert choice.choose("b", tried={"one"}) is two
    one.healthy = two.healthy = three.healthy = False
    assert choice.choose("b") is None


async def test_three_stubs_and_one_is_killed():
    """No call is lost; an episode leaves a server that died, and stays elsewhere; who comes back is asked again."""
    metrics = Metrics()
    with ExitStack() as opened:
        stubs = [opened.enter_context(stub(each)) for each in (0.002, 0.004, 0.008)]
        balancer = Balancer([url for _, url in stubs], probe=0.1)
        url = opened.enter_context(running_balancer(balancer, metrics))
        victim, address = stubs[1]
        port = address.rpartition(":")[2].removesuffix("/v1")
        done = await played(url, victim, episodes=60, at_once=12)
        assert done.lost == 0 and [len(each) for each in done.answers] == [CALLS_OF_AN_EPISODE] * 60
        left = [each for each in done.answers if port in each and each[-1] != port]
        assert 0 < len(left) < 20, "the episodes that it had when it died"
        assert {server.healthy for server in balancer.servers} == {True, False}
        assert len({each for answers in done.answers for each in answers}) == 3
        assert 'model_server_healthy{server="1"} 0' in metrics.text()
        opened.enter_context(stub(0.002, int(port)))
        while not balancer.servers[1].healthy:
            await asyncio.sleep(0.05)
        again = await asyncio.to_thread(_ask, url)
        assert port in again


def _ask(url: str) -> set[str]:
    """Who answers calls without an episode, while one after the other is busy."""
    with httpx.Client(trust_env=False) as client:
        return {str(client.get(f"{url}/v1/models").json()["port"])} | {
            str(each) for each in asyncio.run(_many(f"{url}/v1/chat/completions"))
        }


async def _many(url: str) -> list[int]:
    async with httpx.AsyncClient(trust_env=False) as client:
        answers = await asyncio.gather(*(client.post(url, json={}) for _ in range(12)))
        return [each.json()["port"] for each in answers]


async def test_who_holds_the_calls_is_not_undone_by_another_who_gave_up():
    with ExitStack() as opened:
        _, address = opened.enter_context(stub(1.0))
        balancer = Balancer([address])
        url = opened.enter_context(running_balancer(balancer))
        async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
            first = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json={}))
            while not balancer.servers[0].open:
                await asyncio.sleep(0.01)
            holding = asyncio.create_task(asyncio.to_thread(balancer.hold, 20.0, 60.0))
            assert await asyncio.to_thread(balancer.hold, 0.3, 60.0) == 1
            assert await holding == 0
            assert (await asyncio.wait_for(first, 10)).status_code == 200, "its answer may reach it a moment later"
            late = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json={}))
            await asyncio.sleep(0.3)
            assert not balancer.servers[0].open, "a call begins while weights are replaced"
            balancer.release()
            assert (await late).status_code == 200


async def _streaming(_: Any, receive: Any, send: Any) -> None:
    """A model that streams."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


SCOPE = {
    **{"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b""},
    "headers": [(b"content-type", b"application/json")],
    "asgi": {"version": "3.0", "spec_version": "2.4"},
}


async def _request() -> dict[str, Any]:
    return {"type": "http.request", "body": b"{}"}


async def test_a_stream_is_open_before_its_client_takes_it():
    """Here nothing was sent to the client yet; one that leaves then leaves no call open."""
    begun, go_on = asyncio.Event(), asyncio.Event()
    sent: list[bytes] = []

    async def slow(message: dict[str, Any]) -> None:
        begun.set()
        await go_on.wait()
        sent.append(message.get("body", b""))

    async def gone(message: dict[str, Any]) -> None:
        raise OSError("the client is gone")

    with listening("127.0.0.1", 0) as listener, serving(_streaming, listener, lifespan="off") as url:
        balancer = Balancer([f"{url}/v1"])
        app = balancer.app()
        async with app.router.lifespan_context(app):
            call = asyncio.create_task(app(dict(SCOPE), _request, slow))
            await begun.wait()
            assert await asyncio.to_thread(balancer.hold, 0.01, 60.0) == 1
            go_on.set()
            await call
            assert b"data: [DONE]" in b"".join(sent)
            with pytest.raises(ClientDisconnect):
                await app(dict(SCOPE), _request, gone)
            assert await asyncio.to_thread(balancer.hold, 0.01, 60.0) == 0


async def test_a_call_that_is_let_through_and_held_again_waits():
    """A pause that comes with the resume before it: the call has not gone on yet."""
    with ExitStack() as opened:
        _, address = opened.enter_context(stub(0.01))
        balancer = Balancer([address])
        app = balancer.app()
        async with app.router.lifespan_context(app):
            hold = lambda: asyncio.get_running_loop().run_in_executor(None, balancer.hold, 5.0, 60.0)  # noqa: E731
            assert await hold() == 0

            async def ignore(_: dict[str, Any]) -> None: ...

            call = asyncio.create_task(app(dict(SCOPE), _request, ignore))
            await asyncio.sleep(0.1)
            again = hold()
            time.sleep(0.2)  # the loop stands, so that both arrive at once
            balancer.release()
            assert await again == 0
            await asyncio.sleep(0.3)
            assert not call.done() and balancer.servers[0].calls == 0
            balancer.release()
            await call


async def test_without_any_server_a_call_is_refused_as_one_to_try_again():
    with running_balancer(Balancer(["http://127.0.0.1:9/v1", "http://127.0.0.1:10/v1"], patience=0.0)) as url:
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.post(f"{url}/v1/chat/completions", json={})
    assert answer.status_code == 503 and "no model server answers" in answer.json()["error"]["message"]


def test_the_ideal():
    assert ideal_seconds([1.0, 1.0], 1, 10, 0.0) == 10.0
    assert ideal_seconds([1.0, 1.0], 1, 10, 2.0) == 8.0
