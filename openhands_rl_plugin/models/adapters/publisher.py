"""Publish adapters to running servers: check, load, probe, move the pointer, unload old versions.

An adapter comes into use only after every server's logprobs of the probe text match the trainer's and have moved
from the previous version as the trainer's did, if there is a probe. Otherwise it is unloaded from every server that did
not have it before, and the previous version stays in use. Clients read the pointer and ask for the new name: the
gateway, ``apps.rl_agent``, and the hosts (``hosts.shared.litellm_calls.adapter_in_use``). A loop asks for its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from pydantic_core import from_json

from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.core.errors import ConfigError, PublishError, StorageError
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Adapter, Frozen, Probe
from openhands_rl_plugin.models.adapters.adapter_config import read_adapter_config
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.client import (
    Connections,
    HttpUpstream,
    ListedModels,
    ServerError,
    close_connections,
)

log = redacting_logger(__name__)

ServerKind = Literal["auto", "embedded", "vllm", "sglang"]
"""``auto``: SGLang where the list of models says so, else a server with vLLM's routes."""


_HINT = "; vLLM needs --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
_LONGEST_CAUSE = 300
_AWAY = frozenset({429, 502, 503, 504})


class RefusedByServer(PublishError):
    """The response's status was no success."""


class ModelServer:
    """A server with adapters: ``openhands-rl serve``, vLLM or SGLang. ``base_url`` may end in ``/v1`` or not.

    ``timeout`` is in seconds a request. Every method raises ``PublishError``, whose ``__cause__`` is a ``ServerError``
    where nobody answered, or a status says that the server is away or too busy: both may pass.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout: float = 120.0, kind: ServerKind = "auto"
    ) -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._kind = kind
        self._connections: Connections = {}
        self._http = HttpUpstream(self.url, api_key, timeout, connections=self._connections)

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await close_connections(self._connections)

    async def ask[T](self, path: str, body: Mapping[str, object] | None, what: str, pick: Callable[[Any], T]) -> T:
        """As ``send``, but returns the part of the response's JSON that ``pick`` selects."""
        answer = await self.send(path, body, what)
        try:
            return pick(from_json(answer))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise PublishError(f"{what}: {self.url}/{path} answered something else than expected") from error

    async def send(self, path: str, body: Mapping[str, object] | None, what: str) -> bytes:
        """The body of the response; ``GET`` without a body. ``what``: the error's first words.

        Raises ``RefusedByServer`` for a status of no success.
        """
        try:
            return await self._http.ask(path, body)
        except ServerError as error:
            if error.headers is None:
                raise PublishError(str(error).removeprefix("Connection error: ")) from error
            text = " ".join(error.body[:_LONGEST_CAUSE].decode("utf-8", "replace").split())
            cause = error if error.status in _AWAY else None
            hint = _HINT if error.status == 404 and "lora" in path else ""
            raise RefusedByServer(f"{what}: HTTP {error.status} {text}{hint}") from cause

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float | None]:
        """``prompt_logprobs`` of a completion of one token: those of ids 1 .. T-1; ``None`` where there is none.

        A server that cuts a prompt short gives fewer.
        """
        body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}

        def pick(answer: Any) -> list[float | None]:
            entries = answer["choices"][0]["prompt_logprobs"][1:]
            found = [(entry or {}).get(str(token)) for entry, token in zip(entries, token_ids[1:], strict=False)]
            values = [None if each is None else each["logprob"] for each in found]
            return [each if each is not None and math.isfinite(each) else None for each in values]

        return await self.ask("v1/completions", body, f"{model} cannot be probed at {self.url}", pick)

    async def models(self) -> ListedModels:
        """The list of models."""
        what = f"the server at {self.url} does not list its models"
        return await self.ask("v1/models", None, what, ListedModels.model_validate)

    async def loaded(self) -> Mapping[str, str]:
        """The loaded adapters: name -> the path that each was loaded from. Models with a parent are adapters."""
        return {card.id: card.root or "" for card in (await self.models()).data if card.parent is not None}

    async def served_model(self, name: str) -> str:
        """The ``model`` of a completion request that is to be sampled with the adapter.

        SGLang's is ``BASE:ADAPTER``: it answers with the base model, and no error, for the adapter's name alone.
        """
        if not await self._is_sglang():
            return name
        bases = [card.id for card in (await self.models()).bases]
        if len(bases) != 1 or ":" in bases[0]:
            raise PublishError(
                f"SGLang at {self.url} cannot be asked for {name}: give it one base model without ':' in its name, "
                "with --served-model-name"
            )
        return f"{bases[0]}:{name}"

    async def load(self, adapter: Adapter) -> None:
        """Serve ``adapter`` under its name; in ``openhands-rl serve`` that is ``Generator.load_adapter``."""
        body = {"lora_name": adapter.name, "lora_path": adapter.path}
        await self.send(await self._route("load"), body, f"the server at {self.url} refused {adapter.name}")

    async def unload(self, name: str) -> None:
        """Stop serving it once its requests in flight have ended. One that is not loaded is no error."""
        try:
            what = f"{name} was not unloaded from {self.url}"
            await self.send(await self._route("unload"), {"lora_name": name}, what)
        except RefusedByServer:
            if name in await self.loaded():
                raise

    async def logprobs(self, name: str, token_ids: Sequence[int]) -> list[float]:
        """Logprobs (nats) of ids 1 .. T-1 under the adapter, each given the ids before it."""
        if await self._is_sglang():
            found = await self._sglang_logprobs(name, token_ids)
        else:
            found = await self.prompt_logprobs(name, token_ids)
        if len(found) != len(token_ids) - 1 or None in found:
            raise PublishError(f"{name} at {self.url}: its prompt_logprobs are not those of the prompt")
        return [each for each in found if each is not None]

    async def _sglang_logprobs(self, name: str, token_ids: Sequence[int]) -> Sequence[float | None]:
        """``input_token_logprobs`` of ``POST /generate``."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": name,
        }

        def pick(answer: Any) -> list[float | None]:
            rows = answer["meta_info"]["input_token_logprobs"][1:]  # the first token has none
            pairs = zip(rows, token_ids[1:], strict=False)
            return [logprob if token == wanted else None for (logprob, token, _), wanted in pairs]

        return await self.ask("generate", body, f"{name} cannot be probed at {self.url}", pick)

    async def _is_sglang(self) -> bool:
        if self._kind == "auto":
            owners = {card.owned_by for card in (await self.models()).bases}
            self._kind = "sglang" if owners == {"sglang"} else "vllm"
        return self._kind == "sglang"

    async def _route(self, action: str) -> str:
        return f"{'' if await self._is_sglang() else 'v1/'}{action}_lora_adapter"


_SAME_VERSION = 1e-3
"""Mean nats: versions that are nearer than this by the trainer's own logprobs cannot be distinguished."""
_LEAST_MOVED = 0.25
"""The part of the trainer's change by which a server's logprobs change at least. Rounding adds to both changes: 3 of
18,000 simulated updates of 0 to 0.15 nats, with 0.045 of rounding and 8 to 100 tokens, were refused."""

