"""Streams through the gateway: passed on as they come, whatever becomes of the server, the client or the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from aiohttp import web
from gateway_world import Body, Model, World, chunks_of, prompt_ids, sampled_ids, streamed, user, world
from protocol_wire import message, message_events, response, response_events, text_item

from openhands_rl_plugin import cli
from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

pytestmark = pytest.mark.contract

PATHS = ("chat/completions", "messages", "responses")
TEXT = "the whole answer of the model, as it is"


JUNK = {
    "cut": b"data: {",
    "list": b"data: [1]",
    "types": b'data: {"choices": 5, "type": 7}',
    "bytes": b"data: \xff\xfe",
    "deep": b"data: " + b"[" * 90_000,
    "choice": b'data: {"choices": [{"index": -1}]}',
    "delta": b'data: {"type": "content_block_delta", "index": 99, "delta": {"type": "text_delta"}}',
}


def asked(path: str, text: str = "one", **more: Any) -> Body:
    said: Body = {"input": text} if path == "responses" else {"messages": [user(text)]}
    return {"model": "policy", "stream": True, **({"max_tokens": 9} if path == "messages" else {}), **said, **more}


def sse(chunk: Body) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def events_of(path: str, body: Body, model: Model, text: str = TEXT) -> list[bytes]:
    """A whole stream of that protocol."""
    if path == "messages":
        return message_events(message({"type": "text", "text": text}))
    if path == "responses":
        return response_events(response(text_item(text)))
    answer = model.completion(body)
    answer["choices"][0] |= {"message": {"role": "assistant", "content": text}}
    ids = sampled_ids(answer["choices"][0]["message"])
    if body.get("return_token_ids"):
        answer["choices"][0]["token_ids"] = ids
    if body.get("logprobs"):
        answer["choices"][0]["logprobs"]["content"] = [{"token": "x", "logprob": -0.5} for _ in ids]
    return [*map(sse, chunks_of(answer, body)), b"data: [DONE]\n\n"]


def path_of(request: web.Request) -> str:
    return request.path.partition("/v1/")[2]


def text_in(stream: str) -> str:
    """The text of a stream in any of the protocols."""
    found = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    for each in found:
        each["said"] = each.get("delta") if each.get("type") == "response.output_text.delta" else ""
        if each.get("type") == "content_block_delta":
            each["said"] = each["delta"]["text"]
        for choice in each.get("choices", ()):
            each["said"] = choice["delta"].get("content")
    return "".join(each["said"] or "" for each in found)


def model_of(change: Callable[[list[bytes]], list[bytes]] = list, pause: Any = None) -> Model:
    """A server of all protocols whose events are changed before they are sent."""

    async def behave(request: web.Request, body: Body) -> web.StreamResponse:
        events = change(events_of(path_of(request), body, model))
        return await streamed(request, events, pause=pause(len(events)) if pause else None)

    model = Model(behave=behave)
    return model


async def read(world: World, path: str, session: str = "s", **more: Any) -> httpx.Response:
    return await world.http.post(f"/session/{session}/v1/{path}", json=asked(path, **more))


@pytest.mark.parametrize("path", PATHS)
async def test_events_arrive_while_the_model_still_samples(tmp_path: Path, path: str):
    release = asyncio.Event()

    def pause(events: int) -> Any:
        async def wait(number: int) -> None:
            if number == events // 2:
                await release.wait()

        return wait

    async with world(tmp_path, model_of(pause=pause)) as gateway:
        seen = ""
        async with gateway.http.stream("POST", f"/v1/{path}", json=asked(path)) as response:
            assert response.headers["x-own"] == "1"
            async for text in response.aiter_text():
                seen += text
                if not release.is_set() and "the " in seen:
                    assert "it is" not in seen
                    release.set()
        assert release.is_set()
    assert (await gateway.only()).nodes[-1].message.content == TEXT


async def test_of_a_chat_the_client_gets_what_it_asked_for(tmp_path: Path):
    async with world(tmp_path, model_of()) as gateway:
        plain, usage = (
            await read(gateway, PATHS[0]),
            await read(gateway, PATHS[0], stream_options={"include_usage": True}),
        )
        everything = {"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}
        full = await read(gateway, PATHS[0], **everything)
    assert gateway.model.bodies[0]["stream_options"] == {"include_usage": True}
    for word in ("token_ids", 'logprob"', "usage"):
        assert word not in plain.text and (word in usage.text) == (word == "usage") and word in full.text
    assert full.content == b"".join(events_of(PATHS[0], gateway.model.bodies[-1], Model(answers=2)))
    chunks = [json.loads(line[6:]) for line in plain.text.split("\n\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == TEXT
    for node in (node for node in (await gateway.only()).nodes if node.sampled):
        assert node.tokens is not None and "missing" not in node.metadata
        assert list(node.tokens.sampled_ids) == sampled_ids({"content": TEXT})
        assert len(node.tokens.logprobs) == len(node.tokens.sampled_ids)
        assert list(node.tokens.prompt_ids) == prompt_ids([user("one")])
        assert node.metadata["response"]["usage"]["prompt_tokens"] == len(prompt_ids([user("one")]))  # pyright: ignore


async def test_a_stream_that_leaves_ids_out_says_so(tmp_path: Path):
    """As servers do that hold back the text of a tool call."""

    def drop(events: list[bytes]) -> list[bytes]:
        return [each for at, each in enumerate(events) if at != 3]

    async with world(tmp_path, model_of(drop)) as gateway:
        await read(gateway, PATHS[0])
        health = (await gateway.http.get("/health")).json()
    node = (await gateway.only()).nodes[-1]
    assert node.tokens is None
    assert node.metadata["missing"] == {"token_ids": "the stream left some token ids out"}
    assert health["missing"] == {"token_ids: the stream left some token ids out": 1}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
async def test_malformed_events_are_passed_on_and_the_next_stream_is_recorded(tmp_path: Path, path: str, junk: bytes):
    broken = [True]

    def change(events: list[bytes]) -> list[bytes]:
        return [*events[:2], junk + b"\n\n", *events[2:]] if broken[0] else events

    async with world(tmp_path, model_of(change)) as gateway:
        got = await read(gateway, path, session="a")
        broken[0] = False
        assert (await read(gateway, path, session="b")).status_code == 200
        health = (await gateway.http.get("/health")).json()
    assert junk in got.content and got.content.count(b"\n\n") >= 3
    # An event of no known type is not malformed to a protocol that may have new ones.
    known = {trajectory.task.id for trajectory in await gateway.stored()}
    assert "b" in known and health["recorded"] + health["unrecorded"] == 2
    assert (health["unrecorded"] == 1) == ("a" not in known)
    for trajectory in await gateway.stored():
        assert trajectory.nodes[-1].message.content == TEXT


@pytest.mark.parametrize("path", PATHS)
async def test_comments_line_ends_and_cuts_do_not_matter(tmp_path: Path, path: str):
    def change(events: list[bytes]) -> list[bytes]:
        text = b": hello\n\n" + b"".join(events)
        text = text.replace(b"\n", b"\r\n")
        return [text[at : at + 7] for at in range(0, len(text), 7)]

    async with world(tmp_path, model_of(change)) as gateway:
        assert (await read(gateway, path)).status_code == 200
    assert (await gateway.only()).nodes[-1].message.content == TEXT


@pytest.mark.parametrize("path", PATHS)
async def test_a_server_that_dies_in_the_middle(tmp_path: Path, path: str):
    dies = [True]

    async def behave(request: web.Request, body: Body) -> web.StreamResponse:
        events = events_of(path, body, model)
        if not dies[0]:
            return await streamed(request, events)

        async def die(number: int) -> None:
            if number == 4 and request.transport is not None:
                request.transport.abort()

        return await streamed(request, events, pause=die)

    model = Model(behave=behave)
    async with world(tmp_path, model) as gateway:
        url, failures = f"{gateway.url}/session/s", (openai.APIError, anthropic.APIError, httpx.HTTPError)
        with pytest.raises(failures, match="broke off"):
            await consume(path, url)
        assert await gateway.stored() == []
        dies[0] = False
        assert await consume(path, url) == TEXT
        health = (await gateway.http.get("/health")).json()
    assert health["recorded"] == 1
    assert len((await gateway.only()).nodes) == 2


async def consume(path: str, url: str) -> str:
    """The text of a stream, as each protocol's own client gives it."""
    if path == "messages":
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="k", max_retries=0) as client,
            client.messages.stream(model="policy", max_tokens=9, messages=[{"role": "user", "content": "x"}]) as stream,
        ):
            return "".join([text async for text in stream.text_stream])
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
        if path == "responses":
            events = await client.responses.create(model="policy", input="x", stream=True)
            return "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
        chunks = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "x"}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_that_leaves_in_the_middle_loses_nothing(tmp_path: Path, path: str):
    release = asyncio.Event()

    def pause(events: int) -> Any:
        async def wait(number: int) -> None:
            if number == 4:
                await release.wait()

        return wait

    async with world(tmp_path, model_of(pause=pause)) as gateway:
        url = f"/session/s/v1/{path}"
        async with gateway.http.stream("POST", url, json=asked(path)) as response:
            async for _ in response.aiter_bytes():
                break
        await asyncio.sleep(0.1)
        again = asyncio.create_task(gateway.http.post(url, json=asked(path)))
        await asyncio.sleep(0.1)
        release.set()
        got = (await again).text
    assert len(gateway.model.bodies) == 1
    assert text_in(got) == TEXT
    assert [node.sampled for node in (await gateway.only()).nodes] == [False, True]


