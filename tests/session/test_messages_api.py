"""Anthropic's Messages API through the gateway, with Anthropic's own client and with litellm's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from aiohttp import web
from gateway_world import Body, Model, World, contents, streamed, world
from protocol_wire import message, message_events

TOOL = {"name": "bash", "description": "runs a command", "input_schema": {"type": "object", "properties": {}}}
THOUGHT = {"type": "thinking", "thinking": "I look first.", "signature": "signed"}


def call_block(number: int, **arguments: Any) -> Body:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "bash", "input": arguments}


class Claude:
    """Thinks, says something and calls a tool, as long as it is offered one; ``bodies`` are what it was asked."""

    def __init__(self) -> None:
        self.model = Model(behave=self)
        self.answers: list[Body] = []

    async def __call__(self, request: web.Request, body: Body) -> web.StreamResponse:
        number = len(self.answers) + 1
        said = {"type": "text", "text": f"answer {number}"}
        blocks = [THOUGHT, said, call_block(number, command=f"echo {number}")] if body.get("tools") else [said]
        stop = "tool_use" if body.get("tools") else "end_turn"
        answer = message(*blocks, model=body["model"], stop=stop, number=number)
        self.answers.append(answer)
        if body.get("stream"):
            return await streamed(request, [*message_events(answer)])
        return web.json_response(answer)


@asynccontextmanager
async def claude(path: Path, **options: Any) -> AsyncIterator[tuple[World, Claude, anthropic.AsyncAnthropic]]:
    model = Claude()
    async with (
        world(path, model.model, **options) as gateway,
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="k", max_retries=0) as client,
    ):
        yield gateway, model, client


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_and_thinking(tmp_path: Path, stream: bool):
    async with claude(tmp_path) as (gateway, model, client):
        history: list[Any] = [{"role": "user", "content": "one"}]
        asked: Any = {"model": "policy", "max_tokens": 64, "system": "be brief", "tools": [TOOL], "temperature": 1.0}
        for turn in range(3):
            if stream:
                async with client.messages.stream(messages=history, **asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(messages=history, **asked)
            assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
            assert answer.stop_reason == "tool_use" and answer.usage.output_tokens == 11
            result = {"type": "tool_result", "tool_use_id": f"toolu_{turn + 1}", "content": f"result {turn + 1}"}
            history = [
                *history,
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": [result]},
            ]
        health = (await gateway.http.get("/health")).json()
    trajectory = await gateway.only()
    turns = [(("assistant", f"answer {at}"), ("tool", f"result {at}")) for at in (1, 2, 3)]
    expected = [("system", "be brief"), ("user", "one"), *(each for turn in turns for each in turn)][:-1]
    assert contents(trajectory) == expected and len(trajectory.nodes) == len(expected)
    first, *_ = sampled = list(trajectory.sampled())
    assert [json.loads(node.message.tool_calls[0].arguments) for node in sampled] == [
        {"command": f"echo {at}"} for at in (1, 2, 3)
    ]
    assert first.message.tool_calls[0].id == "toolu_1" and first.finish_reason == "tool_calls"
    assert first.metadata["message"] == {"reasoning_content": "I look first."}
    assert first.metadata["protocol"] == "messages" and ("streamed" in first.metadata) == stream
    assert first.metadata["missing"] == {"token_ids": "POST /v1/messages reports none"}
    assert first.sampling and first.sampling.max_tokens == 64 and first.sampling.temperature == 1.0
    assert trajectory.tools == (
        {
            "type": "function",
            "function": {"name": "bash", "description": "runs a command", "parameters": TOOL["input_schema"]},
        },
    )
    usage = trajectory.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.calls) == (90, 60, 33, 3)
    assert not any("replayed_as" in node.metadata or "history_rewritten" in node.metadata for node in trajectory.nodes)
    assert health["recorded"] == 3 and health["missing"] == {"token_ids: POST /v1/messages reports none": 3}
    # The server got what the client sent: nothing was added for the gateway.
    assert {*model.model.bodies[0]} == {"model", "max_tokens", "messages", "system", "tools", "temperature"} | (
        {"stream"} if stream else set()
    )


async def test_what_claude_code_sends_is_one_session(tmp_path: Path):
    """Its attribution block differs in every request, its cache marks move, and it sends its session in two places."""
    session = "0f8c1d2e-1111-4222-8333-444455556666"
    users = (f"user_{'ab' * 32}_account_1_session_{session}", json.dumps({"device_id": "d", "session_id": session}))
    async with claude(tmp_path) as (gateway, _, client):
        history: list[Any] = []
        mark = {"cache_control": {"type": "ephemeral"}}
        for turn in range(4):
            for said in history[::2]:
                said["content"] = [{"type": "text", "text": said["content"][0]["text"]}]
            history.append({"role": "user", "content": [{"type": "text", "text": f"turn {turn}", **mark}]})
            system = [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn};"},
                {"type": "text", "text": "You are Claude Code.", **mark},
            ]
            named: Any = {"extra_headers": {"x-claude-code-session-id": session}}
            if turn < 2:
                named = {"metadata": {"user_id": users[turn]}}
            asked: Any = {"model": "policy", "max_tokens": 9, "messages": history, "system": system}
            answer = await client.messages.create(**asked, **named)
            history.append({"role": "assistant", "content": answer.content})
    trajectory = await gateway.only()
    assert trajectory.task.id == session
    assert contents(trajectory)[0] == ("system", "You are Claude Code.") and len(trajectory.nodes) == 9
    assert len(list(trajectory.sampled())) == 4


async def test_errors_and_keys_in_anthropics_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENHANDS_RL_API_KEY", "gate")
    monkeypatch.setenv("MODEL_KEY", "model")
    asked: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "one"}]}
    async with claude(tmp_path, upstream_key_env="MODEL_KEY") as (gateway, model, _):
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError, match="API key is missing or wrong"):
                await client.messages.create(**asked)
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="gate", max_retries=0) as client:
            await client.messages.create(**asked)
            await client.messages.count_tokens(model="policy", messages=asked["messages"])
        async with anthropic.AsyncAnthropic(base_url=gateway.url, auth_token="gate", max_retries=0) as client:
            await client.messages.create(**asked)
    # The gateway's key goes no further.
    for headers in model.model.headers:
        assert (headers["x-api-key"], headers["authorization"]) == ("model", "Bearer model")
    assert sum(node.sampled for node in (await gateway.only()).nodes) == 2
