"""What the gateway records of the shapes that servers give answers, streams and errors, and clients give histories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from gateway_world import Model, streamed, user, world
from wire_shapes import AGAIN, MESSAGES, REFUSED, STREAMS

from openhands_rl_plugin.core.messages import reasoning_of


def answer(name: str, given: Any) -> dict[str, Any]:
    choice = {"index": 0, name: given, "finish_reason": None if name == "delta" and given else "stop"}
    return {"id": "c1", "model": "m", "error": None, "choices": [choice], "usage": None}


async def test_answers_streams_and_the_histories_that_repeat_them(tmp_path: Path) -> None:
    meant = {f"whole {name}": each for name, each in MESSAGES.items()}
    meant |= {f"stream {name}": each for name, each in STREAMS.items()}
    asked = [given for given, _, _ in meant.values() for _ in range(2)]

    async def behave(request: web.Request, body: Any) -> web.StreamResponse:
        given = asked.pop(0)
        if isinstance(given, list):
            return await streamed(request, [answer("delta", delta) for delta in (*given, None)])
        return web.json_response(answer("message", {"role": "assistant", **given}))

    async with world(tmp_path, Model(behave=behave)) as gateway:
        for name, (given, _, _) in meant.items():
            stream = isinstance(given, list)
            repeated = {"content": "Hi"} if stream else given
            await gateway.ask(user("one"), session=name, stream=stream)
            await gateway.ask(user("one"), {"role": "assistant", **repeated}, user("two"), session=name, stream=stream)
            await gateway.end(session=name)
    stored = await gateway.stored()
    assert {trajectory.task.id for trajectory in stored} == set(meant)
    for trajectory in stored:
        given, said, reasoning = meant[trajectory.task.id]
        first, last = trajectory.nodes[1], trajectory.nodes[-1]
        assert (first.message, reasoning_of(first), last.message) == (said, reasoning, said), trajectory.task.id
        assert isinstance(given, list) or [node.sampled for node in trajectory.nodes] == [False, True, False, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_in_a_200_has_the_status_of_its_code(tmp_path: Path, stream: bool) -> None:
    left = [*AGAIN, *REFUSED]

    async def behave(request: web.Request, body: Any) -> web.StreamResponse:
        error = left.pop(0)
        return await streamed(request, [error]) if stream else web.json_response(error)

    async with world(tmp_path, Model(behave=behave)) as gateway:
        for body in (*AGAIN, *REFUSED):
            reply = await gateway.ask(user("one"), stream=stream)
            assert (reply.status_code >= 429) is (body in AGAIN) and reply.status_code >= 400, body
            assert reply.json() == body
    assert await gateway.stored() == []
