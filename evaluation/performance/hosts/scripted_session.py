"""A long scripted session, and a server that answers its turns at once with prepared bytes.

python -m evaluation.performance.hosts.scripted_session 30     # prints its base URL
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FIRST_PROMPT = 6_000
LAST_PROMPT = 35_000
SAMPLED = 150
VOCABULARY = 150_000
_OPENING, _ADDED = 2, 2  # messages before the first answer, and what each turn adds


@dataclass(frozen=True)
class Session:
    """A scripted conversation: the prompt of every turn, and the server's answers with and without token ids."""

    prompts: list[list[dict[str, Any]]]
    tools: list[dict[str, Any]]
    bare: list[bytes]
    with_ids: list[bytes]

    @classmethod
    def make(cls, turns: int, seed: int = 0) -> Session:
        """Prompts that grow by about 1,000 tokens a turn, four characters a token."""
        source = random.Random(seed)
        growth = (LAST_PROMPT - FIRST_PROMPT) // max(turns - 1, 1)
        messages = [_text("system", source, FIRST_PROMPT - 100), _text("user", source, 100)]
        ids = _ids(source, FIRST_PROMPT)
        session = cls(prompts=[], tools=[_tool(source, at) for at in range(5)], bare=[], with_ids=[])
        for turn in range(turns):
            answer = _call(source, turn)
            sampled = _ids(source, SAMPLED)
            session.prompts.append(list(messages))
            session.bare.append(_response(turn, answer, len(ids)))
            session.with_ids.append(_response(turn, answer, len(ids), ids, sampled))
            observation = _text("tool", source, growth - SAMPLED)
            messages += [answer, {**observation, "tool_call_id": f"call-{turn}", "name": "execute_bash"}]
            ids = ids + sampled + _ids(source, growth - SAMPLED)
        return session


def _words(source: random.Random, tokens: int) -> str:
    return " ".join(f"{source.randrange(16**3):03x}" for _ in range(tokens))


def _text(role: str, source: random.Random, tokens: int) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": _words(source, tokens)}]}


def _ids(source: random.Random, count: int) -> list[int]:
    return [source.randrange(VOCABULARY) for _ in range(count)]


def _call(source: random.Random, turn: int) -> dict[str, Any]:
    function = {"name": "execute_bash", "arguments": json.dumps({"command": _words(source, SAMPLED - 50)})}
    call = {"id": f"call-{turn}", "type": "function", "function": function}
    return {"role": "assistant", "content": [{"type": "text", "text": _words(source, 40)}], "tool_calls": [call]}


def _tool(source: random.Random, at: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"command": {"type": "string", "description": _words(source, 200)}}}
    function = {"name": f"tool_{at}", "description": _words(source, 300), "parameters": parameters}
    return {"type": "function", "function": function}


def _response(
    turn: int,
    answer: Mapping[str, Any],
    prompt_tokens: int,
    prompt_ids: list[int] | None = None,
    sampled: list[int] | None = None,
) -> bytes:
    message = {**answer, "content": answer["content"][0]["text"]}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "tool_calls", "message": message}
    body: dict[str, Any] = {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": 1,
        "model": "policy-v000001",
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": SAMPLED,
            "total_tokens": prompt_tokens + SAMPLED,
        },
    }
    if prompt_ids is not None and sampled is not None:
        entry = {"token": "abc", "logprob": -0.7312, "bytes": [97, 98, 99], "top_logprobs": []}
        body["prompt_token_ids"] = prompt_ids
        choice["token_ids"] = sampled
        choice["logprobs"] = {"content": [entry] * len(sampled)}
    return json.dumps(body).encode()


def serve(turns: int) -> None:
    """Answer the completions of the session; the number of messages tells the turn."""
    session = Session.make(turns)

    async def answer(request: Request) -> Response:
        body = await request.json()
        answers = session.with_ids if body.get("return_token_ids") else session.bare
        turn = (len(body["messages"]) - _OPENING) // _ADDED
        return Response(answers[turn], media_type="application/json")

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle on
    listener.bind(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", flush=True)
    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


@contextmanager
def session_server(turns: int) -> Iterator[str]:
    """Run the server in a process of its own and yield its base URL."""
    command = [sys.executable, "-m", "evaluation.performance.hosts.scripted_session", str(turns)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
