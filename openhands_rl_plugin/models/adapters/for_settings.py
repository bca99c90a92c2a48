"""The publisher that a configuration describes, for every command and agent that brings adapters into use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openhands_rl_plugin.config.rl import ServingSettings

if TYPE_CHECKING:
    from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
    from openhands_rl_plugin.models.adapters.store import AdapterStore


def publisher_for(serving: ServingSettings, store: AdapterStore, *, keep: int | None = None) -> AdapterPublisher:
    """All servers of ``serving``, with its key, kind and timeout. Raises ``ConfigError``.

    ``keep``: versions that stay loaded; by default as many as leave room for a new one.
    """
    from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher

    return AdapterPublisher(
        serving.publish_urls,
        store,
        api_key=serving.api_key(),
        keep=max(1, serving.max_adapters - 1) if keep is None else keep,
        timeout=serving.request_timeout,
        server=serving.server,
    )
