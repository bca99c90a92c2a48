"""One client, or one server, that sends what nobody expects: nothing stored is lost, and no key or path is reached."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from gateway_world import Body, Model, chunks_of, streamed, until, user, world

from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


def nested(levels: int) -> Body:
    deep: list = []
    for _ in range(levels - 1):
        deep = [deep]
    return {"deep": deep}


@pytest.mark.parametrize("levels", [95, 110, 192, 197, 210])
async def test_deep_json_never_makes_the_store_unreadable(tmp_path: Path, levels: int):
    async def answer(request: web.Request, body: Body) -> web.Response | None:
        if body["messages"][0]["content"] != "answer deeply":
            return None
        return web.json_response({**gateway.model.completion(body), "extra": nested(levels)})

    async with world(tmp_path, Model(behave=answer)) as gateway:
        await gateway.say(user("one"), session="good")
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


async def raw(url: str, path: str, body: bytes) -> bytes:
    """The status line of a POST whose path no client library changes."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return answer.partition(b"\r\n")[0]


async def test_no_path_leads_out_of_v1(tmp_path: Path):
    asked: list[str] = []

    async def answer(request: web.Request, body: Body) -> web.Response:
        asked.append(request.raw_path)
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
        lines = [await raw(gateway.url, path, b"{}") for path in [*refused, *passed]]
    assert [line.split()[1] for line in lines] == [b"400"] * len(refused) + [b"200"] * len(passed)
    assert asked == list(passed.values())


@pytest.mark.parametrize("options", ["abc", [1], 5, True])
@pytest.mark.parametrize("stream", [True, False])
async def test_wrong_stream_options_are_the_servers_to_refuse(tmp_path: Path, options: Any, stream: bool):
    async def refuse(request: web.Request, body: Body) -> web.Response:
        return web.json_response({"error": {"message": "stream_options"}}, status=400)

    async with world(tmp_path, Model(behave=refuse)) as gateway:
        answer = await gateway.ask(user("one"), stream=stream, stream_options=options)
    assert answer.status_code == 400 and answer.json() == {"error": {"message": "stream_options"}}
    assert all(body["stream_options"] == options for body in gateway.model.bodies)


async def test_keys_and_cookies_for_the_gateway_stay_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GATE_KEY", "gate")
    names = ("authorization", "api-key", "x-api-key", "x-goog-api-key", "cookie")
    given = {**dict.fromkeys(names, "mine"), "authorization": "Bearer gate"}
    async with world(tmp_path / "a", api_key_env="GATE_KEY") as gateway:
        await gateway.say(user("one"), headers=given)
        await gateway.http.post("/v1/embeddings", json={}, headers=given)
    for sent in gateway.model.headers:
        assert not set(names) & set(sent)
    async with world(tmp_path / "b") as gateway:
        await gateway.say(user("one"), headers=given)
    assert set(names) & set(gateway.model.headers[0]) == set(names) - {"cookie"}


@pytest.mark.parametrize("error", [ValueError, TypeError, RecursionError])
async def test_an_answer_that_cannot_be_recorded_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
):
    async def fail(self: FileTrajectoryStorage, growth: object) -> None:
        raise error("strange")

    async with world(tmp_path) as gateway:
        monkeypatch.setattr(FileTrajectoryStorage, "grow", fail)
        answer = await gateway.ask(user("one"))
        streamed = await gateway.ask(user("two"), session="t", stream=True)
        counts = (await gateway.http.get("/health")).json()
        monkeypatch.undo()
    assert answer.status_code == 200 and answer.headers["x-openhands-rl-recorded"] == "no"
    assert answer.json()["choices"][0]["message"]["content"] == "answer 1"
    assert "token_ids" not in answer.text and streamed.text.endswith("data: [DONE]\n\n")
    assert counts["unrecorded"] == 2 and counts["recorded"] == 0


