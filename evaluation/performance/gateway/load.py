"""Plays sessions against a gateway over plain sockets and times every call."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """Where a session's calls go. ``{session}`` in the path or in a header stands for its name.

    ``registrations`` are requests (path, JSON body) that come before the first session, or before each one when they
    hold ``{session}``.
    """

    port: int
    path: str = "/v1/chat/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    registrations: Sequence[tuple[str, object]] = ()


@dataclass
class Load:
    """What was measured: seconds a call, seconds in all, and the calls that were answered by session."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    answered: dict[str, int] = field(default_factory=dict)


async def play(target: Target, names: Sequence[str], bodies: Sequence[bytes], concurrency: int) -> Load:
    """One session a name, ``concurrency`` at a time. Ends early, without an error, when the gateway is killed."""
    load, waiting = Load(), list(reversed(names))
    for name in names:
        for path, body in target.registrations:
            await _register(target.port, path.replace("{session}", name), _filled(body, name))

    async def worker() -> None:
        while waiting:
            await _session(target, waiting.pop(), bodies, load)

    started = time.perf_counter()
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        await asyncio.gather(*(worker() for _ in range(concurrency)))
    load.seconds = time.perf_counter() - started
    return load


async def _session(target: Target, name: str, bodies: Sequence[bytes], load: Load) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=2**20)
    try:
        path = target.path.replace("{session}", name)
        headers = "".join(f"{key}: {value.replace('{session}', name)}\r\n" for key, value in target.headers.items())
        for body in bodies:
            started = time.perf_counter()
            writer.write(_request(path, headers, body))
            status, _ = await _answer(reader)
            if status != 200:
                raise SystemExit(f"the gateway on port {target.port} answered {status}")
            load.latencies.append(time.perf_counter() - started)
            load.answered[name] = load.answered.get(name, 0) + 1
    finally:
        writer.close()


async def _register(port: int, path: str, body: object) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request(path, "", json.dumps(body).encode()))
    status, answer = await _answer(reader)
    writer.close()
    if status >= 300:
        raise SystemExit(f"{path} answered {status}: {answer[:300]!r}")


def _request(path: str, headers: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n{headers}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if (length := _LENGTH.search(head)) is not None:
        return status, await reader.readexactly(int(length[1]))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return status, body


def _filled(body: object, name: str) -> object:
    return json.loads(json.dumps(body).replace("{session}", name))
