"""A gateway between a client and a model server on real sockets, and what it stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from aiohttp import web

from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.models.gateway.config import GatewayConfig
from openhands_rl_plugin.models.gateway.server import running_gateway
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

Body = dict[str, Any]
Behaviour = Callable[[web.Request, Body], Awaitable[web.StreamResponse | None]]


def ids_of(text: str) -> list[int]:
    return list(text.encode("utf-8", "replace"))


def prompt_ids(messages: list[Body]) -> list[int]:
    """A template that extends: what was said before is never written another way."""
    return ids_of("".join(f"<{each['role']}>{spelled(each)}</>" for each in messages) + "<assistant>")


def spelled(message: Body) -> str:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part.get("text", "[image]") for part in content)
    calls = "".join(
        call["function"]["name"] + call["function"]["arguments"] for call in message.get("tool_calls") or ()
    )
    return text + calls


def sampled_ids(message: Body) -> list[int]:
    return ids_of(f"{spelled(message)}</>")


@dataclass
class Model:
    """A model server that counts its answers: ``answer 1``, ``answer 2``, ... or calls a tool when one is offered.

    ``behave`` may answer instead. ``headers`` and ``bodies`` are what it was sent.
    """

    behave: Behaviour | None = None
    bodies: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answers: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.behave is not None and (response := await self.behave(request, body)) is not None:
            return response
        return web.json_response(self.completion(body))

    def completion(self, body: Body) -> Body:
        choices = [self._choice(index, body) for index in range(body.get("n") or 1)]
        prompt = prompt_ids(body["messages"])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 5, "total_tokens": len(prompt) + 5}
        return {
            "id": f"chatcmpl-{self.answers}",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": choices,
            "usage": usage,
            "prompt_token_ids": prompt if body.get("return_token_ids") else None,
        }

    def _choice(self, index: int, body: Body) -> Body:
        self.answers += 1
        message: Body = {"role": "assistant", "content": f"answer {self.answers}"}
        if body.get("tools"):
            function = {"name": "bash", "arguments": json.dumps({"command": f"echo {self.answers}"})}
            message["tool_calls"] = [{"id": f"call_{self.answers}", "type": "function", "function": function}]
        ids = sampled_ids(message)
        logprobs = {"content": [{"token": "x", "logprob": -0.5, "bytes": None, "top_logprobs": []} for _ in ids]}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs if body.get("logprobs") else None,
            "finish_reason": "tool_calls" if body.get("tools") else "stop",
            "token_ids": ids if body.get("return_token_ids") else None,
        }


@asynccontextmanager
async def serving(model: Model) -> AsyncIterator[str]:
    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", model.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    model.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield model.url
    finally:
        await runner.cleanup()


@dataclass
class World:
    """A running gateway: its URL, an HTTP client for it, the model behind it and the store."""

    url: str
    http: httpx.AsyncClient
    model: Model
    path: Path

    async def say(self, *messages: Body, session: str = "s", headers: dict[str, str] | None = None, **body: Any) -> Any:
        """The answered message of one call."""
        response = await self.ask(*messages, session=session, headers=headers, **body)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    async def ask(
        self, *messages: Body, session: str = "s", headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        sent = {"model": "policy", "messages": list(messages), **body}
        named = {"x-litellm-session-id": session, **(headers or {})}
        return await self.http.post("/v1/chat/completions", json=sent, headers=named)

    async def end(self, session: str = "s", **told: Any) -> httpx.Response:
        return await self.http.post(f"/session/{session}/end", json=told)

    async def stored(self) -> list[Trajectory]:
        return [trajectory for trajectory, _ in await stored(self.path)]

    async def only(self) -> Trajectory:
        (trajectory,) = await self.stored()
        return trajectory


async def stored(path: Path) -> list[tuple[Trajectory, tuple[Score, ...]]]:
    """All that a store holds, finished or not."""
    async with FileTrajectoryStorage(path) as storage:
        return [found async for found in storage.find(TrajectoryFilter(finished=None))]


@asynccontextmanager
async def world(path: Path, model: Model | None = None, **options: Any) -> AsyncIterator[World]:
    model = model or Model()
    async with serving(model) as url, FileTrajectoryStorage(path) as storage:
        config = GatewayConfig.model_validate({"upstream": url, "port": 0, **options})
        async with (
            running_gateway(config, storage) as gateway,
            httpx.AsyncClient(base_url=gateway, timeout=20, trust_env=False) as http,
        ):
            yield World(gateway, http, model, path)


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that will be so."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def user(text: str) -> Body:
    return {"role": "user", "content": text}


SYSTEM: Body = {"role": "system", "content": "be brief"}
TOOL: Body = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
