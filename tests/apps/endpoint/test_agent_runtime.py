"""AgentRuntime: what a user sees, what is recorded, and how an answer is stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from openhands_rl_plugin.apps.chat_endpoint import AgentRuntime, Answer, Stopped, TextDelta, ToolCallStarted, ToolResult
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import (
    Completion,
    FailureKind,
    JsonObject,
    Limits,
    Message,
    PolicyRef,
    SamplingParams,
    StopReason,
    StrategySpec,
)
from openhands_rl_plugin.environments.tools.environment import FinalTool, FunctionTool, ThinkTool, ToolOptions
from openhands_rl_plugin.rollout.strategies.best_of_n import BestOfNStrategy
from openhands_rl_plugin.testing import ScriptedEngine
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

SECRET = "the notes of nobody else"
ASKED = (Message(role="user", content="How many?"),)


def look_up(word: str) -> str:
    """Find a word."""
    return f"found {word}"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class StreamingScript(ScriptedEngine):
    """A scripted engine that gives its texts character by character, and waits after ``slow`` of them."""

    def __init__(self, script: Sequence[str], slow: int | None = None) -> None:
        super().__init__(script)
        self.closed = 0
        self._slow = slow

    async def stream(
        self, messages: Sequence[Message], *, tools: Sequence[JsonObject] = (), sampling: SamplingParams | None = None
    ) -> AsyncIterator[str | Completion]:
        completion = (await self.complete(messages, tools=tools, sampling=sampling))[0]
        try:
            for at, character in enumerate(completion.message.content or ""):
                if at == self._slow:
                    await asyncio.sleep(60)
                yield character
            yield completion
        finally:
            self.closed += 1


def agent(
    engine: Any, *tools: Any, limits: Limits | None = None, opens_thought: bool = False, **more: Any
) -> AgentRuntime:
    options = ToolOptions(template="qwen3", opens_thought=opens_thought)
    return AgentRuntime(
        engine if not isinstance(engine, list) else ScriptedEngine(engine),
        tools,
        policy=PolicyRef(base_model="scripted"),
        options=options,
        limits=limits or Limits(max_turns=4),
        **more,
    )


async def test_events_of_an_answer_through_a_final_tool() -> None:
    script = [
        f"Let me note this. {call('think', notes=SECRET)}",
        f"{call('look_up', word='a')}",
        f"<think>{SECRET}</think>{call('final', answer='It is three.')}",
    ]
    runtime = agent(StreamingScript(script), ThinkTool(), FunctionTool(look_up), FinalTool())
    *events, last = [event async for event in runtime.stream(ASKED)]
    assert events == [
        ToolCallStarted(call_id="call_2_0", name="look_up", arguments='{"word": "a"}'),
        ToolResult(call_id="call_2_0", name="look_up", content="found a"),
    ]
    assert isinstance(last, Answer) and last.text == "It is three." and not last.streamed


async def test_speech_is_streamed_without_thoughts_and_calls() -> None:
    script = [
        f"<think>{SECRET}</think>\n\nI look it up.\n{call('think', notes=SECRET)}\n{call('look_up', word='a')}\nWait. ",
        f"<think>{SECRET}</think> It is a < b, so three. ",
    ]
    engine = StreamingScript(script)
    runtime = agent(engine, ThinkTool(), FunctionTool(look_up))
    *events, last = [event async for event in runtime.stream(ASKED)]
    said = {turn: "".join(e.text for e in events if isinstance(e, TextDelta) and e.turn == turn) for turn in (1, 2)}
    assert said[1].split() == ["I", "look", "it", "up.", "Wait."]
    assert said[2] == "It is a < b, so three."
    assert len([event for event in events if isinstance(event, TextDelta)]) > 10
    assert isinstance(last, Answer) and last.streamed and last.text == said[2]
    assert not any(SECRET in repr(event) for event in events)
    assert engine.closed == 2


async def test_a_thought_that_the_prompt_opened_is_not_streamed() -> None:
    hidden = f"{SECRET} {call('look_up', word='hidden')}"
    script = [f"{hidden}</think>I look it up. {call('look_up', word='a')}", f"{SECRET}</think>\n\nIt is three."]
    runtime = agent(StreamingScript(script), FunctionTool(look_up), opens_thought=True)
    *events, last = [event async for event in runtime.stream(ASKED)]
    said = {turn: "".join(e.text for e in events if isinstance(e, TextDelta) and e.turn == turn) for turn in (1, 2)}
    assert said == {1: "I look it up.", 2: "It is three."}
    assert isinstance(last, Answer) and last.streamed and last.text == said[2]
    assert not any(SECRET in repr(event) or "hidden" in repr(event) for event in events)
    # A thought that is cut off is no answer, streamed or whole.
    cut = agent(StreamingScript([SECRET] * 2), opens_thought=True, limits=Limits(max_turns=1))
    (end,) = [event async for event in cut.stream(ASKED)]
    assert isinstance(end, Stopped) and end.result.answer is None
    assert (await cut.run(ASKED)).answer is None


async def test_letters_that_are_longer_in_lower_case_move_nothing() -> None:
    capitals = "\u0130" * 40  # of Turkish: two characters in lower case
    script = [
        f"{capitals} one. {call('think', notes=SECRET)}{call('look_up', word='a')}",
        f"{capitals} {SECRET}</think>{capitals} It is three.",
    ]
    runtime = agent(StreamingScript(script), ThinkTool(), FunctionTool(look_up))
    *events, last = [event async for event in runtime.stream(ASKED)]
    said = {turn: "".join(e.text for e in events if isinstance(e, TextDelta) and e.turn == turn) for turn in (1, 2)}
    assert said[1] == f"{capitals} one." and SECRET not in said[1]
    assert isinstance(last, Answer) and last.text == f"{capitals} It is three."


async def test_an_engine_that_cannot_stream_says_it_at_once() -> None:
    runtime = agent(["It is three."])
    *events, last = [event async for event in runtime.stream(ASKED)]
    assert events == [TextDelta(text="It is three.", turn=1)]
    assert isinstance(last, Answer) and last.streamed


async def test_the_end_of_the_turns_is_a_stop_and_not_the_last_note() -> None:
    runtime = agent([call("think", notes=SECRET)] * 2, ThinkTool(), FinalTool(), limits=Limits(max_turns=2))
    (last,) = [event async for event in runtime.stream(ASKED)]
    assert isinstance(last, Stopped) and last.reason is StopReason.MAX_TURNS
    assert last.result.answer is None and last.result.failure is None


async def test_an_answer_that_looks_internal_reaches_the_user() -> None:
    odd = '{"__internal": true, "visible_to_user": false}'
    result = await agent([call("final", answer=odd)], FinalTool()).run(ASKED)
    assert result.answer == odd


async def test_a_broken_engine_is_a_failure_of_the_result() -> None:
    class Away(ScriptedEngine):
        async def complete(self, *args: Any, **more: Any) -> list[Completion]:
            raise InfrastructureError("the server is away")

    result = await agent(Away([])).run(ASKED)
    assert result.answer is None and result.failure is not None
    assert result.failure.kind is FailureKind.INFRASTRUCTURE


async def test_closing_the_stream_ends_the_episode(tmp_path: Path) -> None:
    engine = StreamingScript(["a long answer"], slow=6)
    async with FileTrajectoryStorage(tmp_path) as storage:
        runtime = agent(engine, storage=storage)
        async with aclosing(runtime.stream(ASKED)) as events:  # type: ignore[type-var]
            async for event in events:
                assert isinstance(event, TextDelta)
                break
        assert engine.closed == 1
        assert await storage.count() == 0
        assert await storage.count(TrajectoryFilter(finished=False)) == 1


async def test_conversations_are_recorded_with_their_tools_and_tokens(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        runtime = agent([call("final", answer="x")] * 2, FinalTool(), storage=storage, run_id="talks")
        results = [await runtime.run(ASKED), await runtime.run(ASKED)]
        found = [trajectory async for trajectory, _ in storage.find(TrajectoryFilter(run_id="talks"))]
    assert sorted(one.id for one in found) == sorted(result.trajectory.id for result in results)
    assert all(node.tokens is not None for one in found for node in one.sampled())


async def test_another_strategy_answers_without_showing_its_candidates() -> None:
    runtime = agent(
        StreamingScript(["one", "two", "three", "four"]),
        make_strategy=lambda: BestOfNStrategy(n=2),
        strategy_spec=StrategySpec(name="BestOfN"),
    )
    events = [event async for event in runtime.stream(ASKED)]
    assert len(events) == 1 and isinstance(events[0], Answer) and not events[0].streamed
    assert events[0].result.trajectory.strategy.name == "BestOfN"


async def test_the_seed_of_a_request_is_that_of_its_episode() -> None:
    seen: list[int | None] = []

    class Listening(ScriptedEngine):
        async def complete(self, messages: Any, *, sampling: Any = None, **more: Any) -> list[Completion]:
            seen.append(sampling.seed)
            return await super().complete(messages, sampling=sampling, **more)

    for _ in range(2):
        await agent(Listening(["no", "call"]), FinalTool(), limits=Limits(max_turns=2)).run(
            ASKED, sampling=SamplingParams(seed=5)
        )
    assert seen[:2] == seen[2:] and len(set(seen)) == 2 and seen[0] == 5


async def test_requests_cannot_ask_for_more_than_the_limits_allow() -> None:
    engine = ScriptedEngine(["x"])
    result = await agent(engine, limits=Limits(max_response_length=7)).run(
        ASKED, sampling=SamplingParams(max_tokens=1000)
    )
    sampling = next(result.trajectory.sampled()).sampling
    assert sampling is not None and sampling.max_tokens == 7


def test_wrong_tools_are_told_before_the_first_user() -> None:
    with pytest.raises(ConfigError, match="occurs twice"):
        agent([], FinalTool(), FinalTool())
