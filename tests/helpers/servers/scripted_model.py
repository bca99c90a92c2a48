"""A real HTTP server that speaks OpenAI's chat protocol and answers as a test set it to.

Its tokens are bytes, so that ids are what a real server would give: a message is its role's marker, its text and an
end marker, a prompt is the messages and the assistant's marker, and a later prompt really extends an earlier one when
nothing was rewritten. Every sampled token has the logprob ``-0.5``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MARKERS = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
END = 260
LOGPROB = -0.5


def call(name: str, arguments: object, id: str = "call-1") -> dict[str, Any]:
    """A tool call; arguments that are text are sent as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def reply(text: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    """An assistant message."""
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


EMPTY: dict[str, Any] = {"choices": "none"}


def stopped(text: str, word: str = "</function") -> dict[str, Any]:
    """What a server answers when the stop word ``word`` follows: the tokens have it, the text does not."""
    return {**reply(text), "stop_reason": word}


def with_prompt_ids(answer: dict[str, Any], ids: object) -> dict[str, Any]:
    """The answer, with other prompt ids than the true ones."""
    return {**answer, "prompt_token_ids": ids}


def refusal(status: int, message: str) -> dict[str, Any]:
    """An HTTP error instead of an answer."""
    return {"status": status, "message": message}


Policy = Callable[[dict[str, Any]], dict[str, Any] | Awaitable[dict[str, Any]]]
"""The body of a request -> an assistant message. Needed where requests come side by side, in no order."""


class ScriptedModel:
    """Answers a model's requests with its script, in order, or by its policy; ``requests`` holds what was sent.

    ``prompt_ids``, ``message_ids`` and ``logprob_of`` (a token) may be those of a real model.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.scripts: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
        self.policies: dict[str, Policy] = {}
        self.requests: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.context: int | None = None
        self.adapters: dict[str, str] = {}
        self.cached: int | None = 7
        self.delay = 0.0
        self.at_once = 0
        self.most_at_once = 0
        self.prompt_ids: Callable[[list[dict[str, Any]]], list[int]] = prompt_ids
        self.message_ids: Callable[[dict[str, Any]], list[int]] = message_ids
        self.logprob_of: Callable[[int], float] = lambda token: LOGPROB
        self._count = 0

    def script(self, model: str, answers: Iterable[dict[str, Any]]) -> None:
        """Add answers for the requests that name ``model``."""
        self.scripts[model].extend(answers)

    async def models(self, _: Request) -> JSONResponse:
        """Scripted models with ``context`` tokens, and ``adapters`` (name -> base); 404 without a ``context``."""
        if self.context is None:
            return JSONResponse({}, status_code=404)
        bases = [{"id": name, "parent": None, "max_model_len": self.context} for name in self.scripts]
        return JSONResponse({"data": [*bases, *({"id": name, "parent": of} for name, of in self.adapters.items())]})

    async def answer(self, request: Request) -> Response:
        """The route."""
        body = await request.json()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self.delay)
        self.at_once -= 1
        model = body["model"]
        self.requests[model].append(body)
        if model in self.policies:
            answer = self.policies[model](body)
            if inspect.isawaitable(answer):
                answer = await answer
        elif self.scripts[model]:
            answer = self.scripts[model].popleft()
        else:
            return JSONResponse({"error": {"message": f"no more script for {model}"}}, status_code=400)
        if "status" in answer:
            return JSONResponse({"error": {"message": answer["message"]}}, status_code=answer["status"])
        self._count += 1
        prompt, sampled = self.prompt_ids(body["messages"]), self.message_ids(answer) if "role" in answer else []
        logprobs = [self.logprob_of(token) for token in sampled]
        document = completion(body, answer, f"chatcmpl-{self._count}", prompt, sampled, logprobs)
        if self.cached is None:
            del document["usage"]["prompt_tokens_details"]
        if body.get("stream"):
            return StreamingResponse(chunks(document), media_type="text/event-stream")
        return JSONResponse(document)


def completion(
    body: dict[str, Any], answer: dict[str, Any], id: str, prompt: list[int], sampled: list[int], logprobs: list[float]
) -> dict[str, Any]:
    """The response document, with token ids and logprobs where the request asks for them."""
    message = {key: value for key, value in answer.items() if key not in ("prompt_token_ids", "stop_reason")}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop", "message": message}
    if "stop_reason" in answer:
        choice["stop_reason"] = answer["stop_reason"]
    if body.get("return_token_ids"):
        choice["token_ids"] = sampled
    if body.get("logprobs"):
        about = {"token": "x", "bytes": None, "top_logprobs": []}
        choice["logprobs"] = {"content": [{**about, "logprob": logprob} for logprob in logprobs]}
    return {
        "id": id,
        "object": "chat.completion",
        "created": 1,
        "model": body["model"],
        "choices": [] if answer is EMPTY else [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled),
            "total_tokens": len(prompt) + len(sampled),
            "prompt_tokens_details": {"cached_tokens": 7},
        },
        **({"prompt_token_ids": answer.get("prompt_token_ids", prompt)} if body.get("return_token_ids") else {}),
    }


def chunks(document: dict[str, Any]) -> Iterator[str]:
    """The response document as a stream of server-sent events: text in pieces, then calls, then usage."""
    [choice] = document["choices"]
    message = choice["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant"}]
    for name in ("reasoning_content", "content"):
        text = message.get(name) or ""
        deltas += [{name: text[at : at + 7]} for at in range(0, len(text), 7)]
    for at, one in enumerate(message.get("tool_calls") or ()):
        deltas.append({"tool_calls": [{"index": at, **one}]})
    shared = {**document, "object": "chat.completion.chunk"}
    usage = shared.pop("usage")
    for delta in deltas:
        yield _event({**shared, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    reason = "tool_calls" if message.get("tool_calls") else choice["finish_reason"]
    yield _event({**shared, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    yield _event({**shared, "choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def prompt_ids(messages: list[dict[str, Any]]) -> list[int]:
    """Every message, then the marker after which the assistant goes on."""
    ids: list[int] = []
    for message in messages:
        ids += [MARKERS[message["role"]], *message_ids(message)]
    return [*ids, MARKERS["assistant"]]


def message_ids(message: dict[str, Any]) -> list[int]:
    """Text and tool calls as bytes, then the end marker."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "\n".join(part.get("text", "[image]") for part in content)
    for one in message.get("tool_calls") or ():
        text += f"<{one['function']['name']}>{one['function']['arguments']}"
    if word := message.get("stop_reason"):
        return [*(text + word).encode()]
    return [*text.encode(), END]


@contextmanager
def serve() -> Iterator[ScriptedModel]:
    """The server on a free loopback port, in a thread."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio leaves Nagle on
    listener.bind(("127.0.0.1", 0))
    model = ScriptedModel(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    routes = [
        Route("/v1/chat/completions", model.answer, methods=["POST"]),
        Route("/v1/models", model.models),
    ]
    app = Starlette(routes=routes)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield model
    finally:
        server.should_exit = True
        thread.join()
