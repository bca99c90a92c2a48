"""A test double of SGLang's wire format: not SGLang, which has no package for processors.

It speaks the routes, field names and status codes of SGLang's HTTP server (``srt/entrypoints/http_server.py`` and
``srt/managers/io_struct.py``) for what publishing needs. The logprobs are real: this project's generation core computes
them with the adapter that was loaded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from openhands_rl_plugin.models.generator.config import ServingError
from openhands_rl_plugin.models.generator.generator import Generator
from openhands_rl_plugin.models.generator.sequence import DecodingParams

BASE = "tiny-base"


@dataclass
class SGLangDouble:
    """The server's state."""

    generator: Generator
    served_name: str = BASE
    adapters: dict[str, str] = field(default_factory=dict)
    loads: int = 0
    answers_as: dict[str, str] = field(default_factory=dict)
    """Adapters that it says it serves, and those whose answers it gives instead."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/load_lora_adapter", self._load, methods=["POST"]),
                Route("/unload_lora_adapter", self._unload, methods=["POST"]),
                Route("/generate", self._generate, methods=["POST"]),
            ]
        )

    async def _models(self, _: Request) -> Response:
        def card(name: str, root: str, parent: str | None) -> dict[str, object]:
            return {"id": name, "object": "model", "owned_by": "sglang", "root": root, "parent": parent}

        cards = [card(self.served_name, self.served_name, None)]
        cards += [card(name, path, self.served_name) for name, path in self.adapters.items()]
        return JSONResponse({"object": "list", "data": cards})

    async def _load(self, request: Request) -> Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        assert set(body) <= {"lora_name", "lora_path", "pinned"}
        if name in self.adapters:
            return self._updated(f"LoRA adapter {name} is already loaded.")
        try:
            await run_in_threadpool(self.generator.load_adapter, name, Path(path))
        except ServingError as error:
            return self._updated(str(error))
        self.adapters[name] = path
        self.loads += 1
        return self._updated()

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self.adapters:
            return self._updated(f"LoRA adapter {name} is not loaded.")
        await run_in_threadpool(self.generator.unload_adapter, name)
        del self.adapters[name]
        return self._updated()

    def _updated(self, error: str | None = None) -> Response:
        body = {"success": error is None, "error_message": error, "loaded_adapters": self.adapters}
        return JSONResponse(body, 200 if error is None else 400)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if body["lora_path"] not in self.adapters:
            return JSONResponse({"error": {"message": "The following requested LoRA adapters are not loaded"}}, 400)
        assert body["return_logprob"] is True
        assert body["logprob_start_len"] == 0
        params = DecodingParams(
            temperature=0.0, max_tokens=body["sampling_params"]["max_new_tokens"], prompt_logprobs=0
        )
        ids = tuple(body["input_ids"])
        adapter = self.answers_as.get(body["lora_path"], body["lora_path"])
        made = await run_in_threadpool(self.generator.generate, ids, params, adapter=adapter)
        seen = [None if each is None else each.logprob for each in made.prompt or ()]
        logprobs = [[logprob, token, None] for logprob, token in zip(seen, ids, strict=True)]
        return JSONResponse({"text": "", "meta_info": {"prompt_tokens": len(ids), "input_token_logprobs": logprobs}})


@contextmanager
def running_sglang(double: SGLangDouble) -> Iterator[str]:
    """Serve it on a free port of the loopback interface; yields the address."""
    server = uvicorn.Server(uvicorn.Config(double.app(), port=0, log_level="warning", lifespan="off", log_config=None))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until = time.monotonic() + 30
        while not server.started and time.monotonic() < until:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
