"""What the engine makes of the shapes that servers give answers, streams and errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from raw_server import raw_server, respond
from wire_shapes import ERRORS, MESSAGES, STREAMS

from openhands_rl_plugin.core.errors import InfrastructureError, ModelError
from openhands_rl_plugin.core.types import Completion, Message
from openhands_rl_plugin.models.engines.openai import OpenAIEngine

ASK = (Message(role="user", content="hi"),)
NO_USAGE = (None, {}, {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": None}, "null", [])


def completion(message: dict[str, Any], usage: Any = None, finish: Any = None) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, "logprobs": None}
    return {"id": None, "error": None, "choices": [choice], "usage": usage}


def events(*chunks: Any) -> bytes:
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return respond(body.encode(), content_type="text/event-stream")


def chunk(delta: Any, finish: Any = None, **more: Any) -> dict[str, Any]:
    return {"id": "c1", "error": None, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


async def ask(*answers: bytes, stream: bool = False, **options: Any) -> tuple[Completion, int]:
    """The completion, and how often the server was asked."""
    left = list(answers)
    async with raw_server(lambda path, body: left.pop(0) if left[1:] else left[0]) as server:
        engine = OpenAIEngine("m", f"{server.url}/v1", **{"timeout": 5.0, "backoff": 0.01, "retries": 1, **options})
        try:
            if stream:
                found = [part async for part in engine.stream(ASK)][-1]
            else:
                (found,) = await engine.complete(ASK)
        finally:
            await engine.aclose()
    assert isinstance(found, Completion)
    return found, len(server.requests)


@pytest.mark.parametrize("name", MESSAGES)
async def test_messages(name: str) -> None:
    given, meant, reasoning = MESSAGES[name]
    found, _ = await ask(respond(completion(given)))
    assert (found.message, found.metadata.get("reasoning_content")) == (meant, reasoning)


@pytest.mark.parametrize("name", STREAMS)
async def test_streams(name: str) -> None:
    deltas, meant, reasoning = STREAMS[name]
    parts = [chunk(delta, "", usage=None) for delta in deltas]
    found, _ = await ask(
        events(*parts, chunk(None, "stop"), {"choices": [], "usage": {"prompt_tokens": 3}}), stream=True
    )
    assert (found.message, found.metadata.get("reasoning_content")) == (meant, reasoning)
    assert found.finish_reason == "stop" and found.usage.prompt_tokens == 3


async def test_no_usage_and_no_finish_reason() -> None:
    for usage in NO_USAGE:
        for finish in (None, "", "null"):
            found, _ = await ask(respond(completion({"content": "Hi"}, usage, finish)))
            assert (found.usage.prompt_tokens, found.usage.calls, found.finish_reason) == (0, 1, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ERRORS)
async def test_an_error_in_a_200_is_what_its_code_says(name: str, stream: bool) -> None:
    body, again = ERRORS[name]
    error = events(body) if stream else respond(body)
    good = events(chunk({"content": "Hi"}, "stop")) if stream else respond(completion({"content": "Hi"}))
    if again:
        found, asked = await ask(error, good, stream=stream)
        assert found.message.content == "Hi" and found.metadata["attempts"] == asked == 2
    with pytest.raises(InfrastructureError if again else ModelError, match="Provider returned error"):
        await ask(error, stream=stream)


async def test_an_error_behind_a_text_is_not_asked_again() -> None:
    late = events(chunk({"content": "Hi"}), {"error": {"code": 429, "message": "slow down"}, "choices": []})
    with pytest.raises(InfrastructureError, match="answered 429: slow down"):
        await ask(late, events(chunk({"content": "Hi"}, "stop")), stream=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_drips_is_given_up(stream: bool) -> None:
    """Every read is quick; the deadline is of the request as a whole."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        kind = b"text/event-stream" if stream else b"application/json"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n\r\n")
        try:
            while True:
                writer.write(b": still here\n\n" if stream else b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    engine = OpenAIEngine("m", url, timeout=0.3, retries=0)
    try:
        async with asyncio.timeout(3):
            with pytest.raises(InfrastructureError, match="did not answer within"):
                _ = [part async for part in engine.stream(ASK)] if stream else await engine.complete(ASK)
    finally:
        await engine.aclose()
        server.close()
