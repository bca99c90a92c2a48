"""A server with vLLM's ``/inference/v1/generate``, from ids to ids, whose answers a test's policy writes as text.

Ids are those of a tokenizer on the disk, as the renderer of verifiers' client makes them. The logprob of a token
follows from its id, so that a test can check whether it stayed with its token.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tiny_model import write_tokenizer
from tokenizers import AddedToken
from transformers import AutoTokenizer

Policy = Callable[[str, int], str]
"""The prompt's text and how many answers are in it -> what the model says next, without the end of its turn."""

ASSISTANT, END = "<|im_start|>assistant\n", "<|im_end|>"
# What the renderer ``qwen3`` looks for in a tokenizer.
_TOKENS = ("<|endoftext|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def write_qwen_tokenizer(path: Path) -> Path:
    """A small tokenizer with Qwen3's marks."""
    tokenizer = write_tokenizer(path)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in _TOKENS])
    tokenizer.save_pretrained(path)
    return path


def logprob_of(token: int) -> float:
    """Two decimals: verifiers rounds what it saves to four."""
    return -(1 + token % 64) / 100


class GenerateServer:
    """``requests`` holds what was asked."""

    def __init__(self, url: str, tokenizer: Path, policy: Policy) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.policy = policy
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    async def generate(self, request: Request) -> JSONResponse:
        """The route."""
        body = await request.json()
        self.requests.append(body)
        text = self.tokenizer.decode(body["token_ids"])
        answer = self.policy(text, text.count(ASSISTANT) - 1) + END
        ids = self.tokenizer.encode(answer, add_special_tokens=False)
        content = [{"token": f"token_id:{each}", "logprob": logprob_of(each)} for each in ids]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": "stop"}
        return JSONResponse({"request_id": str(len(self.requests)), "choices": [choice]})

    async def models(self, _: Request) -> JSONResponse:
        """Nothing that an agent could ask for."""
        return JSONResponse({"object": "list", "data": [{"id": "policy", "object": "model"}]})


@contextmanager
def serve_generate(tokenizer: Path, policy: Policy) -> Iterator[GenerateServer]:
    """The server on a free loopback port, in a thread."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    model = GenerateServer(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", tokenizer, policy)
    routes = [Route("/inference/v1/generate", model.generate, methods=["POST"]), Route("/v1/models", model.models)]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error", log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield model
    finally:
        server.should_exit = True
        thread.join()
