"""Hostile requests, made from the schemas of the servers' bodies with a seeded generator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import BaseModel

from openhands_rl_plugin.apps.chat_endpoint import AgentCompletionRequest
from openhands_rl_plugin.contrib.webshop.server import ShopRequest, StepBody
from openhands_rl_plugin.models.server.wire import (
    ChatCompletionRequest,
    CompletionRequest,
    LoadRequest,
    TokenizeRequest,
    UpdateWeightsRequest,
)
from openhands_rl_plugin.session.gateway import EndRequest

_NUMBERS = (
    *("0", "-1", "1", "2", "0.5", "1e-300", "1e308", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "3.0"),
    *("2147483647", "2147483648", "9223372036854775807", "9223372036854775808", "-9223372036854775809"),
    *("1" + "0" * 400, "1" * 5000),
)
_TEXTS = ('""', '"a"', '"\\ud800"', '"\\u0000"', '"' + "x" * 3000 + '"', '"' + "\\u00e9" * 500 + '"', '"-1"')
_OTHERS = ("null", "true", "false", "[]", "{}", "[null]", '{"a": 1}', "[" * 150 + "]" * 150, "[" + "1," * 999 + "1]")
_ENCODINGS = ("utf-16", "utf-32", "utf-8-sig", "latin-1")
_TYPES = ("application/json", "application/json; charset=utf-16", "text/plain", "multipart/form-data; boundary=x", "")
_METHODS = ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "FOO")


@dataclass(frozen=True)
class Surface:
    """The routes of one server: path -> the model of its body, and a valid body. ``paths``: without a body.

    ``stateful``: valid requests of sessions, with ``NAME`` for one that another sender uses too, that has ended or that
    never was.
    """

    bodies: dict[str, tuple[type[BaseModel] | None, dict[str, object]]]
    paths: tuple[str, ...] = ()
    stateful: tuple[tuple[str, str], ...] = ()


_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "one"}], "max_tokens": 2}
_RESPONSES = {"model": "tiny", "input": "one", "max_output_tokens": 2}
SURFACES = {
    "serve": Surface(
        {
            "/v1/chat/completions": (ChatCompletionRequest, _CHAT),
            "/v1/completions": (CompletionRequest, {"model": "tiny", "prompt": "one", "max_tokens": 2}),
            "/tokenize": (TokenizeRequest, {"prompt": "one"}),
            "/v1/load_lora_adapter": (LoadRequest, {"lora_name": "x", "lora_path": "/nowhere"}),
            "/v1/unload_lora_adapter": (LoadRequest, {"lora_name": "x"}),
            "/update_weights_from_disk": (UpdateWeightsRequest, {"model_path": "/nowhere", "weight_version": "x"}),
        },
        ("/health", "/metrics", "/v1/models"),
    ),
    "gateway": Surface(
        {
            "/v1/chat/completions": (ChatCompletionRequest, _CHAT),
            "/session/fuzz/v1/chat/completions": (ChatCompletionRequest, _CHAT),
            "/v1/messages": (None, _CHAT),
            "/v1/responses": (None, _RESPONSES),
            "/v1/completions": (CompletionRequest, {"model": "tiny", "prompt": "one", "max_tokens": 2}),
            "/session/fuzz/end": (EndRequest, {"reward": 0.5}),
        },
        ("/health", "/metrics", "/v1/models"),
        (
            ("/session/NAME/v1/chat/completions", json.dumps(_CHAT)),
            ("/session/NAME/v1/chat/completions", json.dumps({**_CHAT, "stream": True})),
            ("/session/NAME/v1/messages", json.dumps(_CHAT)),
            ("/v1/chat/completions", json.dumps({**_CHAT, "prompt_cache_key": "NAME"})),
            ("/session/NAME/end", '{"reward": 1}'),
            ("/session/NAME/end", "{}"),
        ),
    ),
    "agent": Surface(
        {"/v1/chat/completions": (AgentCompletionRequest, {**_CHAT, "model": None})},
        ("/health", "/metrics", "/v1/models"),
    ),
    "webshop": Surface(
        {
            "/reset": (ShopRequest, {"idx": 1}),
            "/step": (StepBody, {"session": "fuzz", "action": "search[tea]"}),
            "/fork": (ShopRequest, {"session": "fuzz"}),
            "/close": (ShopRequest, {"session": "fuzz"}),
        },
        ("/health", "/metrics"),
        (
            ("/reset", '{"idx": 1, "session": "NAME"}'),
            ("/step", '{"session": "NAME", "action": "search[tea]"}'),
            ("/step", '{"session": "NAME", "action": "click[buy now]"}'),
            ("/step", '{"idx": 1, "action": "click[back to search]"}'),
            ("/fork", '{"session": "NAME"}'),
            ("/close", '{"session": "NAME"}'),
        ),
    ),
}


_SESSIONS = ("one", "two", "3", "env-7", "..", "a%2Fb", "%00", "\u00e9", "x" * 128, "y" * 3000)


@dataclass(frozen=True)
class Hostile:
    """``data`` to send. ``half``: the request is cut; the connection is closed after a while without reading."""

    data: bytes
    half: bool = False


class Fuzzer:
    """Requests for one server."""

    def __init__(self, surface: Surface, seed: int) -> None:
        self._surface = surface
        self._random = random.Random(seed)
        self._kinds: list[Callable[[], Hostile]] = [self._field] * 6 + [self._broken, self._broken, self._half]
        self._kinds += [self._head, self._size, self._encoding, self._nested]
        self._kinds += [self._state] * 3 if surface.stateful else []

    def next(self) -> Hostile:
        """One request."""
        return self._random.choice(self._kinds)()

    def _route(self) -> tuple[str, type[BaseModel] | None, dict[str, object]]:
        path = self._random.choice(list(self._surface.bodies))
        model, body = self._surface.bodies[path]
        return path, model, body

    def _field(self) -> Hostile:
        path, model, body = self._route()
        names = [*(model.model_fields if model is not None else body), "unknown"]
        parts = {name: json.dumps(value) for name, value in body.items()}
        for name in self._random.sample(names, min(len(names), self._random.randint(1, 3))):
            parts[name] = self._value(parts.get(name))
        text = "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in parts.items()) + "}"
        return Hostile(self._request(path, text.encode()))

    def _value(self, valid: str | None) -> str:
        one = self._random.choice(self._random.choice((_NUMBERS, _NUMBERS, _TEXTS, _OTHERS)))
        if self._random.random() < 0.2:
            return f"[{one}, {self._random.choice(_NUMBERS)}]"
        if valid is not None and self._random.random() < 0.2:
            at = self._random.randrange(len(valid))
            return valid[:at] + self._random.choice(("", '"', "{", "\\", "\x00", "9" * 30)) + valid[at + 1 :]
        return one

    def _broken(self) -> Hostile:
        path, _, body = self._route()
        data = bytearray(json.dumps(body).encode())
        for _ in range(self._random.randint(1, 4)):
            at = self._random.randrange(len(data) + 1)
            data[at : at + self._random.randint(0, 3)] = self._random.randbytes(self._random.randint(0, 4))
        return Hostile(self._request(path, bytes(data)))

    def _nested(self) -> Hostile:
        path, _, body = self._route()
        depth = self._random.choice((90, 150, 300, 3000, 30_000))
        deep = self._random.choice(("[" * depth, "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
        said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        inside = json.dumps({**body, "messages": said})
        outside = json.dumps(body)[:-1] + f', "metadata": {deep}, "evidence": {deep}, "tools": {deep}}}'
        return Hostile(self._request(path, self._random.choice((inside, outside, deep)).encode()))

    def _encoding(self) -> Hostile:
        path, _, body = self._route()
        return Hostile(self._request(path, json.dumps(body).encode(self._random.choice(_ENCODINGS))))

    def _size(self) -> Hostile:
        path, _, body = self._route()
        count = self._random.choice((10_000, 100_000, 400_000))
        filler = self._random.choice(('"' + "x " * count + '"', "[" + "1," * count + "1]", "[" + '"a",' * count + "1]"))
        name = self._random.choice([*body, "messages", "prompt", "tools", "evidence", "stop"])
        text = json.dumps({key: value for key, value in body.items() if key != name})
        separator = "" if text == "{}" else ", "
        return Hostile(self._request(path, f'{text[:-1]}{separator}"{name}": {filler}}}'.encode()))

    def _head(self) -> Hostile:
        path, _, body = self._route()
        path = self._random.choice((path, *self._surface.paths, "/" + "a" * 5000, "/%00", "/..%2f..", "*", "/v1/%ff"))
        data = json.dumps(body).encode()
        headers = self._random.choice(
            (
                ["Content-Length: -1"],
                ["Content-Length: 99999999999999999999"],
                ["Content-Length: 3", "Content-Length: 4"],
                ["Transfer-Encoding: chunked", "Content-Length: 5"],
                ["Transfer-Encoding: chunked"],
                ["Transfer-Encoding: gzip"],
                ["X-Stainless-Retry-Count: " + "9" * 5000],
                ["Idempotency-Key: \xff\xfe"],
                ["Cookie: " + "a" * 7000],
                ["Bad Header: x"],
                ["Expect: 100-continue", f"Content-Length: {len(data)}"],
                ["Upgrade: websocket", "Connection: Upgrade"],
                ["Authorization: Bearer \xff", f"Content-Length: {len(data)}"],
            )
        )
        method = self._random.choice(("POST", *_METHODS))
        version = self._random.choice(("1.1", "1.1", "1.0", "2.0", "x"))
        lines = [f"{method} {path} HTTP/{version}", "Host: localhost", "Connection: close"]
        lines += [f"Content-Type: {self._random.choice(_TYPES)}", *headers]
        # What is announced as chunked and is not has no end: nobody answers it before its time is over.
        endless = any("chunked" in header for header in headers)
        return Hostile("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + data, half=endless)

    def _half(self) -> Hostile:
        path, _, body = self._route()
        whole = self._request(path, json.dumps({**body, "stream": self._random.random() < 0.3}).encode())
        return Hostile(whole[: self._random.randrange(len(whole))], half=True)

    def _state(self) -> Hostile:
        path, body = self._random.choice(self._surface.stateful)
        name = self._random.choice(_SESSIONS[:3] * 4 + _SESSIONS)
        in_path = name if name.isascii() else "%C3%A9"
        return Hostile(self._request(path.replace("NAME", in_path), body.replace("NAME", name).encode()))

    def _request(self, path: str, body: bytes) -> bytes:
        host = self._random.choice(("localhost",) * 12 + ("evil.example", "127.0.0.1:1"))
        kind = self._random.choice(("application/json",) * 12 + _TYPES)
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: {kind}\r\n"
        if self._random.random() < 0.15:
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:]) if part)
            return f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunks + b"0\r\n\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
