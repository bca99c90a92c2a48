"""Choosing a version of an adapter, and bringing it into use on the servers of ``[rl.serving]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.fields import checked
from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.models.adapters.publisher import publisher_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from openhands_rl_plugin.core.types import Adapter
    from openhands_rl_plugin.models.adapters.store import AdapterStore

LATEST, BASE = "latest", "base"


def find_version(adapters: AdapterStore, name: str, wanted: str, option: str) -> Adapter:
    """The version that ``option`` names: a number, a name or ``latest``. Raises ``ConfigError``."""
    versions = adapters.versions(name)
    found = versions[-1:] if wanted == LATEST else [one for one in versions if wanted in (str(one.version), one.name)]
    if not found:
        known = ", ".join(str(each.version) for each in versions) or "none"
        raise ConfigError(f"{option} {wanted}: {name} has no such version in {adapters.root}; available: {known}")
    return found[0]


def starting_point(adapters: AdapterStore, name: str, start: str) -> Adapter | None:
    """The version ``--from`` names, which training continues; ``None`` for the base model. Raises ``ConfigError``."""
    if start == BASE or (start == LATEST and not adapters.versions(name)):
        return None
    return find_version(adapters, name, start, "--from")


def publish_servers(serving: ServingSettings, urls: Sequence[str]) -> ServingSettings:
    """``serving`` with these servers instead of its own; an empty URL stands for its own. Raises ``ConfigError``."""
    given = [url for url in urls if url]
    if not given:
        if not serving.publish_urls:
            raise ConfigError("--publish: there is no server to publish to: give its URL, or base_url in [rl.serving]")
        return serving
    names = {"base_urls": f"--publish {' '.join(given)}"}
    return checked(ServingSettings, {**serving.model_dump(), "base_urls": given}, names)


async def publish(serving: ServingSettings, adapters: AdapterStore, adapter: Adapter) -> None:
    """Bring a version into use on every server, or on none, and print that. Raises ``PublishError``."""
    async with publisher_for(serving, adapters) as publisher:
        report = await publisher.publish(adapter)
    print(f"{adapter.name} is in use at {', '.join(serving.publish_urls)} after {report.seconds:.1f} s")
