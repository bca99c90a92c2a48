"""Streams through the gateway: passed on as they come, whatever becomes of the server, the client or the store."""

from __future__ import annotations

import asyncio
import json
import re
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

TEXT_KEYS = {"chat/completions": "content", "messages": "text", "responses": "delta"}
"""Path of a protocol -> the field with the text of its streams."""
CHAT = "chat/completions"
PATHS = pytest.mark.parametrize("path", TEXT_KEYS)
TEXT = "the whole answer of the model, as it is"
MIDDLE = 6

JUNK = {
    "cut": b"data: {",
    "types": b'data: {"choices": 5, "type": 7}',
    "bytes": b"data: \xff\xfe",
    "deep": b"data: " + b"[" * 90_000,
    "choice": b'data: {"choices": [{"index": -1}]}',
    "delta": b'data: {"type": "content_block_delta", "index": 99, "delta": {"type": "text_delta"}}',
}


def asked(path: str, text: str = "one", **more: Any) -> Body:
    prompt: Body = {"input": text} if path == "responses" else {"messages": [user(text)]}
    return {"model": "policy", "stream": True, **({"max_tokens": 9} if path == "messages" else {}), **prompt, **more}


def events_of(path: str, body: Body, model: Model) -> list[bytes]:
    """A whole stream of that protocol."""
    if path == "messages":
        return message_events(message({"type": "text", "text": TEXT}))
    if path == "responses":
        return response_events(response(text_item(TEXT)))
    answer = model.completion(body, {"role": "assistant", "content": TEXT})
    return [*(b"data: %s\n\n" % json.dumps(each).encode() for each in chunks_of(answer, body)), b"data: [DONE]\n\n"]


def text_in(path: str, stream: str) -> str:
    """The text of a stream in any of the protocols."""
    return "".join(re.findall(rf'"{TEXT_KEYS[path]}": ?"([^"]*)"', stream))


def model_of(change: Callable[[list[bytes]], list[bytes]] = list, middle: Any = None) -> Model:
    """A server of all protocols whose events are changed before they are sent; ``middle`` is awaited among them."""

    async def behave(request: web.Request, body: Body) -> web.StreamResponse:
        async def pause(number: int) -> None:
            if number == MIDDLE and middle is not None:
                await middle(request)

        return await streamed(request, change(events_of(request.path.partition("/v1/")[2], body, model)), pause=pause)

    model = Model(behave=behave)
    return model


async def read(world: World, path: str, session: str = "s", **more: Any) -> httpx.Response:
    return await world.http.post(f"/session/{session}/v1/{path}", json=asked(path, **more))


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


async def test_of_a_chat_the_client_gets_what_it_asked_for(tmp_path: Path) -> None:
    usage = {"stream_options": {"include_usage": True}}
    async with world(tmp_path, model_of()) as gateway:
        plain, counted = await read(gateway, CHAT), await read(gateway, CHAT, **usage)
        full = await read(gateway, CHAT, return_token_ids=True, logprobs=True, **usage)
    assert gateway.model.bodies[0]["stream_options"] == usage["stream_options"]
    for word in ("token_ids", 'logprob"', "usage"):
        assert word not in plain.text and (word in counted.text) == (word == "usage") and word in full.text
    assert full.content == b"".join(events_of(CHAT, gateway.model.bodies[-1], Model(answers=2)))
    assert text_in(CHAT, plain.text) == TEXT
    for node in (node for node in (await gateway.only()).nodes if node.sampled):
        assert node.tokens is not None and "missing" not in node.metadata
        assert list(node.tokens.sampled_ids) == sampled_ids({"content": TEXT})
        assert len(node.tokens.logprobs) == len(node.tokens.sampled_ids)
        assert list(node.tokens.prompt_ids) == prompt_ids([user("one")])


@PATHS
async def test_odd_events_are_passed_on_and_the_next_stream_is_recorded(tmp_path: Path, path: str) -> None:
    junk = b""

    def change(events: list[bytes]) -> list[bytes]:
        if junk:
            return [*events[:2], junk + b"\n\n", *events[2:]]
        # Comments, other line ends and other cuts do not matter.
        text = (b": hello\n\n" + b"".join(events)).replace(b"\n", b"\r\n")
        return [text[at : at + 7] for at in range(0, len(text), 7)]

    async with world(tmp_path, model_of(change)) as gateway:
        for name, junk in (*JUNK.items(), ("whole", b"")):
            got = await read(gateway, path, session=name)
            assert junk in got.content and got.content.count(b"\n") >= 3
        health = (await gateway.http.get("/health")).json()
    # An event of no known type is not malformed to a protocol that may have new ones.
    stored = await gateway.stored()
    assert "whole" in {trajectory.task.id for trajectory in stored} and len(stored) == health["recorded"] < len(JUNK)
    assert health["recorded"] + health["unrecorded"] == len(JUNK) + 1
    assert {trajectory.nodes[-1].message.content for trajectory in stored} == {TEXT}


