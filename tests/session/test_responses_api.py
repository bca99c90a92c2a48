"""OpenAI's Responses API through the gateway, with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from gateway_world import Body, Model, World, contents, streamed, world
from protocol_wire import call_item, reasoning_item, response, response_events, text_item

from openhands_rl_plugin.core.types import Trajectory

TOOL: Any = {
    "type": "function",
    "name": "bash",
    "description": "runs a command",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


class Codex:
    """Thinks, says something and calls a tool, as long as it is offered one."""

    def __init__(self, *, last_has_output: bool = True) -> None:
        self.model = Model(behave=self)
        self.answers: list[Body] = []
        self._last_has_output = last_has_output

    async def __call__(self, request: web.Request, body: Body) -> web.StreamResponse:
        number = len(self.answers) + 1
        items = [reasoning_item("I look first."), text_item(f"answer {number}")]
        if body.get("tools"):
            items.append(call_item("bash", {"command": f"echo {number}"}, f"call_{number}"))
        answer = response(*items, model=body["model"], number=number, instructions=body.get("instructions"))
        self.answers.append(answer)
        if body.get("stream"):
            return await streamed(request, response_events(answer, last_has_output=self._last_has_output))
        return web.json_response(answer)


@asynccontextmanager
async def codex(path: Path, model: Codex | None = None) -> AsyncIterator[tuple[World, openai.AsyncOpenAI]]:
    async with (
        world(path, (model or Codex()).model) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client,
    ):
        yield gateway, client


async def ask(client: openai.AsyncOpenAI, stream: bool, **asked: Any) -> Any:
    if not stream:
        return await client.responses.create(model="policy", **asked)
    async with client.responses.stream(model="policy", **asked) as events:
        said = "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
        answer = await events.get_final_response()
    assert answer.output_text in ("", said)
    return answer


EXPECTED = [
    ("system", "be brief"),
    ("user", "one"),
    *(each for at in (1, 2) for each in (("assistant", f"answer {at}"), ("tool", f"result {at}"))),
    ("assistant", "answer 3"),
]


def check(trajectory: Trajectory, *, stream: bool) -> None:
    assert contents(trajectory) == EXPECTED and len(trajectory.nodes) == len(EXPECTED)
    sampled = list(trajectory.sampled())
    first = sampled[0]
    assert [node.message.tool_calls[0].arguments for node in sampled] == [
        json.dumps({"command": f"echo {at}"}) for at in (1, 2, 3)
    ]
    assert first.message.tool_calls[0].id == "call_1" and first.finish_reason == "tool_calls"
    assert first.metadata["message"] == {"reasoning_content": "I look first."}
    assert first.metadata["protocol"] == "responses" and ("streamed" in first.metadata) == stream
    assert first.metadata["missing"] == {"token_ids": "POST /v1/responses reports none"}
    assert first.sampling and (first.sampling.max_tokens, first.sampling.temperature) == (64, 1.0)
    assert first.metadata["request"]["reasoning_effort"] == "low"  # pyright: ignore
    function = {name: value for name, value in TOOL.items() if name != "type"}
    assert trajectory.tools == ({"type": "function", "function": function},)
    usage = trajectory.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.calls) == (90, 60, 33, 3)
    assert not any("replayed_as" in node.metadata or "history_rewritten" in node.metadata for node in trajectory.nodes)


ASKED: dict[str, Any] = {
    "instructions": "be brief",
    "tools": [TOOL],
    "max_output_tokens": 64,
    "temperature": 1.0,
    "reasoning": {"effort": "low"},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_and_reasoning(tmp_path: Path, stream: bool):
    async with codex(tmp_path) as (gateway, client):
        items: list[Any] = [{"role": "user", "content": "one"}]
        for turn in (1, 2, 3):
            answer = await ask(client, stream, input=items, store=False, **ASKED)
            result = {"type": "function_call_output", "call_id": f"call_{turn}", "output": f"result {turn}"}
            items = [*items, *(item.model_dump(exclude_none=True) for item in answer.output), result]
    check(await gateway.only(), stream=stream)
    assert all("return_token_ids" not in body for body in gateway.model.bodies)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_that_the_server_holds(tmp_path: Path, stream: bool):
    async with codex(tmp_path) as (gateway, client):
        given: Any = "one"
        before: dict[str, Any] = {}
        for turn in (1, 2, 3):
            answer = await ask(client, stream, input=given, **before, **ASKED)
            before = {"previous_response_id": answer.id}
            given = [{"type": "function_call_output", "call_id": f"call_{turn}", "output": f"result {turn}"}]
    check(await gateway.only(), stream=stream)


async def test_a_continued_response_may_branch_and_change_its_instructions(tmp_path: Path):
    async with codex(tmp_path) as (gateway, client):
        first = await ask(client, False, input="one", instructions="be brief")
        await ask(client, False, input="two", previous_response_id=first.id)
        await ask(client, False, input="three", instructions="be long", previous_response_id=first.id)
    trajectory = await gateway.only()
    texts = [[message.content for message in trajectory.messages(leaf)] for leaf in trajectory.leaves()]
    assert texts == [
        ["be brief", "one", "answer 1"],
        ["one", "answer 1", "two", "answer 2"],
        ["be long", "one", "answer 1", "three", "answer 3"],
    ]


@pytest.mark.parametrize("status", ["queued", "in_progress", "failed", "cancelled"])
async def test_a_response_that_is_not_complete_is_counted_and_marked(tmp_path: Path, status: str):
    async def behave(request: web.Request, body: Body) -> web.Response:
        return web.json_response(response(status=status))

    async with world(tmp_path, Model(behave=behave)) as gateway:
        answer = await gateway.http.post("/v1/responses", json={"model": "policy", "input": "x", "background": True})
        health = (await gateway.http.get("/health")).json()
    assert answer.headers["x-openhands-rl-recorded"] == "no" and answer.json()["status"] == status
    assert health["unrecorded"] == 1 and await gateway.stored() == []
