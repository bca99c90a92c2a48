"""Clients that do what HTTP libraries would not."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def connect(url: str, seconds: float = 10.0) -> socket.socket:
    """A connection to the server at ``url``."""
    place = urlsplit(url)
    return socket.create_connection((place.hostname or "", place.port or 0), timeout=seconds)


def exchange(url: str, sent: bytes, seconds: float = 10.0) -> bytes:
    """Everything that comes back for ``sent`` until the server closes the connection."""
    with connect(url, seconds) as client:
        client.sendall(sent)
        return rest(client)


def rest(client: socket.socket) -> bytes:
    """Everything until the server closes the connection."""
    found = b""
    try:
        while part := client.recv(65536):
            found += part
    except ConnectionError:
        pass
    return found


def request(path: str = "/", method: str = "POST", body: bytes = b"{}", **headers: str) -> bytes:
    """A request with exactly these headers (``content_type="..."``), in one piece; the connection ends after it."""
    lines = [f"{method} {path} HTTP/1.1", "Connection: close", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def status(answer: bytes) -> int:
    """The status of a response, 0 for none."""
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0
