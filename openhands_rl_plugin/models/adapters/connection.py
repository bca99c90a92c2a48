"""One server's HTTP for publishing: requests, and every failure as a ``PublishError`` of one line."""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from openhands_rl_plugin.core.errors import PublishError, describe

_LONGEST_CAUSE = 300
_AWAY = frozenset({429, 502, 503, 504})


class Connection:
    """Requests below ``base_url``, which may end in ``/v1`` or not. ``timeout`` is in seconds a request.

    Every request raises ``PublishError``; where nobody answered, its ``__cause__`` is an ``httpx.TransportError``, and
    where a status says that the server is away or too busy, an ``httpx.HTTPStatusError``: both may pass.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float = 120.0) -> None:
        parts = urlsplit(base_url)
        self.root = parts._replace(path=parts.path.rstrip("/").removesuffix("/v1")).geturl().rstrip("/")
        # A plain-text server is on this machine or its network: no proxy, and no time spent on certificates.
        secure = parts.scheme == "https"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            base_url=self.root, headers=headers, timeout=timeout, verify=secure, trust_env=secure
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def get(self, path: str) -> httpx.Response:
        """The answer, whatever its status."""
        return await self._send("GET", path)

    async def post(self, path: str, body: dict[str, object]) -> httpx.Response:
        """The answer, whatever its status."""
        return await self._send("POST", path, body)

    def read[M: BaseModel](self, response: httpx.Response, kind: type[M], what: str) -> M:
        """The body of a successful answer; ``what`` says what is wrong when it is none."""
        self.require(response, what)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError as error:
            path = response.request.url.path
            raise PublishError(f"{what}: {self.root}{path} answered something else than expected") from error

    def require(self, response: httpx.Response, what: str) -> None:
        """Raise unless the status is one of success."""
        if not response.is_success:
            cause = " ".join(response.text[:_LONGEST_CAUSE].split())
            problem = f"{what}: HTTP {response.status_code} {cause}"
            away = response.status_code in _AWAY
            raise PublishError(problem) from (
                httpx.HTTPStatusError(problem, request=response.request, response=response) if away else None
            )

    async def _send(self, method: str, path: str, body: dict[str, object] | None = None) -> httpx.Response:
        try:
            return await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise PublishError(
                f"nothing answers at {self.root} ({describe(error)}): start the server, for example with "
                "`openhands-rl serve`, or set base_url in [rl.serving]"
            ) from error
