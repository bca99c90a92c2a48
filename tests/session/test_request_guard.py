"""What the gateway lets in: the same rules as every server, with aiohttp below; and a model server that misbehaves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from gateway_world import Body, Model, user, world
from raw_clients import exchange, request, status

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.session.gateway_config import GatewayConfig

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


async def test_a_client_writes_no_evidence_that_rewards_read(tmp_path: Path) -> None:
    async with world(tmp_path) as gateway:
        await gateway.say(user("one"))
        for name in ("test_result", "command", "git_patch", "answer", "label", "report", "resolved"):
            refused = await gateway.end(evidence={name: {"report": {"resolved": True}}})
            assert refused.status_code == 400 and name in refused.text
        assert (await gateway.end(evidence={"note": "mine"})).json()["ended"]


async def test_the_range_is_configured(tmp_path: Path) -> None:
    async with world(tmp_path, reward_max=500) as gateway:
        await gateway.http.post("/session/s/v1/chat/completions", json={"model": "m", "messages": [user("one")]})
        assert (await gateway.http.post(END, json={"reward": 200})).json()["scored"]
    with pytest.raises(ValueError, match="--reward-min is above"):
        GatewayConfig.model_validate({"upstream": "http://m/v1", "reward_min": 2})


def test_an_address_of_the_network_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENHANDS_RL_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^--host 0.0.0.0: .*export OPENHANDS_RL_API_KEY="):
        GatewayConfig(upstream="http://m/v1", host="0.0.0.0").access()


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
