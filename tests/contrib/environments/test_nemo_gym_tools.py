"""Rows of NeMo Gym that bring tools: offered, called at the server's endpoints, and verified with all that was said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from one_episode import one_episode
from raw_server import raw_server, respond

from openhands_rl_plugin.contrib.environments.nemo_gym import NeMoGymClient, NeMoGymOptions
from openhands_rl_plugin.core.types import (
    Completion,
    Limits,
    Message,
    StopReason,
    Task,
    ToolCall,
)
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.testing import ScriptedEngine

COOKIE = "set-cookie: Env___game=abc.def; path=/\r\n"
MISSING = respond({"detail": "Not Found"}, status="404 Not Found")
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
PROMPT = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Paris?"}]


def row(*tools: dict[str, Any], **more: Any) -> dict[str, Any]:
    own = {name: more.pop(name) for name in ("input", "metadata", "tool_choice", "instructions") if name in more}
    return {
        "responses_create_params": {"input": PROMPT, "tools": list(tools or (WEATHER,)), **own},
        "expected": 1,
        **more,
    }


def task(of: dict[str, Any], environment: str = "nemo-gym/weather") -> Task:
    return Task(id="t", environment=environment, data={"row": of})


def client(url: str, **options: Any) -> NeMoGymClient:
    given = {"base_url": url, "timeout": 5, "retries": 0, **options}
    return NeMoGymClient(NeMoGymOptions.model_validate(given))


def calls(city: str) -> Message:
    call = ToolCall(id="own", name="get_weather", arguments=json.dumps({"city": city}))
    return Message(role="assistant", tool_calls=(call,))


def server(
    endpoint: Callable[[str, Any], bytes | None] | None = None, paths: tuple[str, ...] = ("/get_weather",)
) -> Callable[[str, Any], bytes | None]:
    def handle(path: str, body: Any) -> bytes | None:
        if path == "/openapi.json":
            return respond({"paths": {path: {"post": {}} for path in paths}})
        if path == "/seed_session":
            return respond({}, extra=COOKIE)
        if path == "/verify":
            calls = [item for item in body["response"]["output"] if item["type"] == "function_call_output"]
            return respond({**body, "reward": float("cold" in str(calls)), "seen": len(calls)})
        if path == "/get_weather":
            return endpoint(path, body) if endpoint else respond({"weather": f"{body['city']} is cold"})
        return MISSING

    return handle


async def test_calls_go_to_the_server_and_all_of_it_to_be_verified():
    async with raw_server(server()) as seen:
        player = client(seen.url)
        opening = await player.reset(task(row()))
        assert [message.role for message in opening.messages] == ["system", "user"]
        assert opening.messages[0].content == "Be brief." and len(player.info.tools) == 1
        first = await player.step(calls("Paris"))
        assert (first.messages[0].content, first.reward, first.terminated) == (
            '{"weather": "Paris is cold"}',
            0.0,
            False,
        )
        assert (await player.evidence())["unrewarded"] is True
        last = await player.step(Message(role="assistant", content="It is cold."))
        evidence = await player.evidence()
        assert (last.reward, last.terminated, evidence["return"], evidence["info"]) == (1.0, True, 1.0, {"seen": 1})
        await player.close()
    assert seen.paths() == ["/openapi.json", "/seed_session", "/get_weather", "/verify"]
    assert seen.requests[2][1] == {"city": "Paris"}
    output = seen.requests[3][1]["response"]["output"]
    call, told, message = output
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "get_weather",
        {"city": "Paris"},
    )
    assert told == {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": '{"weather": "Paris is cold"}',
    }
    assert message["content"][0]["text"] == "It is cold."


async def test_a_call_that_is_the_answer_is_not_executed():
    async with raw_server(server(paths=())) as seen:
        player = client(seen.url)
        await player.reset(task(row(expected_call={"name": "get_weather"})))
        assert (await player.step(calls("Rome"))).terminated
        await player.close()
    assert "/get_weather" not in seen.paths()
    assert [item["type"] for item in seen.requests[-1][1]["response"]["output"]] == ["function_call"]


class Calling(ScriptedEngine):
    """Calls the tool in each response."""

    async def complete(self, messages: Sequence[Message], **asked: Any) -> list[Completion]:
        return [each.model_copy(update={"message": calls("Paris")}) for each in await super().complete(messages)]


async def test_an_episode_that_a_limit_cuts_is_verified_as_it_stands():
    async with raw_server(server()) as seen:
        cut = await one_episode(client(seen.url), Calling([""] * 3), task(row()), limits=Limits(max_turns=2))
        assert (cut.stop, cut.episode_return, cut.evidence["return"]) == (StopReason.MAX_TURNS, 1.0, 1.0)
        assert (await ReturnReward()(cut)).reward == 1.0
    assert [path for path in seen.paths() if path == "/verify"] == ["/verify"]
