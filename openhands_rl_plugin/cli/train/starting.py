"""``--from``: the version of an adapter that training goes on from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openhands_rl_plugin.core.errors import ConfigError

if TYPE_CHECKING:
    from openhands_rl_plugin.core.types import Adapter
    from openhands_rl_plugin.models.adapters.store import AdapterStore

LATEST, BASE = "latest", "base"


def starting_point(adapters: AdapterStore, name: str, start: str) -> Adapter | None:
    """The version that training goes on from; ``None`` for the base model. Raises ``ConfigError``."""
    if start == BASE:
        return None
    if start == LATEST:
        return adapters.latest(name)
    found = [each for each in adapters.versions(name) if start in (str(each.version), each.name)]
    if not found:
        known = ", ".join(str(each.version) for each in adapters.versions(name)) or "none"
        raise ConfigError(f"--from {start}: {name} has no such version in {adapters.root}; it has: {known}")
    return found[0]
