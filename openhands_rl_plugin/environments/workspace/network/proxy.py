"""The HTTP proxy of one session, as a process of its own that only uses the standard library.

``python -I -S proxy.py CHANNEL RULES``: ``CHANNEL`` is a socket, over which the sandbox hands its listening socket
over; ``RULES`` is JSON, the fields of ``allowed.AllowedNetwork``. Tunnels (CONNECT) and plain requests with a whole
address go to allowed hosts, at an address that was looked up and checked here; everything else is refused.

One JSON line on stdout for each refused target, ``[target, reason]``, when it is refused first. The end of stdin ends
the process, with a last line: ``{target: count}``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import socket
import sys
from collections import Counter
from urllib.parse import urlsplit

CHUNK = 2**16
MOST_CONNECTIONS = 128
MOST_TARGETS = 500
PATIENCE = 30.0
PORTS = (80, 443)
TARGET = re.compile(r"([A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)")
DROPPED = {"host", "connection", "keep-alive", "te", "trailer", "upgrade"}
NAT64 = ipaddress.ip_network("64:ff9b::/96")


class RefusedTargetError(Exception):
    """``status``: of the answer; ``target``: what was asked for; the text says why."""

    def __init__(self, status: int, target: str, why: str) -> None:
        super().__init__(why)
        self.status, self.target = status, target


def is_public(address: str) -> bool:
    """Whether an IP address, also one that is written into another, belongs to the public Internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if inner := ip.ipv4_mapped or ip.sixtofour:
            return is_public(str(inner))
        if ip in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
    return ip.is_global and not ip.is_multicast


