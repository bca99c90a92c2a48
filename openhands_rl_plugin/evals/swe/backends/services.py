"""What tests of some repositories expect of a network: httpbin, and addresses that never answer. Both are made in the
sandbox of the tests, which stays without a network.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.environments.workspace.processes import checked
from openhands_rl_plugin.evals.swe.backends.caching import Cache
from openhands_rl_plugin.evals.swe.backends.interpreters import find_uv
from openhands_rl_plugin.evals.swe.backends.sandbox import CONDA, Shown
from openhands_rl_plugin.evals.swe.recipes.base import Recipe

NEEDED_CAPABILITIES = ("NET_ADMIN",)
"""Over the sandbox's own network, until the tests begin."""

_HTTPBIN = ("httpbin==0.10.2", "flask<3.1", "werkzeug<3.1")
_INSIDE = "/opt/httpbin"
_HOSTS = "127.0.0.1 localhost httpbin.org\n::1 localhost\n"


class TestServices:
    """The services of one recipe; without any, commands are left as they are."""

    __test__ = False  # no test class for pytest

    def __init__(self, recipe: Recipe, httpbin: Path | None, hosts: Path) -> None:
        self._addresses = recipe.unreachable
        self._httpbin = httpbin
        self._hosts = hosts

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._addresses or self._httpbin)

    @property
    def shown(self) -> list[Shown]:
        """The files that the sandbox has to show."""
        return [] if self._httpbin is None else [Shown(self._httpbin, _INSIDE), Shown(self._hosts, "/etc/hosts")]

    def around(self, command: Sequence[str]) -> list[str]:
        """The command that runs another beside the services."""
        if not self.any:
            return list(command)
        given = [",".join(self._addresses), _INSIDE if self._httpbin else ""]
        return [f"{CONDA}/host-python", "-IS", f"{CONDA}/shim/network.py", *given, *command]


async def services_of(cache: Cache, recipe: Recipe) -> TestServices:
    """The services of a recipe, installed where they are missing. Raises ``InfrastructureError``."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    place = cache.path("services", f"{_HTTPBIN[0]}-python{version}")

    async def make(into: Path) -> None:
        (into / "hosts").write_text(_HOSTS)
        install = [str(find_uv()), "pip", "install", "--quiet", "--python", sys.executable]
        await checked([*install, "--target", str(into / "httpbin"), *_HTTPBIN], "install httpbin", timeout=600)

    if not recipe.httpbin:
        return TestServices(recipe, None, place / "hosts")
    await cache.made(place, make)
    return TestServices(recipe, place / "httpbin", place / "hosts")
