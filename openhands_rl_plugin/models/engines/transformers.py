"""Completions from a Hugging Face causal LM in this process: the embedded server serves it on the loopback address."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from openhands_rl_plugin.models.engines.client import OpenAIEngine
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server

_SECONDS = 3600.0  # of a request: a large model on a processor is slow


class TransformersEngine(OpenAIEngine):
    """``protocols.LLMEngine`` on a model in this process, with the embedded server's prompts and tool calls.

    Args:
        model: a directory, or a cached hub name. A model object is saved by ``save_pretrained`` first.
        base_model: name for the records; by default the model's own.
        dtype: as in ``GeneratorConfig``.

    Raises ``ServingError`` for a model that cannot be loaded.
    """

    def __init__(self, model: str | Path, *, base_model: str | None = None, dtype: str = "auto") -> None:
        given = {"model": str(model), "served_model_name": base_model or str(model), "dtype": dtype}
        config = ServerConfig.model_validate({**given, "port": 0, "api_key_env": ""})
        with ExitStack() as opened:
            url = opened.enter_context(running_server(config))
            super().__init__(config.base_name, f"{url}/v1", timeout=_SECONDS)
            self._opened = opened.pop_all()

    async def aclose(self) -> None:
        """Stop the server."""
        await super().aclose()
        await asyncio.to_thread(self._opened.close)
