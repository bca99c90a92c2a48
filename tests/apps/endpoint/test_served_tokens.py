"""A served conversation is sampled token by token as the training rollout of the same conversation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from caller_model import ANSWER, NOTES, QUESTION, WIRE, add, tools

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
from openhands_rl_plugin.environments.tools.environment import ToolBase, ToolEnvironment, ToolOptions
from openhands_rl_plugin.models.engines.openai import OpenAIEngine
from openhands_rl_plugin.models.engines.seeded import SeededEngine
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.rollout.session import SessionRunner
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

LIMITS = Limits(max_turns=4, max_response_length=60)
SAMPLING = SamplingParams(temperature=0.7, max_tokens=60)
# Some of them answer, others write calls that cannot be read.
SEEDS = (0, 2, 3)
ASKED = (Message(role="system", content="Be kind."), Message(role="user", content=QUESTION))


def tokens_of(trajectory: Trajectory) -> list[Tokens]:
    """What was asked and what was sampled in each turn: token ids, and logprobs to the last bit."""
    assert trajectory.failure is None
    found = [node.tokens for node in trajectory.sampled() if node.tokens is not None]
    assert found and len(found) == len([*trajectory.sampled()])
    assert all(len(one.logprobs) == len(one.sampled_ids) > 0 for one in found)
    return found


async def rolled_out(url: str, seed: int, options: ToolOptions) -> Trajectory:
    """The episode as training plays it."""
    engine = OpenAIEngine("caller", url)
    runner = SessionRunner(
        make_environment=lambda request: ToolEnvironment(options, tools=tools()),
        make_strategy=lambda request: StandardReActStrategy(),
        make_engine=lambda request: SeededEngine(engine, request.sampling, request.seed),
        strategy_spec=StrategySpec(name="StandardReAct"),
        base_model="caller",
        limits=LIMITS,
    )
    task = Task(id="add", environment="tools", data={"messages": WIRE, "label": "42"})
    trajectory = await runner.run(EpisodeRequest(task=task, run_id="train", group_id="g", seed=seed, sampling=SAMPLING))
    await engine.aclose()
    return trajectory


def runtime(url: str, options: ToolOptions, own: Sequence[ToolBase] | None, **more: Any) -> AgentRuntime:
    engine, policy = OpenAIEngine("caller", url), PolicyRef(base_model="caller")
    return AgentRuntime(engine, own, policy=policy, options=options, limits=LIMITS, sampling=SAMPLING, **more)


@pytest.mark.parametrize(("seed", "template"), [(0, ""), (2, ""), (0, "qwen3")])
async def test_run_and_stream_sample_what_a_rollout_samples(model_url: str, seed: int, template: str) -> None:
    options = ToolOptions(template=template)
    expected = tokens_of(await rolled_out(model_url, seed, options))
    wanted = SamplingParams(seed=seed)
    async with aclosing(runtime(model_url, options, tools())) as agent:
        assert tokens_of((await agent.run(ASKED, sampling=wanted)).trajectory) == expected
        last = [event async for event in agent.stream(ASKED, sampling=wanted)][-1]
        assert isinstance(last, AgentResult)
        assert tokens_of(last.trajectory) == expected


@pytest.mark.parametrize("seed", SEEDS[:1])
async def test_a_spoken_answer_is_streamed_from_the_same_tokens(model_url: str, seed: int) -> None:
    """Without a final tool the text itself is streamed, through the server's event stream."""
    options = ToolOptions(tools=("think", "caller_model:add"))
    wanted = SamplingParams(seed=seed, temperature=1.5)
    async with aclosing(runtime(model_url, options, None)) as agent:
        whole = await agent.run(ASKED, sampling=wanted)
        last = [event async for event in agent.stream(ASKED, sampling=wanted)][-1]
    assert isinstance(last, AgentResult)
    assert tokens_of(last.trajectory) == tokens_of(whole.trajectory)
    assert last.answer == whole.answer
    assert [m.content for m in last.messages] == [m.content for m in whole.messages]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_the_endpoint_samples_what_a_rollout_samples(model_url: str, tmp_path: Path, streamed: bool) -> None:
    storage, answered = FileTrajectoryStorage(tmp_path), {}
    policy = PolicyConfig(base_url=model_url, model="caller")
    agent = runtime(model_url, ToolOptions(), tools(), storage=storage)
    with running_agent(ServerConfig(model="caller", port=0), policy, agent) as url:
        async with httpx.AsyncClient(timeout=60) as client:
            for seed in SEEDS:
                body = {"messages": WIRE, "seed": seed, "stream": streamed}
                answer = await client.post(f"{url}/v1/chat/completions", json=body)
                answered[seed] = answer.text
    recorded = {found.task.id: found async for found, _ in storage.find()}
    await storage.close()
    for seed in SEEDS:
        found = [one for name, one in recorded.items() if f"chatcmpl-{name}" in answered[seed]]
        expected = await rolled_out(model_url, seed, ToolOptions())
        assert [tokens_of(one) for one in found] == [tokens_of(expected)]
        assert found[0].stop == expected.stop and found[0].evidence["answer"] == expected.evidence["answer"]
        assert found[0].tools == expected.tools and len(expected.tools) == 3
        assert NOTES not in answered[seed]
        assert (ANSWER in answered[seed]) == (expected.evidence["answer"] == ANSWER)
    assert any(ANSWER in answer for answer in answered.values())


async def test_a_second_question_goes_on_with_the_whole_conversation(model_url: str) -> None:
    """What a chat appends is what a rollout over the same messages is given."""
    greedy = SamplingParams(temperature=0.0)
    async with aclosing(runtime(model_url, ToolOptions(), tools())) as agent:
        first = await agent.run(ASKED, sampling=greedy)
        assert first.answer == ANSWER and add(17, 25) in [message.content for message in first.messages]
        again = (*ASKED, *first.messages, Message(role="user", content=QUESTION))
        second = await agent.run(again, sampling=greedy)
    opening = [message for message in second.trajectory.messages() if message.role != "assistant"]
    assert [message.role for message in second.trajectory.messages()].count("system") == 1
    assert opening[0].content == first.trajectory.messages()[0].content
    assert second.trajectory.messages()[1 : 1 + len(again) - 1] == again[1:]
