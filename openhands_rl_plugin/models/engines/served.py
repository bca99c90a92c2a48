"""Engines of the model server of ``[rl.serving]``, one for each served model, closed together."""

from __future__ import annotations

from contextlib import AsyncExitStack

from openhands_rl_plugin.config.build import make_engine
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.protocols import LLMEngine
from openhands_rl_plugin.models.engines.openai import OpenAIEngine


class ServedEngines:
    """``engines(served)`` is the engine of that served model; its connections are kept until ``close``.

    ``token_ids``: whether token ids and logprobs are requested, unless ``[rl.engine_options]`` says so.
    """

    def __init__(self, settings: RLSettings, *, token_ids: bool = True) -> None:
        options = {"token_ids": token_ids, **settings.engine_options}
        self._settings = settings.model_copy(update={"engine": "openai", "engine_options": options})
        self._engines: dict[str, LLMEngine] = {}
        self._open = AsyncExitStack()

    def __call__(self, served: str) -> LLMEngine:
        """Raises ``ConfigError`` for settings that no engine can be made of."""
        if served not in self._engines:
            serving = self._settings.serving
            engine = make_engine(self._settings, model=served, base_model=serving.model, base_url=serving.base_url)
            if isinstance(engine, OpenAIEngine):
                self._open.push_async_callback(engine.aclose)
            self._engines[served] = engine
        return self._engines[served]

    async def close(self) -> None:
        """Close the connections to the model server."""
        await self._open.aclose()
