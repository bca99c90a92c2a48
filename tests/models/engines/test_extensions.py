"""A server that refuses what is sent beyond OpenAI's protocol, in the words of real ones."""

from __future__ import annotations

from typing import Any

import pytest
from raw_server import raw_server, respond

from openhands_rl_plugin.core.errors import ModelError
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS
from openhands_rl_plugin.core.types import Message, SamplingParams
from openhands_rl_plugin.models.engines.client import EXTENSIONS
from openhands_rl_plugin.models.engines.openai import OpenAIEngine

ASK = (Message(role="user", content="hi"),)
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("status", "body", "name"),
    [
        ("400 Bad Request", {"error": {"message": "Unrecognized request argument supplied: top_k"}}, "top_k"),
        ("400 Bad Request", {"error": {"message": "You are not allowed to request logprobs"}}, "logprobs"),
        ("422 Unprocessable", {"detail": [{"loc": ["body", "return_token_ids"], "input": True}]}, "return_token_ids"),
    ],
)
async def test_it_is_asked_once_more_without_all_of_them_and_never_again(status: str, body: Any, name: str) -> None:
    def handler(path: str, sent: Any) -> bytes:
        return respond(body, status=status) if name in sent else respond(ANSWER)

    async with raw_server(handler) as server:
        engine = OpenAIEngine("m", f"{server.url}/v1", sampling=SamplingParams(temperature=0.5))
        made = [(await engine.complete(ASK))[0] for _ in range(2)]
        await engine.aclose()
    assert [bool(EXTENSIONS.keys() & sent.keys()) for _, sent in server.requests] == [True, False, False]
    why = f"the model server refuses {name} with status {status[:3]}"
    assert [each.metadata["missing"] for each in made] == [{"token_ids": why}] * 2
    assert made[0].sampling == SamplingParams(temperature=0.5)


async def test_an_error_with_another_cause_ends_no_recording() -> None:
    """vLLM repeats the request, and so the names of all fields, in its errors."""

    def handler(path: str, sent: Any) -> bytes:
        if sent.get("max_tokens") == 1:
            return respond({"error": {"message": f"max_tokens is too small: {sent}"}}, status="400 Bad Request")
        ids = {"token_ids": [1], "logprobs": {"content": [{"logprob": -0.5}]}}
        return respond({"prompt_token_ids": [2], "choices": [ANSWER["choices"][0] | ids]})

    async with raw_server(handler) as server:
        engine = OpenAIEngine("m", f"{server.url}/v1")
        with pytest.raises(ModelError, match=r"400 - .*too small"):
            await engine.complete(ASK, sampling=SamplingParams(max_tokens=1))
        (after,) = await engine.complete(ASK)
        await engine.aclose()
    assert after.tokens is not None and after.tokens.logprobs and "missing" not in after.metadata
    assert after.sampling == SamplingParams.model_validate(NEUTRAL_PARAMETERS)
