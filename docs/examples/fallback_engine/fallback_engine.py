"""An engine that asks a second server while the first is away.

In ``config.toml``, once the package is installed (``pip install ./docs/examples/fallback_engine``):

    [rl]
    engine = "fallback"

    [rl.engine_options]
    second_url = "http://10.0.0.6:8000/v1"

What the settings know themselves (``model``, ``base_model``, ``base_url``, ``api_key``, ``timeout``) an engine gets by
declaring it in its ``Options``, or as arguments of its constructor.
"""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin import Frozen, Message, OpenAIEngine, SamplingParams
from openhands_rl_plugin.core.errors import InfrastructureError
from openhands_rl_plugin.core.types import Completion, JsonObject


class FallbackOptions(Frozen):
    """``second_url``: of a server with the same weights, so that the records of both are samples of one policy."""

    model: str
    base_model: str = ""
    base_url: str
    api_key: str | None = None
    timeout: float = 120.0
    second_url: str


class FallbackEngine:
    """``complete`` of the first server; of the second one where the first is unreachable or overloaded."""

    Options = FallbackOptions

    def __init__(self, options: FallbackOptions) -> None:
        self._servers = [
            OpenAIEngine(options.model, url, options.api_key, options.base_model or None, options.timeout, retries=1)
            for url in (options.base_url, options.second_url)
        ]

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[JsonObject] = (),
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> list[Completion]:
        """Raises ``InfrastructureError`` when both are away, ``ModelError`` when one refuses the request."""
        first, second = self._servers
        try:
            return await first.complete(messages, tools=tools, n=n, sampling=sampling)
        except InfrastructureError:
            return await second.complete(messages, tools=tools, n=n, sampling=sampling)

    async def aclose(self) -> None:
        """Close the connections."""
        for server in self._servers:
            await server.aclose()
