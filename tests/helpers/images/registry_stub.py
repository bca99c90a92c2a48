"""A registry on loopback: OCI's distribution API with tokens, parts of blobs, and faults on request."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from made_images import MadeImage, sha256

TOKEN = "opaque-token"


class StubRegistry:
    """``images`` by repository and tag; what was asked stands in ``asked``.

    ``cut_after``: so many bytes of a blob are sent per request. ``busy``: so many requests for blobs are answered by
    503, and after ``most_blobs`` all of them. ``login``: tokens are given only to that user and password.
    """

    def __init__(self) -> None:
        self.manifests: dict[tuple[str, str], bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked: list[tuple[str, str]] = []
        self.cut_after = 0
        self.busy = 0
        self.most_blobs = 0
        self.ignore_ranges = False
        self.login = ""
        self.tokens = True
        self.address = ""

    def add(self, repository: str, tag: str, image: MadeImage, index: bytes = b"") -> None:
        data = index or image.blobs[image.manifest]
        self.blobs |= image.blobs
        for name, content in ((tag, data), (sha256(data), data), (image.manifest, image.blobs[image.manifest])):
            self.manifests[(repository, name)] = content

    def downloads(self) -> list[str]:
        return [path.rpartition("/")[2] for path, _ in self.asked if "/blobs/" in path]


class _Handler(BaseHTTPRequestHandler):
    registry: StubRegistry
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        registry, path = self.registry, self.path.partition("?")[0]
        registry.asked.append((path, self.headers.get("Range", "")))
        if path == "/token":
            wanted = f"Basic {base64.b64encode(registry.login.encode()).decode()}"
            if registry.login and self.headers.get("Authorization") != wanted:
                return self._send(401, b"{}")
            return self._send(200, json.dumps({"token": TOKEN}).encode())
        if registry.tokens and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            challenge = f'Bearer realm="{registry.address}/token",service="stub",scope="repository:x:pull"'
            return self._send(401, b"{}", {"WWW-Authenticate": challenge})
        name, _, last = path.removeprefix("/v2/").rpartition("/")
        repository, _, kind = name.rpartition("/")
        if kind == "manifests" and (found := registry.manifests.get((repository, last))) is not None:
            return self._send(200, found, {"Content-Type": json.loads(found).get("mediaType", "application/json")})
        if kind == "blobs" and last in registry.blobs:
            return self._blob(registry.blobs[last])
        return self._send(404, b"{}")

    def _blob(self, data: bytes) -> None:
        registry = self.registry
        if registry.busy > 0 or 0 < registry.most_blobs < len(registry.downloads()):
            registry.busy = max(0, registry.busy - 1)
            return self._send(503, b"", {"Retry-After": "0"})
        asked = self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and not registry.ignore_ranges else 0
        if start >= len(data) > 0:
            return self._send(416, b"")
        part = data[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part[: registry.cut_after] if registry.cut_after else part)
        if registry.cut_after and len(part) > registry.cut_after:
            self.wfile.flush()
            self.close_connection = True
        return None

    def _send(self, code: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """No logging."""


@contextmanager
def stub_registry() -> Iterator[StubRegistry]:
    registry = StubRegistry()
    handler = type("Handler", (_Handler,), {"registry": registry})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    registry.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
