"""A served conversation asks the model, and records its tokens, as the training rollout of the same conversation."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from raw_server import RawServer, raw_server, respond

from openhands_rl_plugin.apps.chat_endpoint import AgentResult, AgentRuntime, PolicyConfig, running_agent
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Limits,
    Message,
    PolicyRef,
    SamplingParams,
    StrategySpec,
    Task,
    Tokens,
    Trajectory,
)
from openhands_rl_plugin.environments.tools.environment import FinalTool, FunctionTool, ThinkTool, ToolEnvironment
from openhands_rl_plugin.models.engines.openai import OpenAIEngine, SeededEngine
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.rollout.session import SessionRunner
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

LIMITS = Limits(max_turns=4, max_response_length=60)
SAMPLING = SamplingParams(temperature=0.7, max_tokens=60)
WIRE = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is 17 + 25?"}]
ASKED = tuple(Message.model_validate(message) for message in WIRE)
NOTES, ANSWER = "carry the one", "It is 42."


def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


TOOLS = (ThinkTool(), FunctionTool(add), FinalTool())


def reply(path: str, body: Any) -> bytes:
    """Notes and a sum, then the answer; the ids follow from the seed and the turn."""
    done, seed = body["messages"][-1]["role"] == "tool", body.get("seed", 0)
    said = (
        [("final", f'{{"answer": "{ANSWER}"}}')]
        if done
        else [("think", f'{{"notes": "{NOTES}"}}'), ("add", '{"a": 17, "b": 25}')]
    )
    calls = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": given}}
        for at, (name, given) in enumerate(said)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": None, "tool_calls": calls},
        "finish_reason": "tool_calls",
        "token_ids": [seed % 1000, len(body["messages"])],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -seed % 7 - 1.0}]},
    }
    return respond(
        {"id": "r", "model": "caller", "choices": [choice], "prompt_token_ids": [1, 2, len(str(body["messages"]))]}
    )


def tokens_of(trajectory: Trajectory) -> list[Tokens | None]:
    assert trajectory.failure is None
    return [node.tokens for node in trajectory.sampled()]


def asked_of(server: RawServer) -> list[Any]:
    """The requests since the last call."""
    taken, server.requests[:] = list(server.requests), []
    return [{name: value for name, value in body.items() if not name.startswith("stream")} for _, body in taken]


async def rolled_out(server: RawServer, seed: int) -> tuple[list[Tokens | None], list[Any]]:
    """The episode as training plays it: its tokens, and what the model was asked."""
    engine = OpenAIEngine("caller", f"{server.url}/v1")
    runner = SessionRunner(
        make_environment=lambda request: ToolEnvironment(tools=TOOLS),
        make_strategy=lambda request: StandardReActStrategy(),
        make_engine=lambda request: SeededEngine(engine, request.sampling, request.seed),
        strategy_spec=StrategySpec(name="StandardReAct"),
        base_model="caller",
        limits=LIMITS,
    )
    task = Task(id="add", environment="tools", data={"messages": WIRE, "label": "42"})
    trajectory = await runner.run(EpisodeRequest(task=task, run_id="train", group_id="g", seed=seed, sampling=SAMPLING))
    await engine.aclose()
    return tokens_of(trajectory), asked_of(server)


def runtime(server: RawServer, **more: Any) -> AgentRuntime:
    engine, policy = OpenAIEngine("caller", f"{server.url}/v1"), PolicyRef(base_model="caller")
    return AgentRuntime(engine, TOOLS, policy=policy, limits=LIMITS, sampling=SAMPLING, **more)


async def test_run_and_stream_sample_what_a_rollout_samples() -> None:
    async with raw_server(reply) as server, aclosing(runtime(server)) as agent:
        expected, asked = await rolled_out(server, 3)
        assert len(expected) == len(asked) == 2 and all(expected)
        wanted = SamplingParams(seed=3)
        assert tokens_of((await agent.run(ASKED, sampling=wanted)).trajectory) == expected
        assert asked_of(server) == asked
        last = [event async for event in agent.stream(ASKED, sampling=wanted)][-1]
        assert isinstance(last, AgentResult) and last.answer == ANSWER
        assert tokens_of(last.trajectory) == expected and asked_of(server) == asked


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_the_endpoint_samples_and_records_what_a_rollout_samples(tmp_path: Path, streamed: bool) -> None:
    async with raw_server(reply) as server:
        expected, asked = await rolled_out(server, 5)
        agent = runtime(server, storage=FileTrajectoryStorage(tmp_path))
        policy = PolicyConfig(base_url=f"{server.url}/v1", model="caller")
        body = {"messages": WIRE, "seed": 5, "stream": streamed}

        def post() -> str:
            with running_agent(ServerConfig(model="caller", port=0), policy, agent) as url:
                return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).text

        answer = await asyncio.to_thread(post)
        assert asked_of(server) == asked and ANSWER in answer and NOTES not in answer
    storage = FileTrajectoryStorage(tmp_path)
    (recorded,) = [found async for found, _ in storage.find()]
    await storage.close()
    assert f"chatcmpl-{recorded.task.id}" in answer and tokens_of(recorded) == expected
    assert recorded.evidence["answer"] == ANSWER and len(recorded.tools) == 3


async def test_a_second_question_goes_on_with_the_whole_conversation() -> None:
    """What a chat appends is what a rollout over the same messages is given."""
    async with raw_server(reply) as server, aclosing(runtime(server)) as agent:
        first = await agent.run(ASKED)
        assert add(17, 25) in [message.content for message in first.messages]
        again = (*ASKED, *first.messages, Message(role="user", content="Sure?"))
        second = await agent.run(again)
    assert second.trajectory.messages()[0].content == first.trajectory.messages()[0].content
    assert second.trajectory.messages()[1 : len(again)] == again[1:]
