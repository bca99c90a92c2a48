"""Recorded sessions of an agent of somebody else: requests, their responses, what the model server got, what was kept.

A session is a list of calls. A call is the answer that the server gives, the messages, and more fields of its body.
"""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import httpx
from scripted_model import call, refusal, reply, serve
from sessions import normal, view

from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rl import RLSettings, StorageSettings
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.session.client_sessions import GatewayConfig
from openhands_rl_plugin.session.gateway import running_gateway

Message = dict[str, Any]
SYSTEM: Message = {"role": "system", "content": "be brief"}
TOOL: Message = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
OFFERED = {"tools": [TOOL], "temperature": 0.7, "max_tokens": 90, "seed": 4}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def bash(number: int, command: str, text: str | None = None) -> Message:
    return reply(text, call("bash", {"command": command}, f"call-{number}"))


def seen(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call-{number}", "content": text}


def turns(**body: Any) -> list[Any]:
    """Three turns with a tool, each prompt going on from the one before."""
    history = [SYSTEM, user("one")]
    calls = []
    for number in range(3):
        answer = bash(number, f"echo {number}", "I look." if number else None)
        calls.append((answer, history, OFFERED | body))
        history = [*history, answer, seen(number, f"{number}\n")]
    return [*calls, (reply("done"), history, OFFERED | body)]


RESPELT = bash(0, "echo 1") | {"tool_calls": [call("bash", '{"command":"echo 1"}', "call-0")]}
BROKEN = reply(None, call("bash", '{"command": "echo', "call-0"))
EMPTIED = reply(None, call("bash", "{}", "call-0"))
SESSIONS: dict[str, tuple[list[Any], dict[str, Any] | None]] = {
    "turns": (turns(), {"reward": 0.5}),
    "streamed turns": (turns(**STREAMED), {"success": True}),
    "the same prompt twice": (
        [
            (reply("a"), [user("one")], {}),
            (reply("b"), [user("one")], {}),
            (reply("c"), [user("one"), reply("a"), user("two")], {}),
        ],
        {},
    ),
    "a condensed history": (
        [
            (reply("a"), [SYSTEM, user("one")], {}),
            (reply("sum"), [user("sum up: one")], {}),
            (reply("b"), [SYSTEM, user("so far: sum")], {}),
            (reply("c"), [SYSTEM, user("so far: sum"), reply("b"), user("two")], {}),
        ],
        {"success": False},
    ),
    "a call in another spelling": (
        [(bash(0, "echo 1"), [user("one")], OFFERED), (reply("b"), [user("one"), RESPELT, seen(0, "1")], OFFERED)],
        {},
    ),
    "a malformed call": (
        [(BROKEN, [user("one")], OFFERED), (reply("b"), [user("one"), EMPTIED, seen(0, "what?")], OFFERED)],
        {},
    ),
    "words that nobody sampled": (
        [(reply("a"), [user("one")], {}), (reply("b"), [user("one"), reply("my own"), user("two")], {})],
        None,
    ),
    "a refusal and an error": (
        [
            (refusal(400, "no such field"), [user("one")], {"top_k": 3}),
            (refusal(500, "boom"), [user("one")], {}),
            (reply("a"), [user("one")], {"top_p": 0.9, "stop": ["x"]}),
        ],
        {},
    ),
    "text in parts": (
        [
            (
                reply("a"),
                [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
                {},
            )
        ],
        {},
    ),
    "a reward out of bounds": ([(reply("a"), [user("one")], {})], {"reward": 7}),
}


def content_of(response: httpx.Response) -> list[Any]:
    streams = "event-stream" in response.headers["content-type"]
    return [response.status_code, response.text if streams else response.json()]


async def play(folder: str, **options: Any) -> Any:
    made: dict[str, Any] = {}
    storage = open_storage(RLSettings(storage=StorageSettings(path=folder)))
    with serve() as server:
        config = GatewayConfig(upstream=server.url, port=0, **options)
        async with running_gateway(config, storage) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            for number, (name, (calls, end)) in enumerate(SESSIONS.items()):
                responses = []
                for answer, messages, body in calls:
                    server.script("policy", [answer])
                    sent = {"model": "policy", "messages": messages, **body}
                    got = await client.post(f"/session/s{number}/v1/chat/completions", json=sent)
                    responses.append(content_of(got))
                    server.scripts["policy"].clear()
                if end is not None:
                    got = await client.post(f"/session/s{number}/end", json=end)
                    responses.append(content_of(got))
                made[f"s{number}"] = {"name": name, "responses": responses, "requests": server.requests.pop("policy")}
    async for trajectory, scores in storage.find(TrajectoryFilter(finished=None)):
        kept = {"trajectory": view(trajectory), "scores": [each.model_dump(mode="json") for each in scores]}
        made[trajectory.task.id] |= kept
    await storage.close()
    return {session.pop("name"): session for session in made.values()}


def make(**options: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return normal(asyncio.run(play(folder, **options)))


def both() -> Any:
    return {"as sent": make(), "restored": make(restore_calls=True)}
