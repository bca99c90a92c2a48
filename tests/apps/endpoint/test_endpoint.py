"""A policy with its tools: it asks the model as a training rollout does, in OpenAI's format, and bounds its clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from raw_server import RawServer, raw_server, respond

from openhands_rl_plugin.apps.chat_endpoint import AgentRuntime, PolicyConfig, running_agent
from openhands_rl_plugin.core.types import Completion, Limits, PolicyRef, SamplingParams
from openhands_rl_plugin.environments.tools.environment import FinalTool, ThinkTool, ToolBase
from openhands_rl_plugin.models.engines.client import OpenAIEngine
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

LIMITS = Limits(max_turns=4, max_response_length=60)
SAMPLING = SamplingParams(temperature=0.7, max_tokens=60)
WIRE = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 17 + 25?"}]
NOTES, ANSWER = "carry the one", "It is 42."
FAILURES = {"away": "503 Busy", "refuse": "400 Bad Request"}


class Add(ToolBase):
    name, description = "add", "Add two whole numbers."
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}  # noqa: RUF012

    async def call(self, arguments: Any) -> str:
        return str(arguments["a"] + arguments["b"])


TOOLS = (ThinkTool(), Add(), FinalTool())


def reply(path: str, body: Any) -> bytes:
    """Notes and a sum, then the answer; the ids follow from the seed and the turn."""
    question = next(each["content"] for each in reversed(body["messages"]) if each["role"] == "user")
    if question in FAILURES:
        return respond({"error": {"message": f"the model is {question}"}}, FAILURES[question])
    done, seed = body["messages"][-1]["role"] == "tool" and question != "think", body.get("seed", 0)
    calls_made = (
        [("final", f'{{"answer": "{ANSWER}"}}')]
        if done
        else [("think", f'{{"notes": "{NOTES}"}}'), ("add", '{"a": 17, "b": 25}')]
    )
    calls = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": given}}
        for at, (name, given) in enumerate(calls_made)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None, "tool_calls": calls},
        "finish_reason": "tool_calls",
        "token_ids": [seed % 1000, len(body["messages"])],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -(seed % 7) - 1.0}]},
    }
    return respond(
        {"id": "r", "model": "caller", "choices": [choice], "prompt_token_ids": [1, 2, len(str(body["messages"]))]}
    )


def runtime(server: RawServer, **more: Any) -> AgentRuntime:
    engine, policy = OpenAIEngine("caller", f"{server.url}/v1", retries=0), PolicyRef(base_model="caller")
    return AgentRuntime(engine, TOOLS, policy=policy, limits=LIMITS, sampling=SAMPLING, **more)


def running(
    agent: AgentRuntime | None, *, tools: tuple[str, ...] = (), upstream_key: str = "", **options: Any
) -> AbstractContextManager[str]:
    upstream = {"base_url": "http://127.0.0.1:1/v1", "model": "caller", "upstream_key_env": upstream_key}
    policy = PolicyConfig.model_validate({**upstream, "tools": tools})
    return running_agent(ServerConfig.model_validate({"model": "caller", "port": 0, **options}), policy, agent)


async def post(url: str, *, key: str = "", **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=20, headers={"authorization": f"Bearer {key}"} if key else {}) as client:
        return await client.post(f"{url}/v1/chat/completions", json={"messages": WIRE, **body})


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_the_endpoint_records_what_it_samples(tmp_path: Path, streamed: bool) -> None:
    async with raw_server(reply) as server:
        agent = runtime(server, storage=FileTrajectoryStorage(tmp_path))
        with running(agent) as url:
            answer = (await post(url, seed=5, stream=streamed)).text
        asked = [(body["temperature"], body["max_tokens"]) for _, body in server.requests]
    assert asked == [(0.7, 60)] * 2 and ANSWER in answer and NOTES not in answer
    storage = FileTrajectoryStorage(tmp_path)
    (recorded,) = [found async for found, _ in storage.find()]
    await storage.close()
    assert f"chatcmpl-{recorded.task.id}" in answer and recorded.failure is None
    first, second = [node.tokens for node in recorded.sampled()]
    assert first and second and first.sampled_ids == (5, 2) and len(first.logprobs) == 2 and second.sampled_ids[1] == 5
    assert recorded.evidence["answer"] == ANSWER and len(recorded.tools) == 3


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with raw_server(reply) as server:
        with running(runtime(server)) as found:
            yield found


async def test_an_answer_is_openai_s_and_its_stream_shows_tools_but_no_notes(url: str) -> None:
    whole = await post(url, model="caller")
    (choice,) = whole.json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None, "tool_calls": None}
    assert choice["finish_reason"] == "stop" and whole.json()["object"] == "chat.completion"
    streamed = await post(url, stream=True, stream_options={"include_usage": True})
    assert streamed.headers["content-type"].startswith("text/event-stream") and NOTES not in streamed.text + whole.text
    *chunks, usage = events_of(streamed)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and "usage" in usage and usage["choices"] == []
    shown = [delta["tool_event"] for delta in deltas if "tool_event" in delta]
    assert [(one["event"], one["name"]) for one in shown] == [("started", "add"), ("result", "add")]
    assert shown[1]["content"] == "42" and shown[1]["ok"] is True
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"


async def test_without_a_final_tool_a_stream_has_the_text_of_each_turn() -> None:
    def speak(path: str, body: Any) -> bytes:
        done = body["messages"][-1]["role"] == "tool"
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 17, "b": 25}'}}
        message = {"content": ANSWER} if done else {"content": "<think>Hm.</think>I add.", "tool_calls": [call]}
        return respond({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    async with raw_server(speak) as server:
        engine = OpenAIEngine("caller", f"{server.url}/v1")
        with running(AgentRuntime(engine, [Add()], policy=PolicyRef(base_model="caller"))) as url:
            deltas = [chunk["choices"][0]["delta"] for chunk in events_of(await post(url, stream=True))]
    assert [delta.get("content") or delta["tool_event"]["event"] for delta in deltas[1:]] == [
        *("I add.\n\n", "started", "result", ANSWER),
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_an_answer_the_limit_is_named_and_no_note_shown(url: str, stream: bool) -> None:
    answer = await post(url, messages=[{"role": "user", "content": "think"}], stream=stream)
    assert answer.status_code == 200 and NOTES not in answer.text
    choice = (events_of(answer)[-1] if stream else answer.json())["choices"][0]
    assert choice["finish_reason"] == "length" and choice["stop_reason"] == "max_turns"
    assert (choice["delta"] if stream else choice["message"]).get("content") is None


@pytest.mark.parametrize(("question", "status"), [("away", 503), ("refuse", 502)])
async def test_failures_are_errors_and_no_answers(url: str, question: str, status: int) -> None:
    messages = [{"role": "user", "content": question}]
    answer = await post(url, messages=messages)
    assert answer.status_code == status and f"the model is {question}" in answer.json()["error"]["message"]
    assert events_of(await post(url, messages=messages, stream=True))[-1]["error"]["code"] == status


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "role"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"n": 2}, 400, "n: "),
        ({"model": "other"}, 404, "this is 'caller'"),
        ({"temperature": -1}, 400, "temperature"),
    ],
)
async def test_what_cannot_be_done_is_refused(url: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = await post(url, **body)
    assert answer.status_code == status and words in answer.json()["error"]["message"]


class Waiting:
    """Never answers."""

    waiting = cancelled = 0

    async def complete(self, *_: Any, **__: Any) -> list[Completion]:
        self.waiting += 1
        try:
            await asyncio.sleep(60)
        finally:
            self.cancelled += 1
        return []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_the_episode(stream: bool) -> None:
    engine = Waiting()
    with running(AgentRuntime(engine, TOOLS, policy=PolicyRef(base_model="caller"))) as url:
        asking = asyncio.create_task(post(url, stream=stream))
        async with asyncio.timeout(10):
            while not engine.waiting:
                await asyncio.sleep(0.01)
            asking.cancel()
            await asyncio.wait({asking})
            while not engine.cancelled:
                await asyncio.sleep(0.01)
    assert engine.cancelled == 1
