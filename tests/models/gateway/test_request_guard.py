"""What the gateway lets in: the same rules as every server, with aiohttp below; and a model server that misbehaves."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import time
import zlib
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from gateway_world import Body, Model, user, world
from raw_clients import exchange, request, status

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.servers.connections import ConnectionLimits
from openhands_rl_plugin.models.gateway.config import GatewayConfig
from openhands_rl_plugin.models.gateway.server import running_gateway
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

JSON = "application/json"
END = "/session/s/end"
PAY = b'{"reward": 1}'


async def sent(url: str, data: bytes) -> int:
    return status(await asyncio.to_thread(exchange, url, data))


async def test_no_page_ends_a_session(tmp_path: Path) -> None:
    async with world(tmp_path) as gateway:
        for headers in (
            {"host": "evil.example", "content_type": JSON},
            {"host": "localhost", "origin": "http://evil.example", "content_type": JSON},
            {"host": "localhost", "origin": "null", "content_type": JSON},
        ):
            assert await sent(gateway.url, request(END, body=PAY, **headers)) == 403
        assert await sent(gateway.url, request(END, body=PAY, host="localhost", content_type="text/plain")) == 415
        assert await sent(gateway.url, request(END, body=PAY, host="localhost", content_type=JSON)) == 404


@pytest.mark.parametrize("reward", ["1e9", "-1.5", "1.0000001", "1e400", "NaN", '"Infinity"'])
async def test_a_reward_out_of_range_is_refused_and_ends_nothing(tmp_path: Path, reward: str) -> None:
    async with world(tmp_path) as gateway:
        await gateway.http.post("/session/s/v1/chat/completions", json={"model": "m", "messages": [user("one")]})
        headers = {"content-type": JSON}
        refused = await gateway.http.post(END, content=f'{{"reward": {reward}}}', headers=headers)
        assert refused.status_code == 400
        if reward[0] in "1-" and "400" not in reward:
            assert "from -1 to 1" in refused.text and "--reward-max" in refused.text
        assert (await gateway.http.post(END, json={"reward": 1})).json()["ended"]


async def test_the_range_is_configured(tmp_path: Path) -> None:
    async with world(tmp_path, reward_max=500) as gateway:
        await gateway.http.post("/session/s/v1/chat/completions", json={"model": "m", "messages": [user("one")]})
        assert (await gateway.http.post(END, json={"reward": 200})).json()["scored"]
    with pytest.raises(ValueError, match="--reward-min is above"):
        GatewayConfig.model_validate({"upstream": "http://m/v1", "reward_min": 2})


async def test_no_body_is_unpacked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = json.dumps({"model": "m", "messages": [user("one")]}).encode()
    path, host = "/v1/chat/completions", "localhost"
    bodies = {"gzip": gzip.compress(asked), "deflate": zlib.compress(asked), "zstd": b"no zstd", "GZIP, br": b"no gzip"}
    async with world(tmp_path) as gateway:
        for encoding, body in bodies.items():
            packed = request(path, body=body, host=host, content_type=JSON, content_encoding=encoding)
            assert await sent(gateway.url, packed) == 415
        plain = request(path, body=asked, host=host, content_type=JSON, content_encoding="identity")
        assert await sent(gateway.url, plain) == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_what_is_no_http_is_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = [
        b"NONSENSE\r\n\r\n",
        b"POST /session/s/end HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        request(END, host="localhost", content_type=JSON)[:-2].replace(
            b"Content-Length: 2", b"Transfer-Encoding: chunked"
        )
        + b"zz\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
    ]
    with caplog.at_level(logging.DEBUG):
        async with world(tmp_path) as gateway:
            for each in broken:
                assert await sent(gateway.url, each) in (0, 400)
            again = {"x-stainless-retry-count": "9" * 5000}
            asked = {"model": "m", "messages": [user("one")]}
            assert (await gateway.http.post("/v1/chat/completions", json=asked, headers=again)).status_code == 200
    assert not [record for record in caplog.records if record.exc_info and record.exc_info[0]]


async def test_half_requests_end_and_metrics_are_there(tmp_path: Path) -> None:
    limits = ConnectionLimits(most=10, request=0.4, idle=0.4)
    head = b"POST /session/s/end HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with FileTrajectoryStorage(tmp_path) as storage:
        config = GatewayConfig(upstream="http://127.0.0.1:9/v1", port=0)
        async with running_gateway(config, storage, limits=limits) as url, httpx.AsyncClient(trust_env=False) as http:
            for half in (b"POST / HT", head, head + b"Content-Length: 9\r\n\r\n{"):
                async with asyncio.timeout(5):
                    assert await sent(url, half) in (0, 400)
            text = (await http.get(f"{url}/metrics")).text
            assert "http_connections_late_total 3.0" in text
            await http.post(f"{url}{END}", json={})
            text = (await http.get(f"{url}/metrics")).text
            assert 'http_requests_total{method="POST",handler="/session/{session}/end",status="4xx"}' in text


def test_an_address_of_the_network_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENHANDS_RL_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^--host 0.0.0.0: .*export OPENHANDS_RL_API_KEY="):
        GatewayConfig(upstream="http://m/v1", host="0.0.0.0").door()


async def test_sessions_that_have_not_ended_are_bounded(tmp_path: Path) -> None:
    async with world(tmp_path, max_open_sessions=3, max_sessions=1) as gateway:
        for name in ("a", "b", "c"):
            await gateway.say(user("one"), session=name)
        refused = await gateway.ask(user("one"), session="d")
        assert refused.status_code == 429 and "--max-open-sessions" in refused.text and refused.headers["retry-after"]
        assert (await gateway.ask(user("one"), session="a")).status_code == 200
        assert (await gateway.end("b")).status_code == 200
        assert (await gateway.ask(user("one"), session="d")).status_code == 200
        assert (await gateway.ask(user("one"), session="b")).status_code == 429


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "embeddings"])
async def test_a_model_server_that_redirects_takes_no_client_elsewhere(tmp_path: Path, stream: bool, path: str) -> None:
    async def elsewhere(request: web.Request, body: Body) -> web.Response:
        return web.Response(status=307, headers={"location": "http://evil.example/v1/steal?key=sk-abc"})

    async with world(tmp_path, Model(behave=elsewhere)) as gateway:
        sent = {"model": "m", "stream": stream, "messages": [user("one")]}
        answer = await gateway.http.post(f"/session/s/v1/{path}", json=sent)
    assert answer.status_code == 502 and "location" not in answer.headers and "sk-abc" not in answer.text
    assert "redirects to 'evil.example': set --upstream" in answer.json()["error"]["message"]


async def test_a_long_answer_of_the_model_server_holds_nobody_up(tmp_path: Path) -> None:
    other = {"token": "b", "logprob": -1.0, "bytes": [98]}
    said = {"content": [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": [other] * 20}] * 8_000}
    made: list[bytes] = []

    async def answer(request: web.Request, body: Body) -> web.Response:
        if not made:
            whole = gateway.model.completion(body)
            made.append(json.dumps({**whole, "choices": [{**whole["choices"][0], "logprobs": said}]}).encode())
        return web.Response(body=made[0], content_type="application/json")

    async with world(tmp_path, Model(behave=answer)) as gateway:
        assert (await gateway.ask(user("one"), session="a")).status_code == 200
        asked = asyncio.create_task(gateway.ask(user("two"), session="a"))
        longest = 0.0
        while not asked.done():
            before = time.thread_time()  # of this thread alone: the machine's load does not count
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)
        assert (await asked).status_code == 200 and longest < 0.1
