"""Adapters into a server that is serving: load, probe, move the pointer, drain, unload.

The server speaks vLLM's routes (``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``). An adapter is in use only
after the server's logprobs of a fixed text were found to be the trainer's; otherwise it is unloaded again and the old
one stays.
"""

from __future__ import annotations

import math
import time
from types import TracebackType
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from openhands_rl_plugin.errors import PublishError, describe
from openhands_rl_plugin.serving.adapters import AdapterStore
from openhands_rl_plugin.types import Adapter, Frozen, Probe


class PublishReport(Frozen):
    """How a publication went. ``difference`` is the mean absolute difference of the probe's logprobs, in nats."""

    adapter: str
    seconds: float
    difference: float | None
    unloaded: tuple[str, ...]


class _PromptLogprob(BaseModel):
    model_config = ConfigDict(extra="ignore")
    logprob: float


class _Choice(BaseModel):
    model_config = ConfigDict(extra="ignore")
    prompt_logprobs: list[dict[int, _PromptLogprob] | None]


class _Completion(BaseModel):
    model_config = ConfigDict(extra="ignore")
    choices: list[_Choice]


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore")
    id: str


class _Models(BaseModel):
    model_config = ConfigDict(extra="ignore")
    data: list[_Model]


class AdapterPublisher:
    """Publishes versions of a store to one server.

    ``base_url`` may end in ``/v1`` or not. ``keep`` versions of an adapter stay loaded, the newest ones, so that
    episodes which began on an older version can end on it. ``timeout`` is in seconds a request.
    """

    def __init__(
        self, base_url: str, store: AdapterStore, *, api_key: str | None = None, keep: int = 2, timeout: float = 120.0
    ) -> None:
        if keep < 1:
            raise ValueError("the version in use must stay loaded: keep must be at least 1")
        parts = urlsplit(base_url)
        root = parts._replace(path=parts.path.rstrip("/").removesuffix("/v1")).geturl().rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A plain-text server is on this machine or its network: no proxy, and no time spent on certificates.
        secure = parts.scheme == "https"
        self._client = httpx.AsyncClient(
            base_url=root, headers=headers, timeout=timeout, verify=secure, trust_env=secure
        )
        self._root = root
        self._store = store
        self._keep = keep

    async def __aenter__(self) -> AdapterPublisher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def publish(self, adapter: Adapter, probe: Probe | None = None) -> PublishReport:
        """Bring ``adapter`` into use. Raises ``PublishError``; then the version that was in use still is.

        Without a ``probe`` only the checksum vouches for the weights: for a version that was probed before, after a
        restart of the server.
        """
        started = time.monotonic()
        self._store.verify(adapter)
        if adapter.name not in await self._loaded():
            await self._load(adapter)
        difference = await self._probe(adapter, probe) if probe is not None else None
        self._store.point(adapter)
        unloaded = await self._retire_older(adapter)
        return PublishReport(
            adapter=adapter.name, seconds=time.monotonic() - started, difference=difference, unloaded=unloaded
        )

    async def retire(self, name: str) -> None:
        """Unload a version; the server lets its requests in flight end first. One that is not loaded is no error."""
        response = await self._post("/v1/unload_lora_adapter", {"lora_name": name})
        if response.status_code != httpx.codes.NOT_FOUND:
            self._require(response, f"{name} was not unloaded")

    async def _load(self, adapter: Adapter) -> None:
        response = await self._post("/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": adapter.path})
        self._require(response, f"the server at {self._root} refused {adapter.name}")

    async def _probe(self, adapter: Adapter, probe: Probe) -> float:
        served = await self._served_logprobs(adapter, probe)
        difference = sum(abs(a - b) for a, b in zip(served, probe.logprobs, strict=True)) / len(served)
        if not math.isfinite(difference) or difference > probe.max_difference:
            await self.retire(adapter.name)
            raise PublishError(
                f"{adapter.name} was refused: the server's logprobs differ from the trainer's by {difference:.4f} nats "
                f"on average, the bound is {probe.max_difference:.4f}; the version in use stays. Does the server serve "
                "the base model that was trained?"
            )
        return difference

    async def _served_logprobs(self, adapter: Adapter, probe: Probe) -> list[float]:
        body = {"model": adapter.name, "prompt": list(probe.token_ids), "max_tokens": 1, "prompt_logprobs": 0}
        response = await self._post("/v1/completions", body)
        self._require(response, f"{adapter.name} cannot be probed")
        try:
            entries = _Completion.model_validate_json(response.content).choices[0].prompt_logprobs[1:]
            served = [(entry or {})[token].logprob for entry, token in zip(entries, probe.token_ids[1:], strict=True)]
        except (ValidationError, LookupError, ValueError) as error:
            raise PublishError(
                f"{adapter.name} cannot be probed: the server at {self._root} gives no prompt_logprobs"
            ) from error
        return served

    async def _retire_older(self, adapter: Adapter) -> tuple[str, ...]:
        name = adapter.name.rpartition("-v")[0]
        loaded = await self._loaded()
        mine = [version.name for version in self._store.versions(name) if version.name in loaded]
        others = [each for each in mine if each != adapter.name]
        stale = others[: max(0, len(others) - (self._keep - 1))]
        for each in stale:
            await self.retire(each)
        return tuple(stale)

    async def _loaded(self) -> frozenset[str]:
        try:
            response = await self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise self._away(error) from error
        self._require(response, f"the server at {self._root} does not list its models")
        try:
            return frozenset(model.id for model in _Models.model_validate_json(response.content).data)
        except ValidationError as error:
            raise PublishError(f"{self._root}/v1/models is not an OpenAI-compatible list of models") from error

    async def _post(self, path: str, body: dict[str, object]) -> httpx.Response:
        try:
            return await self._client.post(path, json=body)
        except httpx.HTTPError as error:
            raise self._away(error) from error

    def _away(self, error: httpx.HTTPError) -> PublishError:
        return PublishError(
            f"nothing answers at {self._root} ({describe(error)}): start the server, for example with "
            "`openhands-rl serve`, or set base_url in [rl.serving]"
        )

    @staticmethod
    def _require(response: httpx.Response, what: str) -> None:
        if not response.is_success:
            raise PublishError(f"{what}: HTTP {response.status_code} {response.text[:300]}")
