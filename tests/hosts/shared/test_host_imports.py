"""A host is imported without looking for garbage, which is a fifth of the seconds that it takes."""

from __future__ import annotations

import gc

import pytest

from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.hosts.shared.episode import HostEpisode
from openhands_rl_plugin.hosts.shared.session_runner import HostSession, SessionHostRunner

SETTINGS = RLSettings(serving=ServingSettings(base_url="http://127.0.0.1:9/v1", model="base"))


class Host(SessionHostRunner):
    collected: bool | None = None
    refused = ""

    def _prepare(self) -> None:
        Host.collected = gc.isenabled()
        if self.refused:
            raise ConfigError(self.refused)

    def _session(self, episode: HostEpisode) -> HostSession:
        raise NotImplementedError


class Refused(Host):
    refused = "no such agent"


async def test_a_host_is_imported_without_collection_and_nothing_else_is() -> None:
    await Host(SETTINGS).close()
    assert Host.collected is False and gc.isenabled()
    with pytest.raises(ConfigError, match="no such agent"):
        Refused(SETTINGS)
    assert gc.isenabled()
    gc.disable()
    try:
        await Host(SETTINGS).close()
        assert not gc.isenabled(), "as it was"
    finally:
        gc.enable()
