"""Builds an ``AgentRuntime`` from a ``PolicyConfig``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from openhands_rl_plugin.apps.endpoint.agent import AgentRuntime
from openhands_rl_plugin.apps.endpoint.config import PolicyConfig
from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import PolicyRef
from openhands_rl_plugin.models.engines.openai import OpenAIEngine


@asynccontextmanager
async def opened_runtime(config: PolicyConfig) -> AsyncIterator[AgentRuntime]:
    """A runtime for this event loop; its connections and its store are closed on exit.

    Raises ``ConfigError`` for invalid tools, an invalid template or a missing key, and ``StorageError``.
    """
    async with AsyncExitStack() as stack:
        engine = OpenAIEngine(
            config.model,
            config.base_url,
            base_model=config.base_model or None,
            timeout=config.timeout,
            api_key_env=config.upstream_key_env or None,
        )
        stack.push_async_callback(engine.aclose)
        storage: TrajectoryStorage | None = None
        if config.record:
            opened: TrajectoryStorage = registry.build("storages", "file", {"path": config.record})
            stack.push_async_callback(opened.close)
            storage = opened
        yield AgentRuntime(
            engine,
            policy=PolicyRef.from_served_name(engine.base_model, config.model),
            options=config.options(),
            limits=config.limits(),
            sampling=config.sampling(),
            storage=storage,
            run_id=config.run_id,
        )
