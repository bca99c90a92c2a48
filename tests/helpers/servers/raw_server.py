"""A real HTTP server on a free loopback port whose answers are written by hand, so that it can misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Answer = bytes | None
Handler = Callable[[str, Any], Answer | Awaitable[Answer]]
"""(path, JSON body) -> the raw bytes of the response; ``None`` drops the connection without a word."""


def respond(body: object, status: str = "200 OK", content_type: str = "application/json", extra: str = "") -> bytes:
    """The bytes of a response; a body that is neither text nor bytes is written as JSON."""
    content = body if isinstance(body, bytes) else (body if isinstance(body, str) else json.dumps(body)).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {len(content)}\r\n{extra}\r\n"
    return head.encode() + content


@dataclass
class RawServer:
    """Where it listens and what it was asked, in order."""

    url: str
    requests: list[tuple[str, Any]] = field(default_factory=list)

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


@asynccontextmanager
async def raw_server(handler: Handler, late: bytes = b"") -> AsyncIterator[RawServer]:
    """``late``: what it sends 50 ms after an answer."""
    seen = RawServer(url="")
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            connections.add(task)
        try:
            while (answer := await _exchange(reader, handler, seen)) is not None:
                writer.write(answer)
                await writer.drain()
                if late:
                    await asyncio.sleep(0.05)
                    writer.write(late)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client or the test went away
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    seen.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield seen
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections)


async def _exchange(reader: asyncio.StreamReader, handler: Handler, seen: RawServer) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
    path = head.split(" ")[1]
    body = json.loads(await reader.readexactly(length)) if length else None
    seen.requests.append((path, body))
    answer = handler(path, body)
    return await answer if isinstance(answer, Awaitable) else answer


@asynccontextmanager
async def dripping_server(content_type: str = "application/json", piece: bytes = b" ") -> AsyncIterator[str]:
    """Begins an answer and never ends it, a piece every 20 ms: no single read is slow. Without a type, its head."""
    head = f"content-type: {content_type}\r\n\r\n" if content_type else "x: "

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\n{head}".encode())
        while not writer.is_closing():
            writer.write(piece)
            await asyncio.sleep(0.02)

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
