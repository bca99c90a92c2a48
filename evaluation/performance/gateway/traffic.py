"""Sessions of 30 turns with prompts of 6,000 to 35,000 tokens: the same bytes for every gateway, and a model server.

    python evaluation/performance/gateway/traffic.py     # serves the answers and prints its port

The answers are made beforehand, so the server costs next to nothing. It knows the turn by a mark in the last message.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from typing import Any

TURNS = 30
FIRST_PROMPT, NEW_TOKENS, SAMPLED = 6000, 700, 300
MODEL = "policy"

_VOCABULARY = 150_000
_MARK = b"TURN "
_SENTENCE = "the file has a test that fails when path is None so return early and run it once more with care"
_WORDS = tuple(_SENTENCE.split())


def requests() -> list[bytes]:
    """The body of each turn's request: about 13 KB to 108 KB."""
    source = random.Random(1)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _text(source, 8000)},
        {"role": "user", "content": _text(source, 4600) + " TURN 0."},
    ]
    bodies = []
    for turn in range(TURNS):
        bodies.append(_compact({"model": MODEL, "messages": messages, "temperature": 1.0, "max_tokens": 1024}))
        observation = {
            "role": "tool",
            "tool_call_id": f"call_{turn}",
            "content": f"{_text(source, 2000)} TURN {turn + 1}.",
        }
        messages = [*messages, _message(turn), observation]
    return bodies


def answers() -> list[bytes]:
    """The body of each turn's answer, about 75 KB to 280 KB: every prompt goes on where the one before ended."""
    source = random.Random(2)
    prompt = [source.randrange(_VOCABULARY) for _ in range(FIRST_PROMPT)]
    bodies = []
    for turn in range(TURNS):
        sampled = [source.randrange(_VOCABULARY) for _ in range(SAMPLED)]
        logprobs = [
            {"token": f"token_{each}", "logprob": -source.random(), "bytes": [116, 111, 107], "top_logprobs": []}
            for each in sampled
        ]
        choice = {
            "index": 0,
            "message": _message(turn),
            "logprobs": {"content": logprobs},
            "finish_reason": "tool_calls",
            "stop_reason": None,
            "token_ids": sampled,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": SAMPLED, "total_tokens": len(prompt) + SAMPLED}
        answer = {"id": f"chatcmpl-{turn}", "object": "chat.completion", "created": 1, "model": MODEL}
        bodies.append(_compact({**answer, "choices": [choice], "usage": usage, "prompt_token_ids": prompt}))
        prompt = prompt + sampled + [source.randrange(_VOCABULARY) for _ in range(NEW_TOKENS)]
    return bodies


def _message(turn: int) -> dict[str, Any]:
    source = random.Random(turn)
    arguments = json.dumps({"command": _text(source, 700), "security_risk": "LOW"})
    call = {"id": f"call_{turn}", "type": "function", "function": {"name": "execute_bash", "arguments": arguments}}
    return {"role": "assistant", "content": _text(source, 350), "tool_calls": [call]}


def _text(source: random.Random, length: int) -> str:
    return " ".join(source.choices(_WORDS, k=length // 4))[:length]


def _compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Upstream:
    """Answers chat completions at once, and every other request with the list of models."""

    def __init__(self, bodies: Sequence[bytes]) -> None:
        self._responses = [_response(body) for body in bodies]
        self._models = _response(_compact({"object": "list", "data": [{"id": MODEL, "object": "model"}]}))

    async def serve(self) -> None:
        """Listen on a free loopback port and print it."""
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0, limit=2**20)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = re.search(rb"content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                at = body.rfind(_MARK)
                turn = int(body[at + len(_MARK) : body.index(b".", at)]) if at >= 0 else None
                writer.write(self._models if turn is None else self._responses[turn])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def _response(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


if __name__ == "__main__":
    asyncio.run(Upstream(answers()).serve())
