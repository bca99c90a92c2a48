"""What the gateway lets in: rewards, evidence and sessions within bounds; and a model server that misbehaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from gateway_world import Body, Model, user, world

END = "/session/s/end"


@pytest.mark.parametrize("reward", ["1e9", "-1.5", "1.0000001", "1e400", "NaN", '"Infinity"'])
async def test_a_reward_out_of_range_is_refused_and_ends_nothing(tmp_path: Path, reward: str) -> None:
    async with world(tmp_path) as gateway:
        await gateway.http.post("/session/s/v1/chat/completions", json={"model": "m", "messages": [user("one")]})
        headers = {"content-type": "application/json"}
        refused = await gateway.http.post(END, content=f'{{"reward": {reward}}}', headers=headers)
        assert refused.status_code == 400
        if reward[0] in "1-" and "400" not in reward:
            assert "from -1 to 1" in refused.text and "--reward-max" in refused.text
        assert (await gateway.http.post(END, json={"reward": 1})).json()["ended"]


async def test_a_client_writes_no_evidence_that_rewards_read(tmp_path: Path) -> None:
    async with world(tmp_path) as gateway:
        await gateway.say(user("one"))
        for name in ("test_result", "command", "git_patch", "answer", "label", "report", "resolved", "last_error"):
            refused = await gateway.end(evidence={name: {"report": {"resolved": True}}})
            assert refused.status_code == 400 and name in refused.text
        assert (await gateway.end(evidence={"note": "mine"})).json()["ended"]


async def test_sessions_that_have_not_ended_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openhands_rl_plugin.session.client_sessions.MOST_OPEN", 3)
    async with world(tmp_path) as gateway:
        for name in ("a", "b", "c"):
            await gateway.say(user("one"), session=name)
        refused = await gateway.ask(user("one"), session="d")
        assert refused.status_code == 429 and "3 sessions are open" in refused.text and refused.headers["retry-after"]
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
