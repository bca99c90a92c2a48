"""A server behind NeMo Gym's wire format, as nemo-gym 0.4.0 was seen to speak it: it knows an episode by its cookie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from aiohttp import web
from openenv_wire import serving


@dataclass
class Counter:
    """A gymnasium-style server: counts the steps of each session, three of which are an episode."""

    url: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    verifies: bool = False

    async def reset(self, request: web.Request) -> web.Response:
        session, body = await self._heard(request)
        self.counts[session] = 0
        return self._answer(session, {"observation": f"start of {body.get('seed')}", "info": {}})

    async def seed_session(self, request: web.Request) -> web.Response:
        session, _ = await self._heard(request)
        return self._answer(session, {})

    async def step(self, request: web.Request) -> web.Response:
        session, body = await self._heard(request)
        if session not in self.counts:
            return self._answer(session, "KeyError()", 500)
        self.counts[session] += 1
        over = self.counts[session] == 3
        text = body["response"]["output"][0]["content"][0]["text"]
        observation = None if over else f"{text} is number {self.counts[session]}"
        answer = {"observation": observation, "reward": float(over), "terminated": over, "truncated": False, "info": {}}
        return self._answer(session, answer)

    async def verify(self, request: web.Request) -> web.Response:
        session, body = await self._heard(request)
        right = body["response"]["output"][0]["content"][0]["text"] == body["expected_answer"]
        return self._answer(session, {**body, "reward": float(right)})

    async def _heard(self, request: web.Request) -> tuple[str, dict[str, Any]]:
        body = await request.json()
        self.bodies.append((request.path, body))
        assert "input" in body["responses_create_params"]
        await asyncio.sleep(0.002)
        return request.cookies.get("Counter___game") or uuid4().hex, body

    def _answer(self, session: str, body: object, status: int = 200) -> web.Response:
        response = web.json_response(body, status=status)
        response.set_cookie("Counter___game", session, path="/", max_age=1209600, httponly=True, samesite="lax")
        return response


@asynccontextmanager
async def counter(*, verifies: bool = False) -> AsyncIterator[Counter]:
    server = Counter()
    app = web.Application()
    verifying = {"/seed_session": server.seed_session, "/verify": server.verify}
    routes = verifying if verifies else {"/reset": server.reset, "/step": server.step}
    for path, handler in routes.items():
        app.router.add_post(path, handler)

    async def described(request: web.Request) -> web.Response:
        return web.json_response({"paths": dict.fromkeys(routes)})

    app.router.add_get("/openapi.json", described)
    async with serving(app) as server.url:
        yield server
