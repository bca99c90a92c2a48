"""What a session may reach, as a value; importing this starts and loads nothing."""

from __future__ import annotations

from pydantic import Field

from openhands_rl_plugin.core.types import Frozen

PORT = 3128
"""Of the proxy, on the sandbox's own loopback."""

_PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_LOCAL = ("localhost", "127.0.0.1", "::1")


class AllowedNetwork(Frozen):
    """What a session reaches through its proxy, and how much: ``traffic`` bytes, of both directions together. A
    connection ends after ``idle`` seconds without any.

    ``hosts``: ``name``, ``*.name`` (below it), each with ``:port`` for another one than 80 and 443, and never at a
    private address. ``index``: ``host:port`` of the user's package index, at whatever address it is. ``variables``:
    settings of programs in the sandbox.
    """

    hosts: tuple[str, ...]
    index: tuple[str, ...] = ()
    variables: dict[str, str] = Field(default_factory=dict)
    traffic: int = Field(default=8 * 1024**3, ge=1)
    idle: float = Field(default=120.0, gt=0)

    def environment(self) -> dict[str, str]:
        """Variables that lead programs to the proxy; what listens in the sandbox itself needs none."""
        index = {each.rpartition(":")[0].strip("[]") for each in self.index}
        direct = ",".join(name for name in _LOCAL if name not in index)
        ways = {**dict.fromkeys(_PROXY_VARIABLES, f"http://127.0.0.1:{PORT}"), "NO_PROXY": direct, "no_proxy": direct}
        return {**ways, **self.variables}
