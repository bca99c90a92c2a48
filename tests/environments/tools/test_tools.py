"""The tool environment: what is executed, what comes back as feedback, and what no user ever sees."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import pytest

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import BadEnvironmentError, CaughtFailure, ConfigError, InfrastructureError
from openhands_rl_plugin.core.types import Message, Observation, Task, ToolCall
from openhands_rl_plugin.environments.tools.environment import (
    FinalTool,
    ThinkTool,
    ToolBase,
    ToolCallStarted,
    ToolEnvironment,
    ToolEvent,
    ToolOptions,
    ToolResult,
)
from openhands_rl_plugin.testing import check_environment

TASK = Task(id="t", environment="tools", instruction="How many?", data={"label": "3"})
SECRET = "the notes of nobody else"


class LookUp(ToolBase):
    name, description = "look_up", "Find a word."
    parameters: ClassVar = {
        "type": "object",
        "properties": {"word": {"type": "string"}, "times": {"type": "integer"}},
        "required": ["word"],
        "additionalProperties": False,
    }

    async def call(self, arguments: Any) -> str:
        return f"found {arguments['word']} {arguments.get('times', 1)} times"


class Calling(ToolBase):
    """A tool without arguments that does what ``function`` does."""

    parameters: ClassVar = {"type": "object"}

    def __init__(self, function: Callable[[], Awaitable[str]]) -> None:
        self.name, self._function = function.__name__, function

    async def call(self, arguments: Any) -> str:
        return await self._function()


def tools(*more: ToolBase) -> tuple[ToolBase, ...]:
    return (ThinkTool(), LookUp(), FinalTool(), *more)


def native(*calls: tuple[str, Any], content: str | None = None) -> Message:
    made = tuple(
        ToolCall(id=f"id{at}", name=name, arguments=given if isinstance(given, str) else json.dumps(given))
        for at, (name, given) in enumerate(calls)
    )
    return Message(role="assistant", content=content, tool_calls=made)


def text(*calls: tuple[str, Any]) -> Message:
    made = [f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in calls]
    return reply("\n".join(made))


def reply(words: str | None) -> Message:
    return Message(role="assistant", content=words)


async def opened(*given: ToolBase, template: str = "", task: Task = TASK, **options: Any) -> ToolEnvironment:
    environment = ToolEnvironment(ToolOptions(template=template, **options), tools=given or tools())
    await environment.reset(task)
    return environment


def codes(observation: Observation) -> list[str]:
    """The feedback codes in the model's observation."""
    found = []
    for message in observation.messages:
        body = (message.content or "").replace("<tool_response>", "").replace("</tool_response>", "")
        for line in body.splitlines():
            if line.startswith('{"ok": false'):
                found.append(json.loads(line)["error"]["code"])
    return found


async def answer_of(environment: ToolEnvironment) -> Any:
    return (await environment.evidence())["answer"]


# What a model may write, in both dialects.


@pytest.mark.parametrize(("template", "write"), [("", native), ("qwen3", text)], ids=["native", "text"])
async def test_calls_are_executed_until_the_answer(template: str, write: Any) -> None:
    environment = await opened(template=template)
    first = await environment.step(write(("look_up", {"word": "a", "times": 2})))
    assert "found a 2 times" in (first.messages[0].content or "") and not first.terminated
    last = await environment.step(write(("final", {"answer": "three"})))
    assert last.terminated
    assert await environment.evidence() == {
        "answer": "three",
        "label": "3",
        "steps": 2,
        "calls": {"final": 1, "look_up": 1},
        "errors": {},
    }


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("", "no_tool_call"),
        ("I think it is three.", "no_tool_call"),
        ('<tool_call>\n{"name": "final", "arguments": {"answer": "x"', "invalid_action_format"),
        (
            '<think><tool_call>{"name": "final", "arguments": {"answer": "x"}}</tool_call></think>',
            "invalid_action_format",
        ),
        ('<tool_call>{"name": "finale", "arguments": {"answer": "x"}}</tool_call>', "unknown_tool"),
        ('<tool_call>{"name": "final", "arguments": {"answer": 3}}</tool_call>', "invalid_arguments"),
    ],
)
@pytest.mark.parametrize("ending", [True, False], ids=["final tool", "no final tool"])
async def test_a_malformed_answer_is_feedback_and_never_an_answer(words: str | None, code: str, ending: bool) -> None:
    given = tools() if ending else (ThinkTool(), LookUp())
    environment = await opened(*given, template="qwen3")
    observation = await environment.step(reply(words))
    if not ending and words == "I think it is three.":
        assert observation.terminated and await answer_of(environment) == words
        return
    expected = "unknown_tool" if not ending and code == "invalid_arguments" else code
    assert codes(observation) == [expected] and not observation.terminated
    assert await answer_of(environment) is None


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("{", "invalid_action_format"),
        ('{"word": NaN}', "invalid_action_format"),
        ("[" * 100_000, "invalid_action_format"),
        ("{}", "invalid_arguments"),
        ('{"word": "a", "times": "many"}', "invalid_arguments"),
    ],
)
async def test_arguments_are_checked_against_the_schema(arguments: str, code: str) -> None:
    environment = await opened()
    observation = await environment.step(native(("look_up", arguments)))
    assert codes(observation) == [code]
    assert observation.messages[0].tool_call_id == "id0"


