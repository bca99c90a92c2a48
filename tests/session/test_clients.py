"""What a client gets: the model server's own answers as if nothing stood between, or those that a strategy chose."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from gateway_world import SYSTEM, Body, Model, World, prompt_ids, sampled_ids, stored, until, user, world

from openhands_rl_plugin.core.types import StopReason, StrategySpec


async def test_errors_of_the_model_server_pass_unchanged(tmp_path: Path) -> None:
    text = '{"error":  {"message": "slow down"}}'

    async def refuse(request: web.Request, body: Body) -> web.Response:
        headers = {"retry-after": "7", "x-ratelimit-remaining": "0"}
        return web.Response(status=429, text=text, content_type="application/problem+json", headers=headers)

    async with world(tmp_path, Model(behave=refuse)) as gateway:
        response = await gateway.ask(user("one"), stream=True)
        health = (await gateway.http.get("/health")).json()
    assert (response.status_code, response.text) == (429, text)
    assert response.headers["content-type"].startswith("application/problem+json")
    assert response.headers["retry-after"] == "7" and response.headers["x-ratelimit-remaining"] == "0"
    assert health["recorded"] == 0
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


async def test_sessions_are_named_by_path_header_body_and_opening(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(tmp_path) as gateway:
        plain: Body = {"model": "policy", "messages": [user("one")]}
        body, header = {**plain, "prompt_cache_key": "from-body"}, {"x-litellm-session-id": "from-header"}
        await gateway.http.post("/session/from%20path/v1/chat/completions", json=body, headers=header)
        await gateway.http.post("/v1/chat/completions", json=body, headers=header)
        await gateway.http.post("/v1/chat/completions", json=body)
        answer = (await gateway.http.post("/v1/chat/completions", json=plain)).json()["choices"][0]["message"]
        plain["messages"] += [answer, user("two")]
        await gateway.http.post("/v1/chat/completions", json=plain)
        await gateway.http.post("/v1/chat/completions", json={"model": "policy", "messages": [user("other")]})
    found = {trajectory.task.id: len(trajectory.nodes) for trajectory in await gateway.stored()}
    assert {"from path", "from-header", "from-body"} < set(found)
    assert sorted(nodes for name, nodes in found.items() if name.startswith("opening-")) == [2, 4]
    assert caplog.text.count("a conversation sends no id") == 1


async def test_a_retry_joins_the_call_that_is_on_its_way_and_an_end_waits_for_it(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def wait(request: web.Request, body: Body) -> None:
        await release.wait()

    async with world(tmp_path, Model(behave=wait)) as gateway:
        first = asyncio.create_task(gateway.ask(user("one"), headers={"x-stainless-retry-count": "0"}))
        await until(lambda: len(gateway.model.bodies) == 1)
        again = asyncio.create_task(gateway.ask(user("one"), headers={"x-stainless-retry-count": "1"}))
        other = asyncio.create_task(gateway.ask(user("one"), headers={"x-stainless-retry-count": "0"}))
        await until(lambda: len(gateway.model.bodies) == 2)
        ending = asyncio.create_task(gateway.end())
        await asyncio.sleep(0.1)
        assert not ending.done()
        release.set()
        answers = [(await each).json()["choices"][0]["message"]["content"] for each in (first, again, other)]
        assert (await ending).json()["ended"]
    assert answers[0] == answers[1] != answers[2] and len(gateway.model.bodies) == 2
    trajectory = await gateway.only()
    assert trajectory.stop is StopReason.TERMINATED and sum(node.sampled for node in trajectory.nodes) == 2


BEST = {"name": "BestOfN", "options": {"n": 2, "value": "model"}}


def judged() -> Model:
    """Samples a bad and a good answer in turn, and knows which is which."""

    async def behave(request: web.Request, body: Body) -> web.Response:
        asked, before = body["messages"][-1]["content"], body["messages"][-2:-1]
        if "Yes or No" in asked:
            text = "Yes" if "good" in before[0]["content"] else "No"
        else:
            text = f"{('bad', 'good')[model.answers % 2]} {model.answers}"
        return web.json_response(model.completion(body, {"role": "assistant", "content": text}))

    model = Model(behave=behave)
    return model


async def opened(gateway: World, **body: Any) -> openai.AsyncOpenAI:
    response = await gateway.http.post("/session", json={"session": "s", **body})
    assert response.status_code == 201, response.text
    return openai.AsyncOpenAI(base_url=gateway.url + response.json()["path"], api_key="k", max_retries=0)


async def answer_to(client: openai.AsyncOpenAI, history: Any) -> str:
    answer = await client.chat.completions.create(model="policy", messages=history, temperature=0)
    return answer.choices[0].message.content or ""


async def test_a_strategy_chooses_among_proposals_and_all_of_them_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openhands_rl_plugin.session.gateway.KEEP_ALIVE_SECONDS", 0.001)
    async with world(tmp_path, judged()) as gateway:
        client = await opened(gateway, task="Do it.", strategy=BEST, limits={"max_turns": 9}, seed=4)
        history: Any = [SYSTEM, user("one")]
        for text in ("two", "three"):
            asked: Any = {"model": "policy", "messages": history, "temperature": 0}
            raw = await client.chat.completions.with_raw_response.create(**asked)
            assert raw.content.startswith(b" "), "white space fills the time of a decision"
            history += [{"role": "assistant", "content": raw.parse().choices[0].message.content}, user(text)]
        stream = await client.chat.completions.create(model="policy", messages=history, stream=True)
        last = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert (await gateway.end(success=True, evidence={"tests": 2})).json()["scored"]
        bodies = [body for body in gateway.model.bodies if "Yes or No" not in body["messages"][-1]["content"]]
    episode = await gateway.only()
    assert [each["content"][:4] for each in history if each["role"] == "assistant"] == ["good", "good"]
    assert [message.content for message in episode.messages()] == [*(each["content"] for each in history), last]
    assert episode.strategy == StrategySpec.model_validate(BEST) and episode.task.instruction == "Do it."
    assert episode.stop is StopReason.TERMINATED and episode.evidence["tests"] == 2 and episode.usage.calls == 12
    assert len(bodies) == 6 == sum(node.sampled for node in episode.nodes) and bodies[0]["temperature"] == 1.0
    texts = {message.content for message in episode.messages()}
    chosen = [node for node in episode.nodes if node.sampled and node.message.content in texts]
    ids = [each for node in chosen if node.tokens for each in (*node.tokens.prompt_ids, *node.tokens.sampled_ids)]
    assert ids == prompt_ids(history) + sampled_ids({"content": last})
    assert [node.reward for node in chosen] == [0.0, 0.0, None]


async def test_limits_end_the_session_and_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    wrong: list[Body] = [{"strategy": {"name": "Best"}}, {"limits": {"max_turns": 0}}, {"limit": {}}]
    async with world(tmp_path) as gateway:
        for body, expected in zip(wrong, ("Best", "max_turns", "limit"), strict=True):
            refused = await gateway.http.post("/session", json={"session": "s", **body})
            assert refused.status_code == 400 and expected in refused.json()["error"]["message"]
        client = await opened(gateway, limits={"max_turns": 1})
        assert (await gateway.http.post("/session", json={"session": "s"})).status_code == 409
        with pytest.raises(openai.BadRequestError, match="the request has an unknown format"):
            await answer_to(client, [{"role": "user", "content": "one", "name": {}}])
        answer = await answer_to(client, [user("one")])
        with pytest.raises(openai.BadRequestError, match="max_turns"):
            await answer_to(client, [user("one"), {"role": "assistant", "content": answer}, user("two")])
        await gateway.end()
        await opened(gateway)
        assert (await gateway.end(reward=1)).status_code == 404, "no reward for the episode before"
    ((episode, scores),) = await stored(tmp_path)
    assert episode.stop is StopReason.MAX_TURNS and not scores
