"""Completions from a Hugging Face causal LM in this process: the embedded server serves it on the loopback address."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.models.engines.client import OpenAIEngine
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server

_SECONDS = 3600.0  # of a request: a large model on a processor is slow


class TransformersEngine(OpenAIEngine):
    """``protocols.LLMEngine`` on a model in this process, with the embedded server's prompts and tool calls.

    Args:
        model: a directory (or cached hub name), or a model object, whose weights as they are now are served from a
            temporary folder.
        tokenizer: needed with a model object; a directory has its own.
        base_model: name for the records; by default the model's own.
        dtype: as in ``GeneratorConfig``; that of a model object is its own.

    Raises ``ConfigError`` for a tokenizer that does not fit, ``ServingError`` for a model that cannot be loaded.
    """

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast | None = None,
        *,
        base_model: str | None = None,
        dtype: str = "auto",
    ) -> None:
        with ExitStack() as opened:
            if isinstance(model, str | Path):
                folder = name = str(model)
            else:
                if not isinstance(tokenizer, PreTrainedTokenizerFast):
                    raise ConfigError(
                        "TransformersEngine needs a fast tokenizer with a model object: pass tokenizer=..."
                    )
                folder = opened.enter_context(TemporaryDirectory())
                name, dtype = model.name_or_path or type(model).__name__, str(model.dtype).removeprefix("torch.")
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
            given = {"model": folder, "served_model_name": base_model or name, "dtype": dtype}
            config = ServerConfig.model_validate({**given, "port": 0, "api_key_env": ""})
            url = opened.enter_context(running_server(config))
            super().__init__(config.base_name, f"{url}/v1", timeout=_SECONDS)
            self._opened = opened.pop_all()

    async def aclose(self) -> None:
        """Stop the server."""
        await super().aclose()
        await asyncio.to_thread(self._opened.close)
