"""OpenEnv's protocol, against servers on real sockets that speak its wire format, well and badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from one_episode import assert_failed, one_episode
from openenv_wire import SCHEMA, Misbehaviour, Socket, error, observation, openenv_server, serving

from openhands_rl_plugin.core.errors import GraderError, InfrastructureError
from openhands_rl_plugin.core.types import (
    FailureKind,
    JsonObject,
    Limits,
    Message,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.environments.http.client import HttpEnvironmentOptions, RefusedActionError
from openhands_rl_plugin.environments.openenv import OpenEnvClient, read_action
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.testing import check_environment

INFRASTRUCTURE, ENVIRONMENT = FailureKind.INFRASTRUCTURE, FailureKind.ENVIRONMENT
PATH = ["RIGHT", "DOWN"] * 4


def task(idx: int = 3, **data: Any) -> Task:
    return Task(id="t", environment="openenv/grid_world", instruction="Find the goal.", data={"idx": idx, **data})


def client(url: str, **options: Any) -> OpenEnvClient:
    return OpenEnvClient(HttpEnvironmentOptions.model_validate({"base_url": url, "timeout": 5, **options}))


def reply(action: str) -> Message:
    return Message(role="assistant", content=f"Action: {action}")


def text(found: Any) -> str:
    return found.messages[-1].content or ""


async def test_the_grid_is_walked_to_its_goal_in_one_connection():
    async with openenv_server() as server:
        player = client(server.url)
        opening = await player.reset(task())
        assert json.loads(text(opening)) == {"x": 0, "y": 0, "message": "Welcome to Grid World! Goal is at [4, 4]."}
        assert '"required": ["action"]' in (opening.messages[0].content or "")
        walked = [await player.step(reply(move)) for move in PATH]
        evidence = await player.evidence()
        await player.close()
        assert server.connected == 0, "close waits until the server has let go"
    assert [each.terminated for each in walked] == [False] * 7 + [True]
    assert walked[-1].reward == 1.0 and evidence["return"] == pytest.approx(0.3)
    steps = [{"type": "step", "data": {"action": move}} for move in PATH]
    assert server.messages == [{"type": "reset", "data": {"seed": 3}}, *steps, {"type": "close"}]


async def test_it_conforms_and_forks_by_playing_again():
    async with openenv_server() as server:
        actions = ["Action: RIGHT", 'Action: {"action": "DOWN"}', "Action: sideways", "Action: UP"]
        await check_environment(lambda: client(server.url), task(), actions=actions)


async def test_a_refused_action_is_reported_and_costs_a_step_but_is_not_executed():
    async with openenv_server() as server:
        player = client(server.url)
        await player.reset(task())
        refused = await player.step(reply("SIDEWAYS"))
        assert text(refused) == "Invalid action: action: Input should be 'UP', 'DOWN', 'LEFT' or 'RIGHT'"
        assert (refused.reward, refused.terminated) == (0.0, False)
        assert json.loads(text(await player.step(reply('{"action": "RIGHT"}'))))["y"] == 1
        evidence = await player.evidence()
        assert (evidence["steps"], evidence["malformed"], evidence["rewards"]) == (2, 1, [0.0, -0.1])
        await player.close()


async def test_a_server_of_one_session_runs_one_episode_after_the_other():
    async with openenv_server(sessions=1) as server:
        for _ in range(4):
            player = client(server.url)
            await player.reset(task())
            await player.close()
        first, second = client(server.url), client(server.url)
        await first.reset(task())
        with pytest.raises(InfrastructureError, match=r"1/1 sessions active.*max_concurrent_envs"):
            await second.reset(task())
        await second.close()
        await first.close()


async def test_a_missing_reward_is_not_a_zero():
    def unpaid(at_end: bool) -> Misbehaviour:
        async def answer(to: Socket, message: dict[str, Any]) -> bool:
            if message["type"] != "step":
                return False
            await to.send_json(observation(0, 1, "on", None, at_end))
            return True

        return answer

    async with openenv_server(unpaid(True)) as server:
        await assert_failed(await play(server.url), ENVIRONMENT, "ended the episode without a reward")
    async with openenv_server(unpaid(False)) as server:
        cut = await play(server.url)
    assert (cut.stop, cut.failure, cut.evidence["unrewarded"]) == (StopReason.MAX_TURNS, None, True)
    assert cut.known_return is None
    with pytest.raises(GraderError):
        await ReturnReward()(cut)


MCP_SCHEMA = {
    "properties": {
        "metadata": {"type": "object"},
        "type": {"const": "call_tool", "default": "call_tool", "type": "string"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["tool_name"],
    "title": "CallToolAction",
}


def lists(*tools: dict[str, Any]) -> Misbehaviour:
    async def answer(to: Socket, message: dict[str, Any]) -> bool:
        if message["type"] != "step":
            return False
        action, shown = message["data"], {}
        if action["type"] == "list_tools":
            shown = {"tools": list(tools)}
        elif "code" in action["arguments"]:
            text = f"ran {action['arguments']['code']}"
            shown = {"tool_name": "run", "result": {"content": [{"type": "text", "text": text}]}, "error": None}
        else:
            shown = {"tool_name": "run", "result": None, "error": {"error_type": "invalid_args", "message": "no code"}}
        done = "stop" in str(action)
        await to.send_json(
            {"type": "observation", "data": {"observation": shown, "reward": 1.0 if done else None, "done": done}}
        )
        return True

    return answer


RUN = {"name": "run", "description": "Run it.", "input_schema": {"type": "object", "properties": {"code": {}}}}
STOP = {**RUN, "name": "stop"}
CODE = "def f():\n\n    return 1"


def calls(name: str, **arguments: str) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id="c1", name=name, arguments=json.dumps(arguments)),))


async def test_the_tools_of_an_mcp_environment_are_asked_for_offered_and_called():
    async with openenv_server(lists(RUN, STOP), schema=MCP_SCHEMA) as server:
        player = client(server.url)
        assert "Action:" not in ((await player.reset(task())).messages[0].content or "")
        assert [tool["function"]["name"] for tool in player.info.tools] == ["run", "stop"]  # type: ignore[index,call-overload]
        shown = await player.step(calls("run", code=CODE))
        assert (text(shown), shown.messages[0].tool_call_id) == (f"ran {CODE}", "c1")
        assert text(await player.step(calls("run"))) == "invalid_args: no code"
        assert text(await player.step(reply("hello"))) == "Invalid action: call one of run, stop"
        twin = await player.fork()
        last = await twin.step(calls("stop"))
        assert (last.reward, last.terminated) == (1.0, True)
        assert "unrewarded" not in await twin.evidence() and (await player.evidence())["unrewarded"] is True
        for each in (twin, player):
            await each.close()


@pytest.mark.parametrize(
    ("shown", "expected"),
    [({"text": "Hellö"}, "Hellö"), ({"board": [[0, 1]], "metadata": {"a": 1}}, '{"board": [[0, 1]]}')],
)
async def test_what_the_model_is_shown(shown: dict[str, Any], expected: str):
    async def show(to: Socket, message: dict[str, Any]) -> bool:
        if message["type"] == "reset":
            await to.send_json({"type": "observation", "data": {"observation": shown, "reward": None, "done": False}})
        return message["type"] == "reset"

    async with openenv_server(show) as server:
        player = client(server.url)
        opening = await player.reset(task())
        assert (text(opening), opening.reward) == (expected, 0.0)
        await player.close()


def test_actions_by_their_schema():
    column: JsonObject = {
        "properties": {"metadata": {"type": "object"}, "column": {"type": "integer"}},
        "required": ["column"],
    }
    assert read_action("3", column) == {"column": 3}
    assert read_action("three", column) == {"column": "three"}, "the server says what is wrong with it"
    answer: JsonObject = {"properties": {"answer": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}
    assert read_action("42", answer) == {"answer": "42"}
    assert read_action('{"x": 1}', answer) == {"answer": '{"x": 1}'}
    call: JsonObject = {
        "properties": {"type": {"const": "call"}, "tool": {"type": "string"}, "arguments": {"type": "object"}},
        "required": ["tool"],
    }
    assert read_action('{"tool": "echo", "arguments": {"a": 1}}', call) == {"tool": "echo", "arguments": {"a": 1}}
    assert read_action("echo", call) == {"tool": "echo"}
    with pytest.raises(RefusedActionError, match=r'JSON of this schema: .*"x"'):
        read_action("1 2", {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]})


# Misbehaviour: each gives a typed failure, never a valid episode without a reward.


async def play(url: str, *, timeout: float = 5) -> Trajectory:
    """One episode of at most four turns."""
    player = client(url, timeout=timeout)
    return await one_episode(player, ["Action: RIGHT"] * 4, task(), limits=Limits(max_turns=4))


def at(kind: str, do: Callable[[Socket], Awaitable[object]], after: int = 0) -> Misbehaviour:
    """Good answers to all but messages of ``kind``, of which ``after`` are answered well."""
    left = [after]

    async def misbehave(to: Socket, message: dict[str, Any]) -> bool:
        if message["type"] != kind or left[0] > 0:
            left[0] -= message["type"] == kind
            return False
        await do(to)
        return True

    return misbehave


def answer(text: str) -> Callable[[Socket], Awaitable[object]]:
    return lambda to: to.send_str(text)


def data(**changes: Any) -> Callable[[Socket], Awaitable[object]]:
    good = observation(0, 1, "Keep going...", -0.1, False)
    return answer(json.dumps({**good, "data": {**good["data"], **changes}}))


async def die(to: Socket) -> None:
    request = to._req
    assert request is not None and request.transport is not None
    request.transport.abort()


HUGE = '{"type": "observation", "data": {"observation": {"a": 1e999}, "reward": 1e999, "done": false}}'
CASES = [
    pytest.param(die, INFRASTRUCTURE, ["broke", "still running"], id="dies"),
    pytest.param(lambda to: asyncio.sleep(3), INFRASTRUCTURE, ["did not answer", "0.5 s"], id="slow"),
    pytest.param(answer(json.dumps(error("EXECUTION_ERROR"))), ENVIRONMENT, ["EXECUTION_ERROR", "boom"], id="raises"),
    pytest.param(answer(json.dumps(error("FACTORY_ERROR"))), INFRASTRUCTURE, ["FACTORY_ERROR"], id="factory"),
    pytest.param(answer('{"type": "state", "data": {}}'), ENVIRONMENT, ["answered a"], id="another answer"),
    pytest.param(answer(HUGE), ENVIRONMENT, ["'reward'", "finite"], id="1e999"),
    pytest.param(data(observation="text"), ENVIRONMENT, ["'observation'"], id="observation is a text"),
    pytest.param(data(metadata="x" * 5_000_000), INFRASTRUCTURE, ["4194304 bytes"], id="huge"),
]


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(("do", "kind", "words"), CASES)
async def test_misbehaves(where: str, do: Callable[[Socket], Awaitable[object]], kind: FailureKind, words: list[str]):
    async with openenv_server(at(where, do)) as server:
        trajectory = await play(server.url, timeout=0.5 if "0.5 s" in words else 5)
        await assert_failed(trajectory, kind, *words)
        assert trajectory.failure is not None and trajectory.failure.boundary == f"environment.{where}"
        assert [message["type"] for message in server.messages].count(where) == 1, "nothing is sent twice"
    assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory


@pytest.mark.parametrize(("status", "kind"), [(404, ENVIRONMENT), (503, INFRASTRUCTURE), (302, ENVIRONMENT)])
async def test_no_websocket_there(status: int, kind: FailureKind):
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={"location": "http://192.0.2.1/"})

    async def publish(request: web.Request) -> web.Response:
        return web.json_response({"action": SCHEMA})

    app = web.Application()
    app.router.add_get("/ws", refuse)
    app.router.add_get("/schema", publish)
    async with serving(app) as url:
        await assert_failed(await play(url), kind, str(status))
