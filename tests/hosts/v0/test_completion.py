"""OpenHands' real ``LLM`` over a session: its exceptions, retries and metrics, and vendors that litellm knows."""

from __future__ import annotations

import asyncio

import litellm
import pytest
from litellm.exceptions import ContextWindowExceededError
from openhands.core.config import LLMConfig
from openhands.llm.llm import LLM
from pydantic import SecretStr
from raw_server import raw_server, respond
from scripted_model import EMPTY, prompt_ids, refusal, reply

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.messages import to_message
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.hosts.shared.sessions import standalone_episode
from openhands_rl_plugin.hosts.v0.agent import connect
from openhands_rl_plugin.session.session import Session

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]


def llm_for(url: str, model: str, provider: str = "openai", **config) -> tuple[LLM, Session]:
    settings = {"num_retries": 2, "retry_min_wait": 0, "retry_max_wait": 0, "native_tool_calling": True, **config}
    llm = LLM(LLMConfig(model=f"{provider}/{model}", base_url=url, api_key=SecretStr("k"), **settings), service_id="a")
    session = standalone_episode(RLSettings(), session="s", instruction="Hi", base_model=model, environment_mode=False)
    session.upstream = connect(llm, session.answer)
    return llm, session


DEEP = '{"a":' + 200_000 * "[" + 200_000 * "]" + "}"
ODD = {
    "no role": {"role": None, "reasoning": 5, "annotations": [{"type": "url_citation"}], "audio": {"id": "a"}},
    "a role of others": {"role": "model", "reasoning_content": {"text": None}, "thinking_blocks": "x"},
    "images": {"images": [{"type": "image_url"}], "tool_calls": [{"id": "c1"}, {"type": "custom"}]},
    "deep arguments": {"content": None, "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": DEEP}}]},
}
USAGE = {"prompt_tokens": 2.0, "completion_tokens": None, "completion_tokens_details": {"reasoning_tokens": "none"}}


@pytest.mark.parametrize("name", ODD)
async def test_what_is_recorded_can_be_read(name: str) -> None:
    choice = {"index": None, "message": {"role": "assistant", "content": "Hi", **ODD[name]}, "finish_reason": 5}
    body = {"id": 7, "choices": [choice], "usage": USAGE}
    async with raw_server(lambda path, asked: respond(body)) as model_server:
        llm, session = llm_for(f"{model_server.url}/v1", "odd")
        answer = (await asyncio.to_thread(llm.completion, messages=MESSAGES)).choices[0]
    read, recorded = to_message(answer.message.model_dump()), session.tree.nodes[-1].message
    assert read.content == recorded.content and answer.finish_reason in ("stop", "tool_calls")
    calls = [(each.id, each.name, each.arguments[:1000]) for each in recorded.tool_calls]
    assert [(each.id, each.name, each.arguments) for each in read.tool_calls] == calls


FULL = "This model's maximum context length is 100 tokens. However, your messages resulted in 200 tokens."


@pytest.mark.parametrize(
    ("status", "message", "error", "kind"),
    [
        (400, "no such parameter", litellm.BadRequestError, FailureKind.MODEL),
        (400, FULL, ContextWindowExceededError, FailureKind.MODEL),
        (401, "bad key", litellm.AuthenticationError, FailureKind.MODEL),
        (404, "no such model", litellm.NotFoundError, FailureKind.MODEL),
        (429, "slow down", litellm.RateLimitError, FailureKind.INFRASTRUCTURE),
        (500, "boom", litellm.InternalServerError, FailureKind.INFRASTRUCTURE),
        (503, "down", litellm.ServiceUnavailableError, FailureKind.INFRASTRUCTURE),
    ],
)
def test_an_error_of_the_server_is_litellms(server, status: int, message: str, error: type, kind: FailureKind) -> None:
    server.policies["errors"] = lambda body: refusal(status, message)
    llm, session = llm_for(server.url, "errors", num_retries=1)
    with pytest.raises(error, match=message[:20]):
        llm.completion(messages=MESSAGES)
    assert session.failure is not None and session.failure.kind is kind


def test_a_server_that_is_away_or_too_slow(server) -> None:
    llm, session = llm_for("http://127.0.0.1:1/v1", "away", num_retries=1)
    with pytest.raises(litellm.InternalServerError, match="Connection error"):
        llm.completion(messages=MESSAGES)
    assert session.failure is not None and session.failure.kind is FailureKind.INFRASTRUCTURE
    server.policies["slow"], server.delay = lambda body: reply("Hello."), 3.0
    llm, session = llm_for(server.url, "slow", num_retries=1, timeout=1)
    try:
        with pytest.raises(litellm.Timeout):
            llm.completion(messages=MESSAGES)
    finally:
        server.delay = 0.0


def test_an_empty_answer_is_asked_for_again_and_metrics_count_the_tokens(server) -> None:
    server.script("silent", [EMPTY, reply("At last.")])
    llm, session = llm_for(server.url, "silent")
    assert llm.completion(messages=MESSAGES).choices[0].message.content == "At last."
    assert [each["error"] for each in session.tree.nodes[-1].metadata["attempts"]] == [
        "the server answered without a choice",
        None,
    ]
    assert llm.metrics.accumulated_token_usage.prompt_tokens == len(prompt_ids(MESSAGES))


def test_a_vendor_is_asked_by_litellm_and_not_for_ids(server) -> None:
    server.script("vendor", [reply("Hello.")])
    llm, session = llm_for(server.url, "vendor", provider="mistral")
    llm.completion(messages=MESSAGES)
    (request,) = server.requests["vendor"]
    assert "return_token_ids" not in request and "logprobs" not in request
    assert session.tree.nodes[-1].message.content == "Hello." and session.tree.nodes[-1].tokens is None
    server.script("vendor", [refusal(400, "no such parameter")])
    with pytest.raises(litellm.BadRequestError, match="no such parameter"):
        llm.completion(messages=MESSAGES)