Older = tuple[str, Sequence[float], Sequence[float]]
"""An older version on the same server: its name, the trainer's and the server's logprobs of the probe."""


def check_served_logprobs(name: str, served: Sequence[float], probe: Probe, older: Older | None) -> float:
    """The mean absolute difference from the trainer's logprobs, in nats.

    Raises ``PublishError`` when it is above the probe's bound, or when the server still answers as ``older``.
    """
    difference = _mean_distance(served, probe.logprobs)
    if not difference <= probe.max_difference:
        raise PublishError(
            f"{name} was refused: the server's logprobs differ from the trainer's by {difference:.4f} nats on average, "
            f"the bound is {probe.max_difference:.4f}; the version in use stays. Does the server serve the base model "
            "that was trained?"
        )
    if older is not None:
        moved = _mean_distance(probe.logprobs, older[1])
        if moved >= _SAME_VERSION and _mean_distance(served, older[2]) < _LEAST_MOVED * moved:
            raise PublishError(
                f"{name} was refused: the server took it, but still answers as {older[0]} did; the version in use "
                "stays. Does it cache responses by model name, or fall back to another adapter? If nothing else helps, "
                "restart it"
            )
    return difference


def _mean_distance(some: Sequence[float], others: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(some, others, strict=True)) / len(some)


