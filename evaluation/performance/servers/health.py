"""How long ``/health`` takes while other clients send what is dear to read.

    .venv/bin/python -m evaluation.performance.servers.health --model MODEL --seconds 8

The clients send over and over, in a process of their own; a probe asks for ``/health`` ten times a second, each time on
a new connection.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from evaluation.performance.servers.fuzz import Server, servers
from openhands_rl_plugin.core.servers.bodies import MOST_VALUES, values_of

_CLIENTS = 8
_POST = "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_PIPELINED = 2000
_VALUES = MOST_VALUES - 100


def _whole(path: str, body: bytes) -> bytes:
    return f"{_POST.format(path=path)}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _chunks(path: str, size: int) -> bytes:
    head = f"{_POST.format(path=path)}Transfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"1\r\n \r\n" * size + b"2\r\n{}\r\n0\r\n\r\n"


def _list(field: str, each: str, size: int, rest: str = "") -> bytes:
    count = min(size // (len(each) + 1), _VALUES // values_of(each.encode()))
    return (f'{{"{field}": [' + ",".join([each] * count) + f"]{rest}}}").encode()


def _keys(count: int) -> bytes:
    return (
        '{"messages":[{"role":"user","content":"a"}],' + ",".join(f'"{n:06}":1' for n in range(count)) + "}"
    ).encode()


def loads(path: str, most: int) -> dict[str, bytes]:
    """What is sent, by name. ``most``: bytes of the largest body that the server reads."""
    size = most - 200
    tool = '{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}'
    return {
        "chunks": _chunks(path, 400_000),
        "pipelined": f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * _PIPELINED,
        "pipelined bodies": (_whole(path, b"{}").replace(b"Connection: close\r\n", b"")) * _PIPELINED,
        "headers": _whole(path, b"{}").replace(b"Host", b"a: b\r\n" * 5000 + b"Host"),
        "messages": _whole(path, _list("messages", '{"role":"user","content":""}', size)),
        "parts": _whole(
            path,
            b'{"messages":[{"role":"user","content":%b}]}' % _list("x", '{"type":"text","text":"a"}', size - 100)[6:-1],
        ),
        "calls": _whole(
            path,
            b'{"messages":[{"role":"assistant","tool_calls":%b}]}'
            % _list("x", '{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}', size - 100)[6:-1],
        ),
        "tools": _whole(path, _list("tools", tool, size, ',"messages":[{"role":"user","content":"a"}]')),
        "numbers": _whole(path, _list("x", "1", size, ',"messages":[{"role":"user","content":"a"}]')),
        "too many numbers": _whole(path, b"[" + b"1," * (size // 2) + b"1]"),
        "keys": _whole(path, _keys(min(size // 11 - 10, _VALUES))),
        "text": _whole(path, b'{"messages":[{"role":"user","content":"' + b"a b" * (size // 3 - 100) + b'"}]}'),
        "escapes": _whole(path, b'{"messages":[{"role":"user","content":"' + b"\\u0000" * (size // 6 - 100) + b'"}]}'),
    }


def _send(url: str, data: bytes, until: float) -> None:
    os.nice(10)  # what is measured is the server, not the clients' demand for its processor
    place = urlsplit(url)
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection((place.hostname or "", place.port or 0), timeout=10) as client:
            client.sendall(data)
            while client.recv(65536) and time.monotonic() < until:
                pass


def probed(url: str, data: bytes, seconds: float) -> list[float]:
    """Seconds of each ``/health`` while eight clients send ``data``."""
    fork = multiprocessing.get_context("fork").Process
    until = time.monotonic() + seconds + 1
    clients = [fork(target=_send, args=(url, data, until), daemon=True) for _ in range(_CLIENTS)]
    for client in clients:
        client.start()
    time.sleep(1)
    took = list[float]()
    while time.monotonic() < until:
        begun = time.monotonic()
        try:
            right = httpx.get(f"{url}/health", trust_env=False, timeout=30).status_code == 200
        except httpx.HTTPError:
            right = False
        took.append(time.monotonic() - begun if right else 30.0)
        time.sleep(0.1)
    for client in clients:
        client.join(30)
        client.kill()
    return took


def measure(server: Server, seconds: float, only: list[str]) -> None:
    """Print a line for each load."""
    path = {"webshop": "/step"}.get(server.name, "/v1/chat/completions")
    most = {"webshop": 64 * 1024, "gateway": 64 * 1024**2}.get(server.name, 4 * 1024**2)
    for name, data in loads(path, most).items():
        if only and name not in only:
            continue
        took = sorted(probed(server.url, data, seconds))
        print(
            json.dumps(
                {
                    "server": server.name,
                    "load": name,
                    "asked": len(took),
                    "median_s": round(took[len(took) // 2], 3),
                    "longest_s": round(took[-1], 3),
                    "machine": round(os.getloadavg()[0], 1),
                }
            ),
            flush=True,
        )


def main() -> None:
    """Print a line for each server and load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a small model")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--only", action="append", default=[], help="a server; several times")
    parser.add_argument("--load", action="append", default=[], help="a load; several times")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="health-") as folder, servers(args.model, Path(folder)) as found:
        for server in found:
            if not args.only or server.name in args.only:
                measure(server, args.seconds, args.load)


if __name__ == "__main__":
    main()