@PATHS
async def test_a_server_that_dies_in_the_middle(tmp_path: Path, path: str) -> None:
    dies = [True]

    async def die(request: web.Request) -> None:
        if dies[0] and request.transport is not None:
            request.transport.abort()

    async with world(tmp_path, model_of(middle=die)) as gateway:
        url, failures = f"{gateway.url}/session/s", (openai.APIError, anthropic.APIError, httpx.HTTPError)
        with pytest.raises(failures, match="broke off"):
            await consume(path, url)
        assert await gateway.stored() == []
        dies[0] = False
        assert await consume(path, url) == TEXT
        assert (await gateway.http.get("/health")).json()["recorded"] == 1
    assert len((await gateway.only()).nodes) == 2


@PATHS
async def test_events_come_at_once_and_a_client_that_leaves_among_them_loses_nothing(tmp_path: Path, path: str) -> None:
    release = asyncio.Event()
    async with world(tmp_path, model_of(middle=lambda _: release.wait())) as gateway:
        url, seen = f"/session/s/v1/{path}", ""
        async with gateway.http.stream("POST", url, json=asked(path)) as response:
            assert response.headers["x-own"] == "1"
            async for text in response.aiter_text():
                seen += text
                if "the " in seen:
                    break
        assert "it is" not in seen
        await asyncio.sleep(0.1)
        again = asyncio.create_task(gateway.http.post(url, json=asked(path)))
        await asyncio.sleep(0.1)
        release.set()
        got = (await again).text
    assert len(gateway.model.bodies) == 1 and text_in(path, got) == TEXT
    assert [(node.sampled, node.message.content) for node in (await gateway.only()).nodes][1:] == [(True, TEXT)]


@PATHS
async def test_a_client_sees_no_end_that_is_not_stored(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: FileTrajectoryStorage, growth: object) -> None:
        raise StorageError("no space left")

    async with world(tmp_path, model_of()) as gateway:
        with monkeypatch.context() as patched:
            patched.setattr(FileTrajectoryStorage, "grow", full)
            with pytest.raises((openai.APIError, anthropic.APIError), match="no space left"):
                await consume(path, f"{gateway.url}/session/s")
        assert await consume(path, f"{gateway.url}/session/s") == TEXT
    assert sum(node.sampled for node in (await gateway.only()).nodes) == 2


@PATHS
async def test_silence_is_filled_and_late_errors_come_in_the_protocols_form(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openhands_rl_plugin.session.gateway.KEEP_ALIVE_SECONDS", 0.1)

    async def slow(request: web.Request, body: Body) -> web.StreamResponse:
        await asyncio.sleep(0.3)
        if "fail" in str(body):
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        return await streamed(request, events_of(path, body, model))

    model = Model(behave=slow)
    async with world(tmp_path, model) as gateway:
        good, bad = await read(gateway, path), await read(gateway, path, text="fail")
    assert good.text.startswith(": keep-alive\n\n") and text_in(path, good.text) == TEXT
    assert "out of memory" in bad.text
    assert ("event: error\n" in bad.text) == (path != CHAT) and ("[DONE]" in bad.text) == (path == CHAT)


async def test_a_request_whose_token_ids_are_refused_is_sent_without(tmp_path: Path) -> None:
    async def behave(request: web.Request, body: Body) -> web.StreamResponse | None:
        if {"return_token_ids", "stream_options"} & {*body}:
            words = "Extra inputs are not permitted: return_token_ids, stream_options"
            return web.json_response({"detail": words}, status=422)
        return None

    why = "the model server refuses return_token_ids with status 422"
    async with world(tmp_path, Model(behave=behave)) as gateway:
        for turn in range(3):
            answer = await read(gateway, CHAT, session=f"{turn}")
            assert answer.status_code == 200 and "token_ids" not in answer.text
        health = (await gateway.http.get("/health")).json()
    assert health["missing"] == {f"token_ids: {why}": 3}
    assert len(gateway.model.bodies) == 6
    assert [each.nodes[-1].metadata["missing"] for each in await gateway.stored()] == [{"token_ids": why}] * 3


async def test_what_is_missing_is_shown_to_who_looks_at_the_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stream that leaves ids out does as servers that hold back the text of a tool call."""
    async with world(tmp_path, model_of(lambda events: [*events[:3], *events[4:]])) as gateway:
        await read(gateway, CHAT, session="out")
        await read(gateway, "messages", session="claude")
        await read(gateway, "responses", session="codex", previous_response_id="resp_0")
    async with world(tmp_path, model_of(), run_id="other") as gateway:
        await read(gateway, CHAT, session="off", logprobs=False)
    for stored in await gateway.stored():
        assert await asyncio.to_thread(cli.main, ["show", str(tmp_path), stored.id]) == 0
    shown = capsys.readouterr().out
    assert await asyncio.to_thread(cli.main, ["list", str(tmp_path), "--by"]) == 0
    printed = capsys.readouterr().out
    for gap in (
        "no logprobs: the client turned logprobs off",
        "no token ids: the stream left some token ids out",
        "no token ids: POST /v1/messages reports none",
        "not recorded whole: the request refers to what the model server holds",
    ):
        assert gap in shown and f"1 x {gap}\n" in printed
    assert printed.count("serve the model with vLLM") == 1
