"""Anthropic's Messages API and OpenAI's Responses API through the gateway, with each vendor's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web
from gateway_world import Body, Model, World, contents, streamed, world
from protocol_wire import call_item, message, message_events, reasoning_item, response, response_events, text_item

from openhands_rl_plugin.core.types import Trajectory

SCHEMA = {"type": "object", "properties": {}}
FUNCTION = {"name": "bash", "description": "runs a command"}
OF_MESSAGES: Any = {**FUNCTION, "input_schema": SCHEMA}
OF_RESPONSES: Any = {"type": "function", **FUNCTION, "parameters": SCHEMA, "strict": False}
THOUGHT = {"type": "thinking", "thinking": "I look first.", "signature": "signed"}


async def thinks(request: web.Request, body: Body) -> web.StreamResponse:
    """Thinks, says something and calls a tool, as long as it is offered one; in the protocol that it is asked in."""
    offered = bool(body.get("tools"))
    number = request.app["asked"] = request.app.get("asked", 0) + 1
    text, arguments = f"answer {number}", {"command": f"echo {number}"}
    if request.path.endswith("/messages"):
        call = {"type": "tool_use", "id": f"call_{number}", "name": "bash", "input": arguments}
        blocks = [*([THOUGHT] * offered), {"type": "text", "text": text}, *([call] * offered)]
        answer = message(*blocks, model=body["model"], stop="tool_use" if offered else "end_turn", number=number)
        events = message_events(answer)
    else:
        items = [reasoning_item("I look first."), text_item(text)]
        items += [call_item("bash", arguments, f"call_{number}")] * offered
        answer = response(*items, model=body["model"], number=number, instructions=body.get("instructions"))
        events = response_events(answer)
    return await streamed(request, [*events]) if body.get("stream") else web.json_response(answer)


@asynccontextmanager
async def clients(
    path: Path, **options: Any
) -> AsyncIterator[tuple[World, anthropic.AsyncAnthropic, openai.AsyncOpenAI]]:
    async with (
        world(path, Model(behave=thinks), **options) as gateway,
        anthropic.AsyncAnthropic(base_url=gateway.url, api_key="k", max_retries=0) as messages,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/session/r/v1", api_key="k", max_retries=0) as responses,
    ):
        yield gateway, messages, responses


EXPECTED = [
    ("system", "be brief"),
    ("user", "one"),
    *(each for at in (1, 2) for each in (("assistant", f"answer {at}"), ("tool", f"result {at}"))),
    ("assistant", "answer 3"),
]


def check(trajectory: Trajectory, protocol: str, *, stream: bool) -> None:
    """Three turns with a tool are one path, in the form of chat completions, without token ids."""
    assert contents(trajectory) == EXPECTED and len(trajectory.nodes) == len(EXPECTED)
    first, *_ = sampled = list(trajectory.sampled())
    arguments = [json.loads(node.message.tool_calls[0].arguments) for node in sampled]
    assert arguments == [{"command": f"echo {at}"} for at in (1, 2, 3)]
    assert first.message.tool_calls[0].id == "call_1" and first.finish_reason == "tool_calls"
    assert first.metadata["message"] == {"reasoning_content": "I look first."}
    assert first.metadata["protocol"] == protocol and ("streamed" in first.metadata) == stream
    assert first.metadata["missing"] == {"token_ids": f"POST /v1/{protocol} reports none"}
    assert first.sampling and (first.sampling.max_tokens, first.sampling.temperature) == (64, 1.0)
    strict = {"strict": False} if protocol == "responses" else {}
    assert trajectory.tools == ({"type": "function", "function": {**FUNCTION, "parameters": SCHEMA, **strict}},)
    usage = trajectory.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.calls) == (90, 60, 33, 3)
    assert not any("replayed_as" in node.metadata or "history_rewritten" in node.metadata for node in trajectory.nodes)


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_with_tools_and_thinking(tmp_path: Path, stream: bool):
    async with clients(tmp_path) as (gateway, client, _):
        history: list[Any] = [{"role": "user", "content": "one"}]
        options: Any = {"model": "policy", "max_tokens": 64, "system": "be brief", "temperature": 1.0}
        asked: Any = {**options, "tools": [OF_MESSAGES]}
        for turn in (1, 2, 3):
            if stream:
                async with client.messages.stream(messages=history, **asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(messages=history, **asked)
            assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
            assert answer.stop_reason == "tool_use" and answer.usage.output_tokens == 11
            result = {"type": "tool_result", "tool_use_id": f"call_{turn}", "content": f"result {turn}"}
            history += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        health = (await gateway.http.get("/health")).json()
    check(await gateway.only(), "messages", stream=stream)
    assert health["recorded"] == 3 and health["missing"] == {"token_ids: POST /v1/messages reports none": 3}
    # The server got what the client sent: nothing was added for the gateway.
    assert {*gateway.model.bodies[0]} - {"stream"} == {*asked, "messages"}


async def respond(client: openai.AsyncOpenAI, stream: bool, **asked: Any) -> Any:
    if not stream:
        return await client.responses.create(model="policy", **asked)
    async with client.responses.stream(model="policy", **asked) as events:
        text = "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
        answer = await events.get_final_response()
    assert answer.output_text in ("", text)
    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_tools_and_reasoning(tmp_path: Path, stream: bool):
    options = {"instructions": "be brief", "tools": [OF_RESPONSES], "max_output_tokens": 64, "temperature": 1.0}
    async with clients(tmp_path) as (gateway, _, client):
        items: list[Any] = [{"role": "user", "content": "one"}]
        for turn in (1, 2, 3):
            answer = await respond(client, stream, input=items, reasoning={"effort": "low"}, **options)
            result = {"type": "function_call_output", "call_id": f"call_{turn}", "output": f"result {turn}"}
            items = [*items, *(item.model_dump(exclude_none=True) for item in answer.output), result]
    trajectory = await gateway.only()
    check(trajectory, "responses", stream=stream)
    assert next(trajectory.sampled()).metadata["request"]["reasoning_effort"] == "low"
    assert all("return_token_ids" not in body for body in gateway.model.bodies)


async def test_what_claude_code_sends_is_one_session(tmp_path: Path):
    """Its attribution block differs in every request, and its cache marks move."""
    session = "0f8c1d2e-1111-4222-8333-444455556666"
    async with clients(tmp_path) as (gateway, client, _):
        history: list[Any] = []
        mark = {"cache_control": {"type": "ephemeral"}}
        for turn in range(4):
            for earlier in history[::2]:
                earlier["content"] = [{"type": "text", "text": earlier["content"][0]["text"]}]
            history.append({"role": "user", "content": [{"type": "text", "text": f"turn {turn}", **mark}]})
            system = [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={turn};"},
                {"type": "text", "text": "You are Claude Code.", **mark},
            ]
            asked: Any = {"model": "policy", "max_tokens": 9, "messages": history, "system": system}
            answer = await client.messages.create(**asked, extra_headers={"x-claude-code-session-id": session})
            history.append({"role": "assistant", "content": answer.content})
    trajectory = await gateway.only()
    assert trajectory.task.id == session
    assert contents(trajectory)[0] == ("system", "You are Claude Code.") and len(trajectory.nodes) == 9
    assert len(list(trajectory.sampled())) == 4


async def test_errors_and_keys_in_anthropics_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENHANDS_RL_API_KEY", "gate")
    asked: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "one"}]}
    async with clients(tmp_path) as (gateway, client, _):
        with pytest.raises(anthropic.AuthenticationError, match="API key is missing or wrong"):
            await client.messages.create(**asked)
        for keyed in (client.copy(api_key="gate"), client.copy(auth_token="gate")):
            await keyed.messages.create(**asked)
    assert sum(node.sampled for node in (await gateway.only()).nodes) == 2
