"""An OpenAI-compatible server that answers at once from a script in the prompt; for measuring everything but a model.

A script is ``SCRIPT[...]TPIRCS`` with a JSON list of replies in any message: the n-th completion of a conversation is
the n-th reply, and the last one is repeated. A reply is ``{"text": ...}``, ``{"bash": ...}`` (in the tool that is
offered for commands), ``{"think": ...}`` or ``{"finish": ...}``.

    python -m evaluation.performance.hosts.instant_model [--delay 0.0]     # prints its base URL
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Body = dict[str, Any]
"""A part of OpenAI's wire format."""

_SCRIPT = re.compile(r"SCRIPT(\[.*?\])TPIRCS", re.DOTALL)
_LOGPROB = -0.6931471805599453


def script(replies: list[dict[str, str]]) -> str:
    """The text that makes the server give these replies."""
    return f"SCRIPT{json.dumps(replies)}TPIRCS"


@contextmanager
def instant_model(delay: float = 0.0) -> Iterator[str]:
    """Run the server in a process of its own and yield its base URL (``http://127.0.0.1:<port>/v1``)."""
    command = [sys.executable, "-m", "evaluation.performance.hosts.instant_model", "--delay", str(delay)]
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


MODELS = {"object": "list", "data": [{"id": "instant", "object": "model", "owned_by": "evaluation"}]}


class InstantModel:
    """Answers chat completions; ``delay`` is in seconds."""

    def __init__(self, delay: float) -> None:
        self._delay = delay

    async def serve(self) -> None:
        """Listen on a free loopback port and print the base URL."""
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", flush=True)
        await server.serve_forever()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = re.search(r"content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b"{}"
                await asyncio.sleep(self._delay)
                made = MODELS if head.startswith("get ") else completion(json.loads(body))
                answer = json.dumps(made).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
                writer.write(b"content-length: %d\r\n\r\n%s" % (len(answer), answer))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def completion(request: Body) -> Body:
    """The body of an answer, with token ids that extend from turn to turn (one for every four bytes)."""
    messages = request["messages"]
    replies = _replies(messages)
    turn = sum(message["role"] == "assistant" for message in messages)
    offered = [tool["function"]["name"] for tool in request.get("tools") or ()]
    shell = "terminal" if "terminal" in offered else "execute_bash"
    message = _message(replies[min(turn, len(replies) - 1)], turn, shell)
    _, *sampled = _token_ids(message)
    prompt = [*(token for one in messages for token in _token_ids(one)), ord("a")]
    logprobs = {"content": [{"token": "x", "logprob": _LOGPROB, "bytes": None, "top_logprobs": []} for _ in sampled]}
    usage: Body = {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)}
    usage["total_tokens"] = len(prompt) + len(sampled)
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if message["tool_calls"] else "stop",
        "logprobs": logprobs if request.get("logprobs") else None,
        "token_ids": sampled if request.get("return_token_ids") else None,
    }
    return {
        "id": "chatcmpl-instant",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request["model"],
        "choices": [choice],
        "usage": usage,
        "prompt_token_ids": prompt if request.get("return_token_ids") else None,
    }


def _token_ids(message: Body) -> list[int]:
    """The role, one token for every four bytes of text and tool calls, and an end."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    text = _text(message) + "".join(call["name"] + call["arguments"] for call in calls)
    return [ord(message["role"][0]), *text.encode()[::4], 0]


def _text(message: Body) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _replies(messages: list[Body]) -> list[dict[str, str]]:
    for message in messages:
        if (found := _SCRIPT.search(_text(message))) is not None:
            return json.loads(found[1])
    return [{"text": "There is no script in the prompt."}]


def _message(reply: dict[str, str], turn: int, shell: str) -> Body:
    tools = {
        "bash": (shell, "command"),
        "think": ("think", "thought"),
        "finish": ("finish", "message"),
    }
    for kind, (tool, argument) in tools.items():
        if kind in reply:
            arguments = {argument: reply[kind]} | ({"security_risk": "LOW"} if kind == "bash" else {})
            function: Body = {"name": tool, "arguments": json.dumps(arguments)}
            call: Body = {"id": f"call_{turn}", "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
    return {"role": "assistant", "content": reply["text"], "tool_calls": None}


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before every answer")
    asyncio.run(InstantModel(parser.parse_args().delay).serve())


if __name__ == "__main__":
    main()