async def test_an_error_that_nobody_expected_has_openais_form_and_its_cause_in_the_log_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def fail(self: FileTrajectoryStorage, growth: object) -> None:
        raise RuntimeError("strange")

    def nothing(self: FileTrajectoryStorage, where: object) -> None:
        raise RuntimeError("stranger")

    async with world(tmp_path) as gateway:
        monkeypatch.setattr(FileTrajectoryStorage, "grow", fail)
        whole = await gateway.ask(user("one"), session="a")
        late = b""
        sent = {"model": "m", "stream": True, "messages": [user("one")]}
        with suppress(httpx.RemoteProtocolError):
            async with gateway.http.stream("POST", "/session/b/v1/chat/completions", json=sent) as live:
                async for part in live.aiter_bytes():
                    late += part
        monkeypatch.setattr(FileTrajectoryStorage, "summaries", nothing)
        early = await gateway.ask(user("one"), session="c")
        monkeypatch.undo()
        wrong = await gateway.http.post("/health")
    failures = [each.getMessage() for each in caplog.records if "RuntimeError" in each.getMessage()]
    assert len(failures) == 3 and "RuntimeError: stranger (" in failures[-1]
    for answer, line in ((whole, failures[0]), (early, failures[-1])):
        said = answer.json()["error"]["message"]
        assert answer.status_code == 500 and "strange" not in said and said.rpartition(" ")[2].rstrip(".") in line
    assert b"The server failed" in late and b"strange" not in late
    assert not any(each.exc_info for each in caplog.records)
    assert wrong.status_code == 405 and wrong.json()["error"]


async def test_calls_of_clients_that_left_count_as_in_flight(tmp_path: Path):
    release = asyncio.Event()

    async def slowly(request: web.Request, body: Body) -> web.StreamResponse:
        async def pause(number: int) -> None:
            if number:
                await release.wait()

        return await streamed(request, chunks_of(gateway.model.completion(body), body), pause=pause)

    async def in_flight() -> int:
        return (await gateway.http.get("/health")).json()["in_flight"]

    async with world(tmp_path, Model(behave=slowly), max_in_flight=2, keep_alive=0.05) as gateway:
        for number in range(2):
            sent = {"model": "m", "stream": True, "messages": [user(str(number))]}
            async with gateway.http.stream("POST", "/v1/chat/completions", json=sent):
                await until(lambda number=number: len(gateway.model.bodies) == number + 1)
        await asyncio.sleep(0.3)
        refused = await gateway.ask(user("three"))
        busy = await in_flight()
        release.set()
        async with asyncio.timeout(5):
            while await in_flight():
                await asyncio.sleep(0.02)
        answered = await gateway.ask(user("four"), stream=True)
    assert busy == 2 and refused.status_code == 503 and answered.status_code == 200
    assert len(gateway.model.bodies) == 3


@pytest.mark.parametrize("wrong", [{"error": {"message": "oh"}}, {"choices": [{"index": "x"}]}, {"choices": [5]}])
async def test_nothing_that_only_the_gateway_asked_for_is_in_wrong_answers(tmp_path: Path, wrong: Body):
    ids = {"token_ids": [1], "prompt_token_ids": [2], "provider_specific_fields": {"token_ids": [3]}, "own": "kept"}

    async def answer(request: web.Request, body: Body) -> web.StreamResponse:
        choices = [{**each, **ids, "logprobs": {}} for each in wrong.get("choices", ()) if isinstance(each, dict)]
        said = {**wrong, **ids, "logprobs": {"content": []}, **({"choices": choices} if choices else {})}
        return await streamed(request, [said]) if body.get("stream") else web.json_response(said)

    async with world(tmp_path, Model(behave=answer)) as gateway:
        answers = [await gateway.ask(user("one"), stream=stream) for stream in (True, False)]
    for each in answers:
        assert "token_ids" not in each.text and "logprobs" not in each.text and "kept" in each.text