class Proxy:
    """Decides, connects and counts."""

    def __init__(self, rules: dict) -> None:
        self.hosts: list[str] = rules["hosts"]
        self.index: list[str] = rules["index"]
        self.left: int = rules["traffic"]
        self.idle: float = rules["idle"]
        self.open = 0
        self.refused: Counter[str] = Counter()

    async def serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self.connection, sock=listener, limit=CHUNK)
        ended = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        async with server:
            await ended
            print(json.dumps(self.refused), flush=True)
            # Connections are not waited for.
            os._exit(0)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            if self.open > MOST_CONNECTIONS:
                raise RefusedTargetError(503, "(connections)", f"more than {MOST_CONNECTIONS} at a time")
            await self.answer(reader, writer)
        except RefusedTargetError as refused:
            self.note(refused)
            text = f"{refused.target}: {refused}\n".encode()
            head = f"HTTP/1.1 {refused.status} Refused\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + text)
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError):
            writer.transport.abort()
        finally:
            self.open -= 1
            writer.close()

    def note(self, refused: RefusedTargetError) -> None:
        full = len(self.refused) >= MOST_TARGETS
        target = "others" if full and refused.target not in self.refused else refused.target
        if target not in self.refused:
            print(json.dumps([target, str(refused)]), flush=True)
        self.refused[target] += 1

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(PATIENCE):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, _, rest = head.partition(" ")
        target, _, rest = rest.partition(" ")
        version, _, lines = rest.partition("\r\n")
        if not version.startswith("HTTP/1.") or not re.fullmatch(r"[A-Z]{1,20}", method):
            raise RefusedTargetError(400, "(malformed)", "is no request to a proxy")
        if method == "CONNECT":
            _, upstream = await self.connect(target)
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await self.relay(reader, writer, *upstream)
        else:
            await self.forward(method, target, lines, reader, writer)

    async def forward(
        self, method: str, url: str, lines: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send one plain request, with its body, and pass the answer on."""
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.username is not None:
            raise RefusedTargetError(400, "(malformed)", "is no http:// address without a login")
        headers = [HEADER.fullmatch(line) for line in lines.removesuffix("\r\n\r\n").split("\r\n")]
        found = [(each[1], each[2]) for each in headers if each]
        named = {name.lower(): value for name, value in found}
        if sum(name.lower() == "content-length" for name, _ in found) > 1:
            raise RefusedTargetError(400, "(malformed)", "has several lengths")
        if "transfer-encoding" in named or not re.fullmatch(r"[0-9]{1,15}", length := named.get("content-length", "0")):
            raise RefusedTargetError(411, "(malformed)", "needs the length of its body")
        target, upstream = await self.connect(parts.netloc if parts.port else f"{parts.netloc.rstrip(':')}:80")
        kept = [f"{name}: {value}" for name, value in found if not re.match("proxy-", name, re.IGNORECASE)]
        kept = [line for line in kept if line.partition(":")[0].lower() not in DROPPED]
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = [f"{method} {path} HTTP/1.1", f"Host: {target.removesuffix(':80')}", *kept, "Connection: close"]
        upstream[1].write("\r\n".join([*head, "", ""]).encode("latin-1"))
        await self.relay(reader, writer, *upstream, most=int(length))

    async def connect(self, text: str) -> tuple[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """``host:port`` as it is allowed, and a connection to it at an address that may be used."""
        match = TARGET.fullmatch(text)
        if match is None or not 0 < int(match[2]) < 2**16:
            raise RefusedTargetError(400, "(malformed)", "is no host:port")
        host, port = match[1].lower().rstrip("."), int(match[2])
        target = f"{host}:{port}"
        own_index = target in self.index
        if not own_index and (why := self.why_not(host, port)):
            raise RefusedTargetError(403, target, why)
        if self.left <= 0:
            raise RefusedTargetError(403, target, "the session's traffic is used up")
        try:
            async with asyncio.timeout(PATIENCE):
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
                addresses = [str(each[4][0]) for each in found]
                usable = addresses if own_index else [each for each in addresses if is_public(each)]
                if not usable:
                    raise RefusedTargetError(403, target, "its address is private")
                return target, await self.first_of(usable, port)
        except (OSError, UnicodeError) as error:
            raise RefusedTargetError(
                502, target, f"is allowed, but cannot be reached: {error or 'no answer'}"
            ) from error

    def why_not(self, host: str, port: int) -> str:
        """Why a host is not allowed, by its name and port alone; empty when it is."""
        if host.startswith("[") or re.fullmatch(r"[0-9.]+|.*\.0[xX]?[0-9A-Fa-f]*", host):
            return "addresses are not allowed, only names"
        parents = [host.split(".", at)[at] for at in range(1, host.count(".") + 1)]
        names = [host, *(f"*.{parent}" for parent in parents)]
        if any(f"{name}:{port}" in self.hosts for name in names):
            return ""
        if not any(name in self.hosts for name in names):
            return "is not in [rl.workspace] network"
        return "" if port in PORTS else "its port is not in [rl.workspace] network"

    async def first_of(self, addresses: list[str], port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for address in addresses[:-1]:
            try:
                async with asyncio.timeout(PATIENCE / 3):
                    return await asyncio.open_connection(address, port, limit=CHUNK)
            except OSError:
                continue
        return await asyncio.open_connection(addresses[-1], port, limit=CHUNK)

    async def relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_host: asyncio.StreamReader,
        to_host: asyncio.StreamWriter,
        most: int | None = None,
    ) -> None:
        """Pass bytes both ways until both sides end, one fails, nothing comes, or the traffic is used up."""
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(self.idle) as idle:

            async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, most: int | None) -> None:
                while most != 0 and (data := await source.read(CHUNK if most is None else min(CHUNK, most))):
                    self.left -= len(data)
                    if self.left < 0:
                        raise OSError("the session's traffic is used up")
                    most = None if most is None else most - len(data)
                    sink.write(data)
                    await sink.drain()
                    idle.reschedule(clock() + self.idle)
                if most is None and sink.can_write_eof():
                    sink.write_eof()

            upload = asyncio.ensure_future(pass_on(reader, to_host, most))
            try:
                download = pass_on(from_host, writer, None)
                await (asyncio.gather(upload, download) if most is None else download)
            finally:
                upload.cancel()
                to_host.close()


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        _, handles, _, _ = socket.recv_fds(channel, 1, 1)
    if handles:
        asyncio.run(Proxy(json.loads(sys.argv[2])).serve(socket.socket(fileno=handles[0])))


if __name__ == "__main__":
    main()
