"""Rows of NeMo Gym that bring tools: offered, called at the server's endpoints, and verified with all that was said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from raw_server import RawServer, raw_server, respond

from openhands_rl_plugin.contrib.environments.nemo_gym import NeMoGymClient, NeMoGymOptions
from openhands_rl_plugin.core.errors import BadEnvironmentError, GraderError, InfrastructureError
from openhands_rl_plugin.core.types import (
    Completion,
    EpisodeRequest,
    Limits,
    Message,
    PolicyRef,
    StopReason,
    StrategySpec,
    Task,
    ToolCall,
    Trajectory,
)
from openhands_rl_plugin.hosts.shared.environment_reply import RESET_TOOL, STEP_TOOL
from openhands_rl_plugin.hosts.shared.hosted_environment import HostedEnvironment
from openhands_rl_plugin.rewards.outcome import ReturnReward
from openhands_rl_plugin.rollout.session import AgentSession
from openhands_rl_plugin.rollout.strategies.react import StandardReActStrategy
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


def said(action: str) -> Message:
    return Message(role="assistant", content=f"Action: {action}")


def called(*calls: tuple[str, str], content: str | None = None) -> Message:
    made = tuple(ToolCall(id=f"own{at}", name=name, arguments=text) for at, (name, text) in enumerate(calls))
    return Message(role="assistant", content=content, tool_calls=made)


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
        system = opening.messages[0].content or ""
        assert "get_weather - The weather of a city." in system and "Be brief." in system and '"city"' in system
        first = await player.step(said('{"name": "get_weather",\n "arguments": {"city": "Paris"}}'))
        assert (first.messages[0].content, first.reward, first.terminated) == (
            '{"weather": "Paris is cold"}',
            0.0,
            False,
        )
        assert (await player.evidence())["unrewarded"] is True
        last = await player.step(said("It is cold."))
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


@pytest.mark.parametrize("tools", [True, False])
async def test_a_server_with_one_route_for_all_calls_is_not_asked_to_reset_by_it(tools: bool):
    ordinary = server(paths=("/seed_session", "/verify", "/{path}"))

    def handle(path: str, body: Any) -> bytes | None:
        return respond({"detail": "no session"}, status="400 Bad") if path == "/reset" else ordinary(path, body)

    async with raw_server(handle) as seen:
        player = client(seen.url)
        of = row() if tools else {"responses_create_params": {"input": PROMPT}}
        await player.reset(task(of))
        assert (await player.step(said("cold"))).terminated
        await player.close()
        assert ("/reset" in seen.paths()) is not tools


async def test_native_calls_and_what_is_wrong_with_them():
    async with raw_server(server(lambda path, body: respond({"detail": "no city"}, status="422 No"))) as seen:
        player = client(seen.url, react_format=False)
        opening = await player.reset(task(row()))
        assert [message.content for message in opening.messages] == ["Be brief.", "Paris?"], "the row speaks for itself"
        [offered] = player.info.tools
        assert offered["function"]["name"] == "get_weather"  # pyright: ignore
        two = await player.step(called(("get_weather", "{}"), ("get_weather", "{no"), content="Let me see."))
        assert [(each.role, each.tool_call_id) for each in two.messages] == [("tool", "own0"), ("tool", "own1")]
        assert "no city" in (two.messages[0].content or "") and "Invalid tool call" in (two.messages[1].content or "")
        wrong = await player.step(called(("verify", '{"reward": 1}')))
        assert "there is no tool 'verify'" in (wrong.messages[0].content or "") and wrong.messages[0].role == "tool"
        assert (await player.step(Message(role="assistant", content="```\nx\n```"))).terminated
        await player.close()
    output = seen.requests[-1][1]["response"]["output"]
    assert [item["type"] for item in output] == [
        *("message", "function_call", "function_call", "function_call_output", "function_call_output", "message")
    ]
    assert output[-1]["content"][0]["text"] == "```\nx\n```", "graders look for the fence"
    assert seen.paths().count("/verify") == 1


@pytest.mark.parametrize("form", ["text", "native"])
async def test_a_call_that_is_the_answer_is_not_executed(form: str):
    of = row(expected_call={"name": "get_weather"})
    async with raw_server(server(paths=())) as seen:
        player = client(seen.url, react_format=form == "text")
        await player.reset(task(of))
        call = '{"city": "Rome"}'
        done = (
            said(f'{{"name": "get_weather", "arguments": {call}}}') if form == "text" else called(("get_weather", call))
        )
        assert (await player.step(done)).terminated
        await player.close()
    assert "/get_weather" not in seen.paths()
    assert [item["type"] for item in seen.requests[-1][1]["response"]["output"]] == ["function_call"]


async def test_a_row_whose_tool_has_no_endpoint_is_refused_by_name():
    async with raw_server(server(paths=("/verify", "/seed_session"))) as seen:
        for options, fails in (({}, True), ({"tool_calls": "answer"}, False), ({"tool_calls": "execute"}, True)):
            player = client(seen.url, **options)
            if fails:
                with pytest.raises(BadEnvironmentError, match=r"no endpoint for its tool get_weather; .* tool_calls"):
                    await player.reset(task(row()))
            else:
                await player.reset(task(row()))
            await player.close()


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (row(input=IMAGE), "holds an input_image"),
        (row(input=[{"type": "computer_call"}]), "holds a 'computer_call'"),
        (row(metadata={"audio_url": "data:audio/wav;base64,AAAA"}), "its 'audio_url' is audio/wav"),
        (row({"type": "web_search"}), "of type 'web_search'"),
        (row(WEATHER, WEATHER), "two tools are called 'get_weather'"),
        (row({**WEATHER, "name": "verify"}), "cannot be called 'verify'"),
        (row({**WEATHER, "name": "a/../verify"}), "no name of a tool"),
        (row(agent_ref={"name": "gsm8k_aviary_agent"}), r"its agent 'gsm8k_aviary_agent' \(aviary\)"),
    ],
)
async def test_what_cannot_be_played_is_refused_before_anything_is_sent(of: dict[str, Any], words: str):
    async with raw_server(server()) as seen:
        player = client(seen.url)
        with pytest.raises(BadEnvironmentError, match=words):
            await player.reset(task(of))
        await player.close()
        assert seen.paths() == []


async def test_earlier_turns_keep_their_roles():
    given = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "cold"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    async with raw_server(server()) as seen:
        player = client(seen.url, react_format=False)
        opening = await player.reset(task(row(input=given, instructions="I")))
        await player.close()
    assert [(each.role, each.content) for each in opening.messages] == [
        *(("system", "I\n\nS"), ("user", "a"), ("assistant", None), ("tool", "cold"), ("assistant", "b"), ("user", "c"))
    ]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (None, InfrastructureError, "broke during /get_weather"),
        (respond("busy", status="503 Busy"), InfrastructureError, "503"),
        (respond("x" * 5_000_000), BadEnvironmentError, "4194304 bytes"),
        (MISSING, BadEnvironmentError, "no endpoint for the tool 'get_weather'"),
    ],
)
async def test_an_endpoint_that_breaks_fails_the_episode(answer: bytes | None, kind: type[Exception], words: str):
    async with raw_server(server(lambda path, body: answer)) as seen:
        player = client(seen.url)
        await player.reset(task(row()))
        with pytest.raises(kind, match=words):
            await player.step(said('{"name": "get_weather", "arguments": {"city": "Paris"}}'))
        await player.close()


async def play(seen: RawServer, engine: ScriptedEngine, turns: int = 3, **options: Any) -> Trajectory:
    session = AgentSession(
        environment=client(seen.url, **options),
        strategy=StandardReActStrategy(),
        strategy_spec=StrategySpec(name="StandardReAct"),
        engine=engine,
        policy=PolicyRef(base_model="scripted"),
        limits=Limits(max_turns=turns),
    )
    return await session.run(EpisodeRequest(task=task(row()), run_id="r", group_id="g"))


CALL = 'Action: {"name": "get_weather", "arguments": {"city": "Paris"}}'


async def test_an_episode_that_a_limit_cuts_is_verified_as_it_stands():
    async with raw_server(server()) as seen:
        cut = await play(seen, ScriptedEngine([CALL] * 3), turns=2)
        assert (cut.stop, cut.episode_return, cut.evidence["return"]) == (StopReason.MAX_TURNS, 1.0, 1.0)
        assert (await ReturnReward()(cut)).reward == 1.0
    assert [path for path in seen.paths() if path == "/verify"] == ["/verify"]


async def test_the_model_server_is_given_the_tools():
    class Calling(ScriptedEngine):
        async def complete(self, messages: Any, **options: Any) -> list[Completion]:
            offered.append(len(options["tools"]))
            last = messages[-1].role == "tool"
            answer = Message(role="assistant", content="cold") if last else called(("get_weather", '{"city": "Paris"}'))
            return [Completion(message=answer)]

    offered: list[int] = []
    async with raw_server(server()) as seen:
        episode = await play(seen, Calling([]), react_format=False)
    assert (episode.stop, episode.episode_return, offered, len(episode.tools)) == (
        StopReason.TERMINATED,
        1.0,
        [1, 1],
        1,
    )


async def test_a_host_that_passes_text_only_plays_calls_in_text_and_refuses_native_ones():
    async with raw_server(server()) as seen:
        hosted = HostedEnvironment(client(seen.url), task(row()))
        assert (await hosted.reply_to(RESET_TOOL, {})).failure is None
        told = await hosted.reply_to(STEP_TOOL, {"content": CALL})
        assert "cold" in (told.messages[0].content or "")
        await hosted.conclude()
        assert hosted.evidence is not None and "unrewarded" not in hosted.evidence
        assert hosted.take_owed() is not None, "what a limit cut is verified as it stands"
        native = HostedEnvironment(client(seen.url, react_format=False), task(row()))
        refused = await native.reply_to(RESET_TOOL, {})
        assert refused.failure is not None and "react_format = true" in refused.failure.message
        await native.conclude()
    with pytest.raises(GraderError):
        cut = (await _stored()).model_copy(update={"evidence": {"unrewarded": True}})
        await ReturnReward()(cut)


async def _stored() -> Trajectory:
    async with raw_server(server()) as seen:
        cut = await play(seen, ScriptedEngine([CALL]), turns=1)
    nodes = tuple(node.model_copy(update={"reward": 0.0 if node.sampled else None}) for node in cut.nodes)
    return cut.model_copy(update={"nodes": nodes})
