"""What the engine makes of the shapes that servers give answers, streams and errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from raw_server import dripping_server, raw_server, respond
from wire_shapes import AGAIN, MESSAGES, REFUSED, STREAMS

from openhands_rl_plugin.core.errors import InfrastructureError, ModelError, PublishError
from openhands_rl_plugin.core.types import Completion, Message
from openhands_rl_plugin.models.adapters.servers import Connection
from openhands_rl_plugin.models.engines.openai import OpenAIEngine
from openhands_rl_plugin.models.engines.server_models import listed_models

ASK = (Message(role="user", content="hi"),)
NO_USAGE = (None, {}, {"prompt_tokens": None, "prompt_tokens_details": None}, "null", [])


def completion(message: dict[str, Any], usage: Any = None, finish: Any = None) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, "logprobs": None}
    return respond({"id": None, "error": {"message": None, "code": None}, "choices": [choice], "usage": usage})


def events(*chunks: Any) -> bytes:
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return respond(body.encode(), content_type="text/event-stream")


def chunk(delta: Any, finish: Any = None) -> dict[str, Any]:
    return {"error": None, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": None}


async def sampled(engine: OpenAIEngine, stream: bool) -> Completion:
    if not stream:
        return (await engine.complete(ASK))[0]
    last = [part async for part in engine.stream(ASK)][-1]
    assert isinstance(last, Completion)
    return last


async def ask(*answers: bytes, stream: bool = False) -> Completion:
    left = list(answers)
    async with raw_server(lambda path, body: left.pop(0) if left[1:] else left[0]) as server:
        engine = OpenAIEngine("m", f"{server.url}/v1", timeout=5.0, backoff=0.01, retries=1)
        try:
            return await sampled(engine, stream)
        finally:
            await engine.aclose()


@pytest.mark.parametrize("name", MESSAGES)
async def test_messages(name: str) -> None:
    given, meant, reasoning = MESSAGES[name]
    found = await ask(completion(given))
    assert (found.message, found.metadata.get("reasoning_content")) == (meant, reasoning)


@pytest.mark.parametrize("name", STREAMS)
async def test_streams(name: str) -> None:
    deltas, meant, reasoning = STREAMS[name]
    ending = (chunk(None, "stop"), {"choices": [], "usage": {"prompt_tokens": 3}})
    found = await ask(events(*(chunk(delta, "") for delta in deltas), *ending), stream=True)
    assert (found.message, found.metadata.get("reasoning_content")) == (meant, reasoning)
    assert found.finish_reason == "stop" and found.usage.prompt_tokens == 3


@pytest.mark.parametrize("finish", [None, "", "null"])
async def test_no_usage_and_no_finish_reason(finish: str | None) -> None:
    for usage in NO_USAGE:
        found = await ask(completion({"content": "Hi"}, usage, finish))
        assert (found.usage.prompt_tokens, found.usage.calls, found.finish_reason) == (0, 1, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_in_a_200_is_what_its_code_says(stream: bool) -> None:
    good = events(chunk({"content": "Hi"}, "stop")) if stream else completion({"content": "Hi"})
    for body in (*AGAIN, *REFUSED):
        failed = events(body) if stream else respond(body)
        if body in AGAIN:
            assert (await ask(failed, good, stream=stream)).metadata["attempts"] == 2, body
        with pytest.raises(InfrastructureError if body in AGAIN else ModelError, match="Provider returned error"):
            await ask(failed, stream=stream)


async def test_an_error_behind_a_text_is_not_asked_again() -> None:
    late = events(chunk({"content": "Hi"}), {"error": {"code": 429, "message": "slow down"}, "choices": []})
    with pytest.raises(InfrastructureError, match=r"429 - .*slow down"):
        await ask(late, events(chunk({"content": "Hi"}, "stop")), stream=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_drips_is_given_up(stream: bool) -> None:
    kind = ("text/event-stream", b": still here\n\n") if stream else ("application/json", b" ")
    async with dripping_server(*kind) as url, asyncio.timeout(5):
        engine = OpenAIEngine("m", f"{url}/v1", timeout=0.3, retries=0)
        with pytest.raises(InfrastructureError, match="did not answer within"):
            await sampled(engine, stream)
        await engine.aclose()


@pytest.mark.parametrize("kind", ["", "text/html"])
async def test_a_list_of_models_and_publishing_give_up_a_server_that_drips(kind: str) -> None:
    async with dripping_server(kind) as url, asyncio.timeout(5):
        with pytest.raises(InfrastructureError, match="did not answer within"):
            await asyncio.to_thread(listed_models, url, None, 0.3)
        connection = Connection(url, timeout=0.3)
        with pytest.raises(PublishError, match="nothing answers"):
            await connection.send("v1/models", None, "no list")
        await connection.aclose()
