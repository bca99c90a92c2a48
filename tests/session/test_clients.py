"""What a client sees: the model server's own answers, as if nothing stood between."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from gateway_world import Body, Model, until, user, world


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_the_model_server_pass_unchanged(tmp_path: Path, stream: bool):
    text = '{"error":  {"message": "slow down"}}'

    async def refuse(request: web.Request, body: Body) -> web.Response:
        headers = {"retry-after": "7", "x-ratelimit-remaining": "0"}
        return web.Response(status=429, text=text, content_type="application/problem+json", headers=headers)

    async with world(tmp_path, Model(behave=refuse)) as gateway:
        response = await gateway.ask(user("one"), stream=stream)
        health = (await gateway.http.get("/health")).json()
    assert (response.status_code, response.text) == (429, text)
    assert response.headers["content-type"].startswith("application/problem+json")
    assert response.headers["retry-after"] == "7" and response.headers["x-ratelimit-remaining"] == "0"
    assert health["upstream_errors"] == 1 and health["recorded"] == 0
    assert await gateway.stored() == []


async def test_an_unreachable_or_silent_server_is_an_error_in_openais_form(tmp_path: Path):
    async def silent(request: web.Request, body: Body) -> None:
        await asyncio.sleep(1)

    async with world(tmp_path / "a", upstream="http://127.0.0.1:9/v1") as gateway:
        away = await gateway.ask(user("one"))
        models = await gateway.http.get("/v1/models")
    async with world(tmp_path / "b", Model(behave=silent), timeout=0.2) as gateway:
        late = await gateway.ask(user("one"))
    assert (away.status_code, models.status_code, late.status_code) == (502, 502, 504)
    for response in (away, models, late):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "start it" in away.json()["error"]["message"] and "0.2 s" in late.json()["error"]["message"]


async def test_other_paths_pass_through_unrecorded(tmp_path: Path):
    async def other(request: web.Request, body: Body) -> web.StreamResponse:
        if request.path.endswith("/models"):
            return web.json_response({"data": [], "query": request.query_string})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in (b"data: 1\n\n", b"data: [DONE]\n\n"):
            await response.write(part)
        return response

    async with world(tmp_path, Model(behave=other)) as gateway:
        models = await gateway.http.get("/session/a%20b/v1/models?limit=2")
        completion = await gateway.http.post("/v1/completions", json={"prompt": "x", "stream": True})
        missing = await gateway.http.get("/nothing")
        outside = await gateway.http.get("/v1/%2e%2e/secret")
    assert models.json() == {"data": [], "query": "limit=2"}
    assert completion.text == "data: 1\n\ndata: [DONE]\n\n"
    assert completion.headers["content-type"].startswith("text/event-stream")
    assert missing.status_code == 404 and outside.status_code == 400
    assert gateway.model.bodies[-1] == {"prompt": "x", "stream": True}
    assert await gateway.stored() == []


async def test_sessions_are_named_by_path_header_body_and_opening(tmp_path: Path):
    async with world(tmp_path) as gateway:
        body = {"model": "policy", "messages": [user("one")], "prompt_cache_key": "from-body"}
        header = {"x-litellm-session-id": "from-header"}
        await gateway.http.post("/session/from-path/v1/chat/completions", json=body, headers=header)
        await gateway.http.post("/v1/chat/completions", json=body, headers=header)
        await gateway.http.post("/v1/chat/completions", json=body)
        for place in ("metadata", "litellm_metadata"):
            named = {**body, "prompt_cache_key": None, place: {"session_id": f"from-{place}"}}
            await gateway.http.post("/v1/chat/completions", json=named)
        plain = {"model": "policy", "messages": [user("one")]}
        answer = (await gateway.http.post("/v1/chat/completions", json=plain)).json()["choices"][0]["message"]
        plain["messages"] += [answer, user("two")]
        await gateway.http.post("/v1/chat/completions", json=plain)
        await gateway.http.post("/v1/chat/completions", json={"model": "policy", "messages": [user("other")]})
        named_by = (await gateway.http.get("/health")).json()["named_by"]
    assert named_by == {"path": 1, "header": 1, "prompt_cache_key": 1, "metadata": 2, "opening": 3}
    found = {trajectory.task.id: len(trajectory.nodes) for trajectory in await gateway.stored()}
    named = {"from-path", "from-header", "from-body", "from-metadata", "from-litellm_metadata"}
    assert named < set(found)
    assert sorted(nodes for name, nodes in found.items() if name.startswith("opening-")) == [2, 4]


async def test_a_retry_joins_the_call_that_is_on_its_way(tmp_path: Path):
    release = asyncio.Event()

    async def wait(request: web.Request, body: Body) -> None:
        await release.wait()

    async with world(tmp_path, Model(behave=wait)) as gateway:
        first = asyncio.create_task(gateway.ask(user("one"), headers={"x-stainless-retry-count": "0"}))
        await until(lambda: len(gateway.model.bodies) == 1)
        again = asyncio.create_task(gateway.ask(user("one"), headers={"x-stainless-retry-count": "1"}))
        other = asyncio.create_task(gateway.ask(user("one"), headers={"x-stainless-retry-count": "0"}))
        await until(lambda: len(gateway.model.bodies) == 2)
        release.set()
        answers = [(await each).json()["choices"][0]["message"]["content"] for each in (first, again, other)]
    assert answers[0] == answers[1] != answers[2]
    assert len(gateway.model.bodies) == 2
    assert sum(node.sampled for node in (await gateway.only()).nodes) == 2
