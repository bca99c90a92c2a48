"""A grid world behind OpenEnv's wire format, as a server of openenv 0.10.0 was seen to speak it, able to misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Socket = web.WebSocketResponse
Misbehaviour = Callable[[Socket, dict[str, Any]], Awaitable[bool]]
"""Gets every message before it is answered; true means that nothing more has to be done about it."""

METADATA = {"additionalProperties": True, "description": "Additional metadata for the action", "type": "object"}
SCHEMA = {
    "$defs": {"MoveAction": {"enum": ["UP", "DOWN", "LEFT", "RIGHT"], "title": "MoveAction", "type": "string"}},
    "additionalProperties": False,
    "properties": {
        "metadata": METADATA,
        "action": {"$ref": "#/$defs/MoveAction", "description": "The direction to move the agent."},
    },
    "required": ["action"],
    "title": "GridWorldAction",
    "type": "object",
}
MOVES = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}
REFUSAL = {
    "type": "enum",
    "loc": ["action"],
    "msg": "Input should be 'UP', 'DOWN', 'LEFT' or 'RIGHT'",
    "ctx": {"expected": "'UP', 'DOWN', 'LEFT' or 'RIGHT'"},
}


def observation(x: int, y: int, message: str, reward: float, done: bool) -> dict[str, Any]:
    shown = {"metadata": {}, "x": x, "y": y, "message": message}
    return {"type": "observation", "data": {"observation": shown, "reward": reward, "done": done}}


def error(code: str, message: str = "boom", **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


@dataclass
class OpenEnvWire:
    """Where it listens, what it received in order, and how many are connected."""

    url: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    connected: int = 0


@dataclass
class Grid:
    """Five cells a side, from (0, 0) to (4, 4)."""

    x: int = 0
    y: int = 0
    steps: int = 0

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "state":
            return {"type": "state", "data": {"episode_id": f"episode of {id(self)}", "step_count": self.steps}}
        if message["type"] == "reset":
            self.x = self.y = self.steps = 0
            return observation(0, 0, "Welcome to Grid World! Goal is at [4, 4].", 0.0, False)
        move = MOVES.get(message["data"].get("action"))
        if move is None:
            return error("VALIDATION_ERROR", "Invalid message", errors=[REFUSAL])
        self.steps += 1
        self.x, self.y = (min(max(at + by, 0), 4) for at, by in zip((self.x, self.y), move, strict=True))
        arrived = (self.x, self.y) == (4, 4)
        text = "You found the goal!" if arrived else "Keep going..."
        return observation(self.x, self.y, text, 1.0 if arrived else -0.1, arrived)


@asynccontextmanager
async def openenv_server(
    misbehave: Misbehaviour | None = None,
    *,
    sessions: int = 64,
    schema: object = SCHEMA,
) -> AsyncIterator[OpenEnvWire]:
    """``schema`` of ``None``: there is no such path."""
    seen = OpenEnvWire()

    async def talk(request: web.Request) -> Socket:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if seen.connected >= sessions:
            text = f"Server at capacity: {sessions}/{sessions} sessions active. Cannot accept new connections."
            await socket.send_json(error("CAPACITY_REACHED", text, active_sessions=sessions, max_sessions=sessions))
            await socket.close()
            return socket
        seen.connected += 1
        grid = Grid()
        try:
            async for heard in socket:
                message = json.loads(heard.data)
                seen.messages.append(message)
                if misbehave is not None and await misbehave(socket, message):
                    continue
                if message["type"] == "close":
                    break
                await socket.send_json(grid.answer(message))
        finally:
            # As slow to let go as the real one, which destroys the environment first.
            await asyncio.sleep(0.02)
            seen.connected -= 1
        await socket.close()
        return socket

    async def publish(request: web.Request) -> web.Response:
        return web.json_response({"action": schema, "observation": {}, "state": {}})

    app = web.Application()
    app.router.add_get("/ws", talk)
    if schema is not None:
        app.router.add_get("/schema", publish)
    async with serving(app) as seen.url:
        yield seen


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """The address of ``app`` on a free loopback port."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
