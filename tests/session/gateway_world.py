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
from scripted_model import LOGPROB, call, completion, prompt_ids, reply
from scripted_model import message_ids as sampled_ids

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Score, Trajectory
from openhands_rl_plugin.session.client_sessions import GatewayConfig
from openhands_rl_plugin.session.gateway import running_gateway
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

Body = dict[str, Any]
Behaviour = Callable[[web.Request, Body], Awaitable[web.StreamResponse | None]]


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
        answer = self.completion(body)
        return await streamed(request, chunks_of(answer, body)) if body.get("stream") else web.json_response(answer)

    def completion(self, body: Body, message: Body | None = None) -> Body:
        """The response, of that ``message`` or of the next ones."""
        prompt, made = prompt_ids(body["messages"]), list[Body]()
        for index in range(body.get("n") or 1):
            self.answers += 1
            command = {"command": f"echo {self.answers}"}
            calls = [call("bash", command, f"call_{self.answers}")] if body.get("tools") else []
            answer = message or reply(f"answer {self.answers}", *calls)
            sampled = sampled_ids(answer)
            one = completion(body, answer, f"chatcmpl-{self.answers}", prompt, sampled, [LOGPROB] * len(sampled))
            made.append(one)
            one["choices"][0]["index"] = index
        return {**made[-1], "choices": [each["choices"][0] for each in made]}


def chunks_of(answer: Body, body: Body) -> list[Body]:
    """The chunks in which vLLM streams a completion: prompt ids with the first, some tokens in each of them."""
    frame = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks: list[Body] = []
    for choice in answer["choices"]:
        message, ids, entries = choice["message"], choice.get("token_ids"), choice.get("logprobs", {}).get("content")
        text, count = message["content"] or "", len(sampled_ids(message))
        deltas: list[Body] = [{"content": text[at : at + 4]} for at in range(0, len(text), 4)]
        for at, each in enumerate(message.get("tool_calls") or ()):
            arguments = each["function"]["arguments"]
            head = {**each, "function": {**each["function"], "arguments": arguments[:5]}}
            rest = {"index": at, "function": {"arguments": arguments[5:]}}
            deltas += [{"tool_calls": [{"index": at, **head}]}, {"tool_calls": [rest]}]
        deltas.append({})  # the end marker: a token without text
        step = -(-count // len(deltas))
        for number, delta in enumerate([{"role": "assistant", "content": ""}, *deltas], -1):
            span = slice(number * step, (number + 1) * step)
            part: Body = {"index": choice["index"], "delta": delta, "finish_reason": None}
            part |= {"logprobs": {"content": entries[span]} if entries else None}
            part |= {"token_ids": ids[span]} if ids is not None else {}
            chunks.append({**frame, "choices": [part]})
        chunks[-1]["choices"][0]["finish_reason"] = choice["finish_reason"]
    chunks[0]["prompt_token_ids"] = answer.get("prompt_token_ids")
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**frame, "choices": [], "usage": answer["usage"]})
    return chunks


async def streamed(
    request: web.Request, events: list[Any], *, pause: Callable[[int], Awaitable[None]] | None = None
) -> web.StreamResponse:
    """Send chunks, or whole events, one by one; ``pause`` is awaited before each."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8", "x-own": "1"})
    await response.prepare(request)
    for number, each in enumerate(events):
        if pause is not None:
            await pause(number)
        await response.write(each if isinstance(each, bytes) else f"data: {json.dumps(each)}\n\n".encode())
    if not events or not isinstance(events[-1], bytes):
        await response.write(b"data: [DONE]\n\n")
    return response


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

    async def chat(self, *messages: Body, **fields: Any) -> Any:
        """The answered message of one call."""
        response = await self.ask(*messages, **fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]

    async def ask(
        self, *messages: Body, session: str = "s", headers: dict[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        sent = {"model": "policy", "messages": list(messages), **body}
        named = {"x-litellm-session-id": session, **(headers or {})}
        return await self.http.post("/v1/chat/completions", json=sent, headers=named)

    async def end(self, session: str = "s", **body: Any) -> httpx.Response:
        return await self.http.post(f"/session/{session}/end", json=body)

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
async def world(path: Path, model: Model | None = None, /, served: Any = None, **options: Any) -> AsyncIterator[World]:
    """``served``: keys of ``[rl.serving]``."""
    model, settings = model or Model(), RLSettings(serving=ServingSettings(**served)) if served else None
    config = {"port": 0, **options}
    async with (
        serving(model) as url,
        FileTrajectoryStorage(path) as storage,
        running_gateway(GatewayConfig.model_validate({"upstream": url, **config}), storage, settings) as gateway,
        httpx.AsyncClient(base_url=gateway, timeout=20, trust_env=False) as http,
    ):
        yield World(gateway, http, model, path)


def contents(trajectory: Trajectory) -> list[tuple[str, str | None]]:
    """Roles and texts of the executed path."""
    return [(message.role, message.content) for message in trajectory.messages()]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that will be so."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def user(text: str) -> Body:
    return {"role": "user", "content": text}


SYSTEM: Body = {"role": "system", "content": "be brief"}
TOOL: Body = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