def check_servable(adapter: Adapter) -> None:
    """Raise ``PublishError`` unless a server can serve ``adapter`` as it was trained. A whole model is no adapter."""
    try:
        refusal = read_adapter_config(Path(adapter.path)).refusal()
    except ConfigError as error:
        refusal = str(error)
    if refusal:
        raise PublishError(f"{adapter.name} was not published: {refusal}")


class PublishReport(Frozen):
    """The result of a publication. ``difference``: mean absolute difference of the probe's logprobs, in nats.

    It is the largest of all servers, and ``None`` without a probe. ``unloaded`` versions are no longer served; one that
    could not be unloaded is tried again with the next publication.
    """

    adapter: str
    seconds: float
    difference: float | None
    unloaded: tuple[str, ...]


class AdapterPublisher:
    """Publishes versions of a store to one server, or to several that answer as one: to all of them or to none.

    ``keep`` versions of an adapter stay loaded, the newest ones, so that episodes which began on an older version can
    end on it; the one in use always does. ``api_key``, ``timeout`` and ``server`` are those of ``ModelServer``. Raises
    ``ConfigError`` without a server.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        store: AdapterStore,
        *,
        api_key: str | None = None,
        keep: int = 2,
        timeout: float = 120.0,
        server: ServerKind = "auto",
    ) -> None:
        urls = (base_url,) if isinstance(base_url, str) else base_url
        if not urls:
            raise ConfigError("there is no server to publish to: set [rl.serving] base_url")
        self._servers = [ModelServer(url, api_key=api_key, timeout=timeout, kind=server) for url in urls]
        self._store = store
        self._keep = keep

    async def __aenter__(self) -> AdapterPublisher:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        for server in self._servers:
            await server.aclose()

    async def publish(self, adapter: Adapter, probe: Probe | None = None) -> PublishReport:
        """Bring ``adapter`` into use. Raises ``PublishError``; then the version that was in use still is.

        The probe is stored with the weights and used again when they are published later, for example to a restarted
        server. Without any probe, only the checksum is verified.
        """
        started = time.monotonic()
        async with AsyncExitStack() as undo:
            difference = await self._load_and_probe(adapter, probe, undo)
            self._store.point(adapter)
            undo.pop_all()
        unloaded = await self._retire_older(adapter)
        seconds = time.monotonic() - started
        return PublishReport(adapter=adapter.name, seconds=seconds, difference=difference, unloaded=unloaded)

    async def stage(self, adapter: Adapter, probe: Probe | None = None) -> float | None:
        """Load and check ``adapter`` as ``publish`` does, but keep the version in use.

        Returns the largest mean absolute difference of a server's logprobs, in nats; ``None`` without any probe. Raises
        ``PublishError``; then it is unloaded wherever it was not before.
        """
        async with AsyncExitStack() as undo:
            difference = await self._load_and_probe(adapter, probe, undo)
            undo.pop_all()
        return difference

    async def retire(self, name: str) -> None:
        """Unload a version; the servers let its requests in flight end first. One that is not loaded is no error."""
        await self._on_all(lambda server: server.unload(name))

    async def served_model(self, adapter: Adapter) -> str:
        """The ``model`` of a completion request that is to be sampled with ``adapter``."""
        return await self._servers[0].served_model(adapter.name)

    async def loaded(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """The servers, each with the names of the adapters that it serves now."""
        held = await self._on_all(lambda server: server.loaded())
        return tuple((server.url, frozenset(names)) for server, names in zip(self._servers, held, strict=True))

    async def _load_and_probe(self, adapter: Adapter, probe: Probe | None, undo: AsyncExitStack) -> float | None:
        self._store.verify(adapter)
        check_servable(adapter)
        if probe is not None:
            self._store.keep_probe(adapter, probe)
        probe = probe or self._store.probe(adapter)
        await self._on_all(lambda server: self._load(server, adapter, undo))
        differences = await self._on_all(lambda server: self._probe(server, adapter, probe))
        found = {server.url: each for server, each in zip(self._servers, differences, strict=True)}
        try:
            self._store.note_served(adapter, found)
        except StorageError as error:
            log.warning("%s; the version is used all the same", error)
        return max((each for each in differences if each is not None), default=None)

    async def _load(self, server: ModelServer, adapter: Adapter, undo: AsyncExitStack) -> None:
        path = (await server.loaded()).get(adapter.name)
        if path == adapter.path and server.url in self._store.served_by(adapter):
            return
        if path is not None:
            # Another run's version of the same name, perhaps at the same path, or this one before it was moved.
            await server.unload(adapter.name)

        async def unload() -> None:
            try:
                await server.unload(adapter.name)
            except PublishError as problem:
                log.warning("%s may still be served: %s", adapter.name, problem)

        undo.push_async_callback(unload)  # a failed load may leave the adapter behind too
        await server.load(adapter)

    async def _probe(self, server: ModelServer, adapter: Adapter, probe: Probe | None) -> float | None:
        """The mean absolute difference in nats. Raises ``PublishError`` when the server fails the probe."""
        if probe is None:
            return None
        served, older = await server.logprobs(adapter.name, probe.token_ids), None
        former = self._store.previous_probe(adapter, probe.token_ids)
        if former is not None and former[0] in await server.loaded():
            older = former[0], former[1].logprobs, await server.logprobs(former[0], probe.token_ids)
        return check_served_logprobs(adapter.name, served, probe, older)

    async def _retire_older(self, adapter: Adapter) -> tuple[str, ...]:
        """Unload the versions older than the newest ``keep``; returns the names of the unloaded ones."""
        unloaded: set[str] = set()
        versions = [each.name for each in self._store.versions(adapter.name.rpartition("-v")[0])]

        async def retire(server: ModelServer) -> None:
            loaded = await server.loaded()
            others = [name for name in versions if name in loaded and name != adapter.name]
            for name in others[: max(0, len(others) - (self._keep - 1))]:
                await server.unload(name)
                unloaded.add(name)

        try:
            await self._on_all(retire)
        except PublishError as error:
            # The new version is in use, so this is no reason to refuse it.
            log.warning("%s is in use, but an older version stays loaded: %s", adapter.name, error)
        return tuple(sorted(unloaded))

    async def _on_all[T](self, act: Callable[[ModelServer], Awaitable[T]]) -> list[T]:
        """The results of ``act`` on all servers at once; when it raises, every call has ended."""
        ended = await asyncio.gather(*map(act, self._servers), return_exceptions=True)
        failures = [each for each in ended if isinstance(each, BaseException)]
        if failures:
            first = failures[0]
            if len(ended) == 1 or not isinstance(first, PublishError):
                raise first
            raise PublishError(f"{len(failures)} of {len(ended)} servers failed: {first}") from first.__cause__
        return [each for each in ended if not isinstance(each, BaseException)]


def publisher_for(serving: ServingSettings, store: AdapterStore, *, keep: int | None = None) -> AdapterPublisher:
    """A publisher to all servers of ``[rl.serving]``, with its key, kind and timeout. Raises ``ConfigError``.

    ``keep``: versions that stay loaded; by default one less than ``max_adapters``, so that a new one fits.
    """
    return AdapterPublisher(
        serving.publish_urls,
        store,
        api_key=serving.api_key(),
        keep=max(1, serving.max_adapters - 1) if keep is None else keep,
        timeout=serving.request_timeout,
        server=serving.server,
    )