@pytest.mark.parametrize("path", PATHS)
async def test_a_client_sees_no_end_that_is_not_stored(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch):
    async def full(self: FileTrajectoryStorage, growth: object) -> None:
        raise StorageError("no space left")

    async with world(tmp_path, model_of()) as gateway:
        grow = FileTrajectoryStorage.grow
        monkeypatch.setattr(FileTrajectoryStorage, "grow", full)
        with pytest.raises((openai.APIError, anthropic.APIError), match="no space left"):
            await consume(path, f"{gateway.url}/session/s")
        monkeypatch.setattr(FileTrajectoryStorage, "grow", grow)
        assert await consume(path, f"{gateway.url}/session/s") == TEXT
    assert sum(node.sampled for node in (await gateway.only()).nodes) == 2


@pytest.mark.parametrize("path", PATHS)
async def test_silence_is_filled_and_late_errors_come_in_the_protocols_form(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("openhands_rl_plugin.session.gateway.KEEP_ALIVE_SECONDS", 0.1)

    async def slow(request: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.sleep(0.3)
        if "fail" in str(body):
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        return await streamed(request, events_of(path, body, model))

    model = Model(behave=slow)
    async with world(tmp_path, model) as gateway:
        good, bad = await read(gateway, path), await read(gateway, path, text="fail")
    assert good.text.startswith(": keep-alive\n\n") and text_in(good.text) == TEXT
    assert "out of memory" in bad.text
    assert ("event: error\n" in bad.text) == (path != PATHS[0]) and ("[DONE]" in bad.text) == (path == PATHS[0])


async def test_a_server_that_refuses_token_ids_is_not_asked_for_them_again(tmp_path: Path):
    async def behave(request: web.Request, body: Body) -> web.StreamResponse | None:
        if {"return_token_ids", "stream_options"} & {*body}:
            words = "Extra inputs are not permitted: return_token_ids, stream_options"
            return web.json_response({"detail": words}, status=422)
        return None

    why = "the model server refuses return_token_ids with status 422"
    async with world(tmp_path, Model(behave=behave)) as gateway:
        for turn in range(3):
            answer = await read(gateway, PATHS[0], session=f"{turn}")
            assert answer.status_code == 200 and "token_ids" not in answer.text
        health = (await gateway.http.get("/health")).json()
    assert health["refusal"] == why and health["missing"] == {f"token_ids: {why}": 3}
    assert len(gateway.model.bodies) == 4
    assert [each.nodes[-1].metadata["missing"] for each in await gateway.stored()] == [{"token_ids": why}] * 3


async def test_what_is_missing_is_shown_to_who_looks_at_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async with world(tmp_path) as gateway:
        await read(gateway, PATHS[0], session="whole")
        await read(gateway, PATHS[0], session="off", logprobs=False)
    async with world(tmp_path, model_of(), run_id="other") as gateway:
        await read(gateway, "messages", session="claude")
        await read(gateway, "responses", session="codex", previous_response_id="resp_0")
    for name in ("off", "claude"):
        (stored,) = [each for each in await gateway.stored() if each.task.id == name]
        assert await asyncio.to_thread(cli.main, ["show", str(tmp_path), stored.id]) == 0
    shown = capsys.readouterr().out
    assert "no logprobs: the client turned logprobs off" in shown
    assert "no token ids: POST /v1/messages reports none" in shown
    assert await asyncio.to_thread(cli.main, ["list", str(tmp_path), "--by"]) == 0
    told = capsys.readouterr().out
    assert "1 x no logprobs: the client turned logprobs off\n" in told
    assert "1 x no token ids: POST /v1/messages reports none\n" in told
    assert "1 x not recorded whole: the request refers to what the model server holds\n" in told
    assert told.count("serve the model with vLLM") == 1
    assert await asyncio.to_thread(cli.main, ["list", str(tmp_path), "--by", "run", "--json"]) == 0
    groups = {group["name"][0]: group["gaps"] for group in json.loads(capsys.readouterr().out)}
    assert groups["gateway"] == {"no logprobs: the client turned logprobs off": 1}
