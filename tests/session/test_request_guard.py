"""What the gateway lets in: rewards, evidence, sessions, odd requests within bounds; a model server that misbehaves."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from gateway_world import Body, Model, user, world
from raw_clients import exchange, request, status

from openhands_rl_plugin.config.rl import RewardSettings, RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.session.client_sessions import GatewayConfig
from openhands_rl_plugin.session.gateway import Gateway
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

END = "/session/s/end"


async def test_rewards_out_of_range_and_evidence_that_rewards_read_are_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as gateway:
        await gateway.chat(user("one"))
        for reward, expected in (("-1.5", "gateway_max"), ("1.0000001", "from -1 to 1"), ("1e400", ""), ("NaN", "")):
            headers = {"content-type": "application/json"}
            refused = await gateway.http.post(END, content=f'{{"reward": {reward}}}', headers=headers)
            assert refused.status_code == 400 and expected in refused.text
        for name in ("test_result", "command", "git_patch", "answer", "label", "report", "resolved", "last_error"):
            refused = await gateway.end(evidence={name: {"report": {"resolved": True}}})
            assert refused.status_code == 400 and name in refused.text
        assert (await gateway.end(reward=1, evidence={"note": "mine"})).json()["ended"]


async def test_bounds_that_no_reward_is_within_are_refused_at_the_start(tmp_path: Path) -> None:
    settings = RLSettings(reward=RewardSettings(gateway_min=1.0, gateway_max=0.0))
    with pytest.raises(ConfigError, match="gateway_min is above gateway_max"):
        Gateway(GatewayConfig(upstream="http://127.0.0.1:9"), FileTrajectoryStorage(tmp_path), settings)


async def test_a_model_server_that_redirects_takes_no_client_elsewhere(tmp_path: Path) -> None:
    async def elsewhere(request: web.Request, body: Body) -> web.Response:
        return web.Response(status=307, headers={"location": "http://evil.example/v1/steal?key=sk-abc"})

    async with world(tmp_path, Model(behave=elsewhere)) as gateway:
        sent = {"model": "m", "stream": True, "messages": [user("one")]}
        answers = [await gateway.http.post(f"/session/s/v1/{path}", json=sent) for path in ("messages", "embeddings")]
        answers.append(await gateway.ask(user("one")))
    for answer in answers:
        assert answer.status_code == 502 and "location" not in answer.headers and "sk-abc" not in answer.text
        assert "redirects to 'evil.example': set --upstream" in answer.json()["error"]["message"]


def nested(levels: int) -> Body:
    return {"deep": json.loads("[" * levels + "]" * levels)}


@pytest.mark.parametrize("levels", [95, 110, 210])
async def test_deep_json_never_makes_the_store_unreadable(tmp_path: Path, levels: int):
    async def answer(request: web.Request, body: Body) -> web.Response | None:
        if body["messages"][0]["content"] != "answer deeply":
            return None
        return web.json_response({**gateway.model.completion(body), "extra": nested(levels)})

    async with world(tmp_path, Model(behave=answer)) as gateway:
        await gateway.chat(user("one"), session="good")
        sent = [await gateway.ask(user("one"), session="asks", tool_choice=nested(levels))]
        sent.append(await gateway.ask(user("one"), session="tools", tools=[{"type": "function", "x": nested(levels)}]))
        sent.append(await gateway.ask(user("answer deeply"), session="answers"))
        ended = await gateway.end("good", evidence=nested(levels))
        unrecorded = (await gateway.http.get("/health")).json()["unrecorded"]
    deep = levels > 95
    assert [each.status_code for each in sent] == [200, 200, 200] and ended.status_code == (400 if deep else 200)
    assert [each.headers.get("x-openhands-rl-recorded") for each in sent] == [("no" if deep else None)] * 3
    assert unrecorded == (3 if deep else 0)
    assert len(await gateway.stored()) == (1 if deep else 4)


async def test_no_path_leads_out_of_v1(tmp_path: Path):
    asked: list[str] = []

    async def answer(came: web.Request, body: Body) -> web.Response:
        asked.append(came.raw_path)
        return web.json_response({})

    refused = ["/v1/%2e%2e/admin", "/v1/a%2F..%2F..%2Fadmin", "/v1/..%5Cadmin", "/session/s/v1/x/%2E./admin"]
    passed = {
        "/v%31/chat/completions?x=/v1/../../admin": "/v1/chat/completions?x=/v1/../../admin",
        "/v%31/models?y=/v1/%2e%2e/admin": "/v1/models?y=/v1/%2e%2e/admin",
        "/session/v1/v1/embeddings": "/v1/embeddings",
        "/session/v1/v1/chat/completions": "/v1/chat/completions",
        "/v1/models/org%2Fname": "/v1/models/org%2Fname",
    }
    async with world(tmp_path, Model(behave=answer)) as gateway:
        asks = [request(path, host="localhost", content_type="application/json") for path in [*refused, *passed]]
        answers = [status(await asyncio.to_thread(exchange, gateway.url, each)) for each in asks]
    assert answers == [400] * len(refused) + [200] * len(passed)
    assert asked == list(passed.values())


async def test_keys_and_cookies_for_the_gateway_stay_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATE_KEY", "gate")
    monkeypatch.setenv("MODEL_KEY", "model")
    names = {"authorization", "api-key", "x-api-key", "x-goog-api-key", "cookie"}
    given = {**dict.fromkeys(names, "mine"), "authorization": "Bearer gate"}
    async with world(tmp_path / "a", api_key_env="GATE_KEY") as gateway:
        for wrong in ({}, {"authorization": "Bearer wrong"}):
            assert (await gateway.ask(user("one"), headers=wrong)).status_code == 401
        assert (await gateway.end()).status_code == 401 and (await gateway.http.get("/health")).status_code == 200
        await gateway.chat(user("one"), headers=given)
        await gateway.http.post("/v1/embeddings", json={}, headers=given)
    assert len(gateway.model.headers) == 2 and not any(names & {*sent} for sent in gateway.model.headers)
    async with world(tmp_path / "b") as gateway:
        await gateway.chat(user("one"), headers=given)
        await gateway.http.post("/v1/embeddings", json={}, headers=[("anthropic-beta", each) for each in "ab"])
    assert names & {*gateway.model.headers[0]} == names - {"cookie"}
    assert gateway.model.headers[1]["anthropic-beta"] == "a, b"
    # The key of another server than the upstream stays here.
    for base_url, sent in (("", "Bearer model"), ("http://127.0.0.1:9/v1", None)):
        async with world(tmp_path / f"c{sent}", served={"api_key_env": "MODEL_KEY", "base_url": base_url}) as gateway:
            await gateway.chat(user("one"))
        assert gateway.model.headers[0].get("authorization") == sent
