"""The oracle behind OpenAI's chat protocol on a loopback port, so that it plays in every host as a model does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Protocol

from openhands_rl_plugin.contrib.repair.oracle import ORACLE, parsed_call
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.messages import text_of
from openhands_rl_plugin.core.types import JsonObject

_MOST_BYTES = 2**22


class AnswerScript(Protocol):
    """What ``RepairOracle`` is, or another script."""

    def answer(self, conversation: Sequence[Mapping[str, str]]) -> str:
        """The next answer of a conversation. Raises ``ConfigError``."""
        ...


@contextmanager
def serve_oracle(oracle: AnswerScript) -> Iterator[str]:
    """The URL of the server, which ends with the block."""

    class Handler(_Handler):
        answers = oracle

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


def _with_call(text: str, number: int) -> JsonObject:
    """The answer for a client with tools: the call in the protocol's own form."""
    name, arguments = parsed_call(text)
    function: JsonObject = {"name": name, "arguments": json.dumps(arguments)}
    call: JsonObject = {"id": f"call-{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class _Handler(BaseHTTPRequestHandler):
    answers: AnswerScript
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The list of models."""
        models = {"object": "list", "data": [{"id": ORACLE, "object": "model"}]}
        self._send(*((200, models) if self.path.endswith("/models") else (404, {"error": {"message": "not found"}})))

    def do_POST(self) -> None:
        """A chat completion; the other routes are not there."""
        length = int(self.headers.get("Content-Length") or 0)
        if not self.path.endswith("/chat/completions") or not 0 < length <= _MOST_BYTES:
            self._send(404, {"error": {"message": "the oracle only answers /v1/chat/completions"}})
            return
        try:
            body = json.loads(self.rfile.read(length))
            told = [{"role": each["role"], "content": text_of(each["content"]) or ""} for each in body["messages"]]
            text = self.answers.answer(told)
            message = _with_call(text, len(told)) if body.get("tools") else {"role": "assistant", "content": text}
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            self._send(400, {"error": {"message": str(error)}})
            return
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        answer = {"id": "oracle", "object": "chat.completion", "created": 0, "model": ORACLE}
        self._send(200, {**answer, "choices": [choice], "usage": usage})

    def _send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""
