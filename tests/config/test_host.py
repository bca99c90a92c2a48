"""Which OpenHands is used: by what is installed, and by ``[rl] host`` where both could."""

from __future__ import annotations

import pytest

from openhands_rl_plugin.config import host
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError

V0, V1 = {"openhands-ai": "1.6.0"}, {"openhands-sdk": "1.58.0", "openhands-tools": "1.58.0"}
V0_WITH_ITS_SDK = {**V0, "openhands-sdk": "1.15.0", "openhands-tools": "1.15.0"}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    installed: dict[str, str] = {}
    monkeypatch.setattr(host, "version_of", installed.get)
    return installed


@pytest.mark.parametrize(
    ("installed", "asked", "used"),
    [
        (V0, "auto", "v0"),
        (V0_WITH_ITS_SDK, "auto", "v0"),
        (V0_WITH_ITS_SDK, "v1", "v1"),
        ({"openhands-ai": "1.11.0", **V1}, "auto", "v1"),
    ],
)
def test_the_host_that_is_used(packages: dict[str, str], installed: dict[str, str], asked, used: str) -> None:
    packages.update(installed)
    assert host.host_of(RLSettings(host=asked)) == used


@pytest.mark.parametrize(
    ("installed", "asked", "expected"),
    [
        ({}, "auto", r"needs openhands-sdk and openhands-tools 1\.15 or newer \(not installed\).*\[sdk\]"),
        (V1, "v0", r"OpenHands V0 needs openhands-ai 1\.6 \(not installed\); in an environment of its own"),
        ({"openhands-sdk": "1.11.0", "openhands-tools": "1.11.0"}, "v1", r"openhands-sdk 1\.11\.0"),
        (V0, "v1", r"in an environment of its own, in a clone of the package: pip install '\.\[sdk\]'"),
    ],
)
def test_a_missing_host_is_reported_with_the_remedy(
    packages: dict[str, str], installed: dict[str, str], asked, expected: str
) -> None:
    packages.update(installed)
    with pytest.raises(ConfigError, match=expected) as refused:
        host.host_of(RLSettings(host=asked))
    assert "\n" not in str(refused.value)


def test_importing_the_agent_of_v1_without_its_sdk_is_one_line(packages: dict[str, str]) -> None:
    packages.update({"openhands-sdk": "1.58.0"})
    with pytest.raises(ImportError, match=r"openhands-tools 1\.15 or newer \(openhands-sdk 1\.58\.0 installed\)"):
        host.need_sdk()
