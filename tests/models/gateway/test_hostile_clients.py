"""One client, or one server, that sends what nobody expects: nothing stored is lost, and no key or path is reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from worlds import Body, Model, user, world


def nested(levels: int) -> Body:
    deep: list = []
    for _ in range(levels - 1):
        deep = [deep]
    return {"deep": deep}


@pytest.mark.parametrize("levels", [95, 110, 192, 197, 210])
async def test_deep_json_never_makes_the_store_unreadable(tmp_path: Path, levels: int):
    async def answer(request: web.Request, body: Body) -> web.Response | None:
        if body["messages"][0]["content"] != "answer deeply":
            return None
        return web.json_response({**gateway.model.completion(body), "extra": nested(levels)})

    async with world(tmp_path, Model(behave=answer)) as gateway:
        await gateway.say(user("one"), session="good")
        sent = [await gateway.ask(user("one"), session="asks", tool_choice=nested(levels))]
        sent.append(await gateway.ask(user("one"), session="tools", tools=[{"type": "function", "x": nested(levels)}]))
        sent.append(await gateway.ask(user("answer deeply"), session="answers"))
        ended = await gateway.end("good", evidence=nested(levels))
        unrecorded = (await gateway.http.get("/health")).json()["unrecorded"]
    deep = levels > 95
    assert [each.status_code for each in sent] == [200, 200, 200] and ended.status_code == (400 if deep else 200)
    assert [each.headers.get("x-openhands-rl-recorded") for each in sent] == [("no" if deep else None)] * 3
    assert unrecorded == (3 if deep else 0)
    assert len(await gateway.stored()) == (1 if deep else 4)
