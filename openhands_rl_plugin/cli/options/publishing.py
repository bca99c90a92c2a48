"""Bringing an adapter into use on the servers of ``[rl.serving]``, from any command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ValidationError

from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.validation import problems
from openhands_rl_plugin.models.adapters.for_settings import publisher_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from openhands_rl_plugin.core.types import Adapter, Probe
    from openhands_rl_plugin.models.adapters.store import AdapterStore


def publish_servers(serving: ServingSettings, urls: Sequence[str]) -> ServingSettings:
    """``serving`` with these servers instead of its own; an empty URL stands for its own. Raises ``ConfigError``."""
    given = [url for url in urls if url]
    if not given:
        if not serving.publish_urls:
            raise ConfigError("--publish: there is no server to publish to: give its URL, or base_url in [rl.serving]")
        return serving
    try:
        return ServingSettings.model_validate({**serving.model_dump(), "base_urls": given})
    except ValidationError as error:
        lines = (f"--publish {' '.join(given)}: {what}" for _, what in problems(error, ServingSettings))
        raise ConfigError("\n".join(lines)) from error


async def publish(serving: ServingSettings, adapters: AdapterStore, adapter: Adapter, probe: Probe) -> None:
    """Bring a version into use on every server, or on none, and say so. Raises ``PublishError``."""
    async with publisher_for(serving, adapters) as publisher:
        report = await publisher.publish(adapter, probe)
    print(f"{adapter.name} is in use at {', '.join(serving.publish_urls)} after {report.seconds:.1f} s")