# Defects that tool agents are known for, one test each.


async def test_notes_are_shown_to_nobody() -> None:
    heard: list[ToolEvent] = []
    environment = ToolEnvironment(tools=tools(), listener=heard.append)
    await environment.reset(TASK)
    await environment.step(native(("think", {"notes": SECRET}), ("look_up", {"word": "a"})))
    await environment.step(native(("final", {"answer": "done"})))
    assert heard == [
        ToolCallStarted(call_id="id1", name="look_up", arguments='{"word": "a"}'),
        ToolResult(call_id="id1", name="look_up", content="found a 1 times"),
    ]


async def test_calls_after_the_answer_are_refused_by_name() -> None:
    environment = await opened()
    calls = [("look_up", {"word": "a"}), ("final", {"answer": "x"}), ("look_up", {"word": "b"}), ("nothing", {})]
    observation = await environment.step(native(*calls))
    assert observation.terminated and await answer_of(environment) == "x"
    assert [message.tool_call_id for message in observation.messages] == ["id0", "id1", "id2", "id3"]
    assert codes(observation) == ["ignored_after_final"] * 2
    assert "'look_up'" in (observation.messages[2].content or "") and "'nothing'" in (
        observation.messages[3].content or ""
    )


# Tools.


async def test_broken_infrastructure_fails_the_episode() -> None:
    async def away() -> str:
        raise InfrastructureError("the index is away")

    environment = await opened(Calling(away))
    with pytest.raises(CaughtFailure, match="the index is away"):
        await environment.step(native(("away", {})))


async def test_a_tool_has_a_time_a_result_a_length_and_an_error_is_feedback() -> None:
    async def hang() -> str:
        await asyncio.sleep(60)
        return ""

    async def much() -> str:
        return "x" * 65_576

    async def broken() -> str:
        raise KeyError("x")

    environment = await opened(Calling(hang), Calling(much), Calling(broken), tool_timeout=0.2)
    observation = await environment.step(native(("hang", {}), ("much", {}), ("broken", {})))
    assert codes(observation) == ["tool_runtime_error"] * 2
    assert "did not answer within 0.2 s" in (observation.messages[0].content or "")
    assert (observation.messages[1].content or "").endswith("x\n[40 characters cut]")


async def test_the_registry_builds_it_with_tools_by_name() -> None:
    built = registry.build("environments", "tools", {"tools": ["final", f"{__name__}:LookUp"], "template": "qwen3"})
    await built.reset(TASK)
    assert codes(await built.step(text(("think", {"notes": "x"})))) == ["unknown_tool"]
    for options, message in (
        ({"tools": ["finale"]}, "unknown tool 'finale'"),
        ({"tools": ["no_such_module:X"]}, "cannot be loaded"),
        ({"template": "qwen33"}, "unknown chat template 'qwen33'"),
    ):
        with pytest.raises(ConfigError, match=message):
            registry.build("environments", "tools", options)


async def test_it_is_an_environment_as_sessions_need_one() -> None:
    def make() -> ToolEnvironment:
        return ToolEnvironment(ToolOptions(template="qwen3"), tools=tools())

    call = '<tool_call>{"name": "look_up", "arguments": {"word": "a"}}</tool_call>'
    await check_environment(make, TASK, actions=[call, "nothing", call])


async def test_a_task_without_a_question_and_a_step_after_the_end_are_errors() -> None:
    with pytest.raises(BadEnvironmentError, match="is empty: give it"):
        await ToolEnvironment().reset(Task(id="t", environment="tools"))
    with pytest.raises(BadEnvironmentError, match=r"data\.messages"):
        await ToolEnvironment().reset(Task(id="t", environment="tools", data={"messages": [{"content": "x"}]}))
    environment = await opened()
    await environment.step(native(("final", {"answer": "x"})))
    with pytest.raises(BadEnvironmentError, match="not open"):
        await environment.step(native(("final", {"answer": "y"})))
    assert await answer_of(environment) == "x"
