"""What the gateway records of the shapes that servers give answers, streams and errors, and clients give histories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from gateway_world import Model, streamed, user, world
from wire_shapes import ERRORS, MESSAGES, STREAMS

from openhands_rl_plugin.core.messages import reasoning_of


def completion(message: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": "stop"}
    return {"id": "c1", "model": "m", "error": None, "choices": [choice], "usage": None}


async def test_answers_and_the_histories_that_repeat_them(tmp_path: Path) -> None:
    left = [given for given, _, _ in MESSAGES.values() for _ in range(2)]

    async def behave(request: web.Request, body: Any) -> web.Response:
        return web.json_response(completion(left.pop(0)))

    async with world(tmp_path, Model(behave=behave)) as gateway:
        for name, (given, _, _) in MESSAGES.items():
            await gateway.ask(user("one"), session=name)
            again = await gateway.ask(user("one"), {"role": "assistant", **given}, user("two"), session=name)
            assert again.headers.get("x-openhands-rl-recorded") is None, name
            await gateway.end(session=name)
    for trajectory in await gateway.stored():
        _, meant, reasoning = MESSAGES[trajectory.task.id]
        assert [node.sampled for node in trajectory.nodes] == [False, True, False, True], trajectory.task.id
        assert (trajectory.nodes[1].message, reasoning_of(trajectory.nodes[1])) == (meant, reasoning)
        assert trajectory.nodes[3].message == meant and trajectory.usage.calls == 2


async def test_streams(tmp_path: Path) -> None:
    left = list(STREAMS.values())

    async def behave(request: web.Request, body: Any) -> web.StreamResponse:
        deltas, _, _ = left.pop(0)
        frame = {"id": "c1", "model": "m", "error": None}
        chunks = [{**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        last = {**frame, "choices": [{"index": 0, "delta": None, "finish_reason": "stop"}], "usage": None}
        return await streamed(request, [*chunks, last])

    async with world(tmp_path, Model(behave=behave)) as gateway:
        for name in STREAMS:
            await gateway.ask(user("one"), session=name, stream=True)
            await gateway.end(session=name)
    stored = await gateway.stored()
    assert {trajectory.task.id for trajectory in stored} == set(STREAMS)
    for trajectory in stored:
        _, meant, reasoning = STREAMS[trajectory.task.id]
        assert (trajectory.nodes[1].message, reasoning_of(trajectory.nodes[1])) == (meant, reasoning), (
            trajectory.task.id
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_in_a_200_has_the_status_of_its_code(tmp_path: Path, stream: bool) -> None:
    left = [body for body, _ in ERRORS.values()]

    async def behave(request: web.Request, body: Any) -> web.StreamResponse:
        error = left.pop(0)
        return await streamed(request, [error]) if stream else web.json_response(error)

    async with world(tmp_path, Model(behave=behave)) as gateway:
        for name, (body, again) in ERRORS.items():
            reply = await gateway.ask(user("one"), session=name, stream=stream)
            assert (reply.status_code >= 429) is again and reply.status_code >= 400, name
            assert json.loads(reply.content) == body
    assert await gateway.stored() == []
