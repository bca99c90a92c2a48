"""The OpenAI engine against servers on real sockets, well-behaved and not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from raw_server import RawServer, dripping_server, raw_server, respond
from wire_shapes import AGAIN, REFUSED

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError, ModelError
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS
from openhands_rl_plugin.core.types import Message, PolicyRef, SamplingParams, ToolCall
from openhands_rl_plugin.models.engines.client import EXTENSIONS, HttpUpstream, OpenAIEngine, ServerError, listed_models

pytestmark = pytest.mark.contract

ASK = (Message(role="user", content="hi"),)
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openhands_rl_plugin.models.engines.client._PAUSES", Backoff(0.01, 0.1))


def choice(text: str | None = "hello", **changes: Any) -> dict[str, Any]:
    logprobs = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}
    known = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {**known, "logprobs": logprobs, "token_ids": [8, 9], **changes}


def answer(*choices: dict[str, Any], **changes: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    body = {"id": "r1", "model": "policy-v000003", "choices": list(choices) or [choice()], "usage": usage}
    return {**body, "prompt_token_ids": [1, 2, 3], **changes}


def engine(url: str, model: str = "policy-v000003", **options: Any) -> OpenAIEngine:
    return OpenAIEngine(model, f"{url}/v1", base_model="base", **{"timeout": 5.0, **options})


@asynccontextmanager
async def asked(reply: Any, **options: Any) -> AsyncIterator[tuple[RawServer, OpenAIEngine]]:
    """A server with a handler, or one answer, and an engine that asks it."""
    async with raw_server(reply if callable(reply) else lambda path, body: respond(reply)) as server:
        player = engine(server.url, **options)
        try:
            yield server, player
        finally:
            await player.aclose()


async def ask(body: Any, **options: Any) -> Any:
    """What an engine makes of one answer."""
    async with asked(body, **options) as (_, player):
        return (await player.complete(ASK))[0]


async def test_request_and_answer():
    history = (
        Message(role="system", content="s"),
        Message(role="assistant", tool_calls=(ToolCall(id="c1", name="bash", arguments='{"a":  1}'),)),
        Message(role="tool", content="out", tool_call_id="c1", name="bash"),
    )
    own: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "stop": ["X"], "seed": 4}
    sampling = SamplingParams(**own)
    async with asked(answer()) as (server, player):
        completion = (await player.complete(history, tools=[TOOL], sampling=sampling))[0]
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"a":  1}'}}
    assert server.paths() == ["/v1/chat/completions"]
    assert server.requests[0][1] == {
        "model": "policy-v000003",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "out", "tool_call_id": "c1", "name": "bash"},
        ],
        "tools": [TOOL],
        **own,
        "logprobs": True,
        "return_token_ids": True,
        **NEUTRAL_PARAMETERS,
    }
    assert completion.message == Message(role="assistant", content="hello")
    assert completion.tokens is not None and not completion.tokens.extends
    assert completion.tokens.prompt_ids == (1, 2, 3)
    assert completion.tokens.sampled_ids == (8, 9)
    assert completion.tokens.logprobs == (-0.5, -1.5)
    assert completion.policy == PolicyRef(base_model="base", adapter="policy", version=3)
    assert (completion.usage.prompt_tokens, completion.usage.cached_tokens, completion.usage.calls) == (3, 1, 1)
    assert completion.sampling == sampling.model_copy(update=NEUTRAL_PARAMETERS)
    assert completion.finish_reason == "stop"


async def test_a_served_pointer_is_recorded_as_the_version_behind_it():
    assert (await ask(answer(), model="policy")).policy == PolicyRef(base_model="base", adapter="policy", version=3)
    assert (await ask(answer(model="gpt-4o-2024-08-06"), model="gpt-4o")).policy == PolicyRef(base_model="base")
    assert (await ask(answer(model=None))).policy == PolicyRef(base_model="base", adapter="policy", version=3)


async def test_n_requests_have_seeds_of_their_own():
    answered: list[int] = []

    async def handler(path: str, body: Any) -> bytes:
        await asyncio.sleep(0.1 if body["seed"] == 14 else 0)
        answered.append(body["seed"])
        return respond("no", "400 Bad") if body["seed"] == 13 else respond(answer(choice(str(body["seed"]))))

    async with asked(handler) as (_, player):
        completions = await player.complete(ASK, n=3, sampling=SamplingParams(seed=10))
        with pytest.raises(ModelError):
            await player.complete(ASK, n=2, sampling=SamplingParams(seed=13))
        assert answered[3:] == [13, 14]  # a failed one leaves none on its way
    assert [completion.message.content for completion in completions] == ["10", "11", "12"]
    assert sum(completion.usage.calls for completion in completions) == 3


async def test_overload_is_waited_out():
    left = ["429 Many", "503 Busy"]

    def handler(path: str, body: Any) -> bytes:
        return respond("later", status=left.pop(), extra="retry-after: 0\r\n") if left else respond(answer())

    completion = await ask(handler)
    assert (completion.message.content, completion.metadata["attempts"]) == ("hello", 3)


@pytest.mark.parametrize(("mode", "words"), [("drops", "broke"), ("slow", "within 0.5 s"), ("500", "boom")])
async def test_what_does_not_get_better_is_an_infrastructure_error(mode: str, words: str):
    async def handler(path: str, body: Any) -> bytes | None:
        await asyncio.sleep(10 if mode == "slow" else 0)
        return None if mode == "drops" else respond({"error": {"message": "boom"}}, status=f"{mode} Status")

    async with asked(handler, retries=2, timeout=0.5 if mode == "slow" else 5) as (server, player):
        with pytest.raises(InfrastructureError, match=f"{words}.*after 3 attempts"):
            await player.complete(ASK)
    assert len(server.requests) == 3


@pytest.mark.parametrize("body", ["<html>", '{"choices": []}', '{"choices": [{"message": 5}]}', "[" * 100_000, b"\xff"])
async def test_nonsense_is_one_line_of_an_error(body: Any):
    """A page of a proxy, for example, which goes away; a wrong address stays."""
    with pytest.raises(InfrastructureError, match=r"without a choice|check base_url.*after 2 attempts"):
        await ask(body, retries=1)


async def test_the_key_is_sent_and_never_shown(caplog: pytest.LogCaptureFixture):
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(respond({"error": {"message": f"Incorrect API key: {KEY}"}}, status="401 Unauthorized"))
        await writer.drain()
        writer.close()

    caplog.set_level("DEBUG")
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    player = engine(url, api_key=KEY)
    with pytest.raises(ModelError, match=r"Incorrect API key: \*\*\*") as refused:
        await player.complete(ASK)
    assert KEY not in repr(player) + repr(refused.value) + caplog.text
    await player.aclose()
    with pytest.raises(ServerError):  # as with OpenAI's client, a header of the user comes first
        await HttpUpstream(url, KEY, 5.0, headers={"Authorization": "Bearer mine"}).send({})
    server.close()
    assert [f"authorization: bearer {KEY}".encode() in head.lower() for head in seen] == [True, False]


@pytest.mark.parametrize(("body", "sent"), [*((each, 2) for each in AGAIN), *((each, 1) for each in REFUSED)])
async def test_an_error_in_a_200_is_of_the_kind_of_its_code(body: Any, sent: int) -> None:
    async with asked(body, retries=1) as (server, player):
        with pytest.raises(InfrastructureError if sent == 2 else ModelError, match="Provider returned error"):
            await player.complete(ASK)
    assert len(server.requests) == sent


async def test_a_server_that_drips_is_given_up() -> None:
    async with dripping_server("application/json", b" ") as url, asyncio.timeout(5):
        player = engine(url, timeout=0.3, retries=0)
        with pytest.raises(InfrastructureError, match="did not answer within"):
            await player.complete(ASK)
        await player.aclose()


@pytest.mark.parametrize(
    ("status", "body", "name"),
    [
        ("400 Bad Request", {"error": {"message": "You are not allowed to request logprobs"}}, "logprobs"),
        ("422 Unprocessable", {"detail": [{"loc": ["body", "return_token_ids"], "input": True}]}, "return_token_ids"),
    ],
)
async def test_a_request_whose_extensions_are_refused_is_sent_again_without(status: str, body: Any, name: str) -> None:
    """Whatever one request is refused for, the next is sent with all of them."""

    def handler(path: str, sent: Any) -> bytes:
        odd = sent["messages"][0]["content"] == "odd"
        return respond(body, status=status) if odd and name in sent else respond(answer())

    async with asked(handler) as (server, player):
        odd = [Message(role="user", content="odd")]
        (made,) = await player.complete(odd, sampling=SamplingParams(temperature=0.5))
        (other,) = await player.complete(ASK)
    assert [bool(EXTENSIONS.keys() & sent.keys()) for _, sent in server.requests] == [True, False, True]
    assert made.sampling == SamplingParams(temperature=0.5) and other.sampling.min_p == 0.0
    assert "missing" not in other.metadata


async def test_what_is_missing_is_named_with_its_cause() -> None:
    plain = answer(choice(token_ids=None), prompt_token_ids=None)
    refused = {"error": {"message": "Unrecognized request argument supplied: top_k"}}
    assert (await ask(plain)).metadata["missing"] == {"token_ids": "the model server ignores return_token_ids"}
    why = "the model server refuses top_k with status 400"
    made = await ask(lambda path, sent: respond(refused, "400 Bad") if "top_k" in sent else respond(plain))
    assert made.metadata["missing"] == {"token_ids": why}


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/v1", "ftp://127.0.0.1/v1", "http://[::1/v1"])
def test_a_wrong_url_is_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL"):
        listed_models(url, None)
