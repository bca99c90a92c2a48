"""Publish adapters to running servers: check, load, probe, move the pointer, unload old versions.

An adapter comes into use only after every server's logprobs of the probe text match the trainer's and have moved
from the previous version as the trainer's did. Otherwise it is unloaded from every server that did not have it before,
and the previous version stays in use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.core.errors import ConfigError, PublishError, StorageError
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Adapter, Frozen, Probe
from openhands_rl_plugin.models.adapters.adapter_config import read_adapter_config
from openhands_rl_plugin.models.adapters.servers import (
    AdapterServer,
    Connection,
    EmbeddedServer,
    ServerKind,
    is_checkpoint,
    open_server,
)
from openhands_rl_plugin.models.adapters.store import AdapterStore

_SAME_VERSION = 1e-3
"""Mean nats: versions that are nearer than this by the trainer's own logprobs cannot be distinguished."""
_LEAST_MOVED = 0.25
"""The part of the trainer's change by which a server's logprobs change at least. Rounding adds to both changes: 3 of
18,000 simulated updates of 0 to 0.15 nats, with 0.045 of rounding and 8 to 100 tokens, were refused."""

Older = tuple[str, Sequence[float], Sequence[float]]
"""A version that a server has beside the new one: its name, the trainer's and this server's logprobs of the probe."""


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


# vLLM computes prompt_logprobs without LoRA on these modules, so that no probe could verify them.
_UNVERIFIABLE = frozenset({"lm_head", "embed_tokens"})


def check_servable(adapter: Adapter) -> None:
    """Raise ``PublishError`` unless a server can serve ``adapter`` as it was trained."""
    if is_checkpoint(adapter):
        return
    try:
        config = read_adapter_config(Path(adapter.path))
    except ConfigError as error:
        raise _publish_error(adapter, str(error)) from error
    if refusal := config.refusal():
        raise _publish_error(adapter, refusal)
    targets = {name.rpartition(".")[2] for name in config.layers or ()}
    if found := sorted(targets & _UNVERIFIABLE):
        raise _publish_error(
            adapter, f"an adapter of {', '.join(found)} cannot be verified; leave it out of target_modules"
        )


def _publish_error(adapter: Adapter, cause: str) -> PublishError:
    return PublishError(f"{adapter.name} was not published: {cause}")


log = redacting_logger(__name__)


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

    A version that is a full checkpoint takes the place of the weights of `openhands-rl serve`: one is served at a time,
    and the former name is unknown afterwards.

    A URL may end in ``/v1`` or not. ``keep`` versions of an adapter stay loaded, the newest ones, so that episodes
    which began on an older version can end on it. ``timeout`` is in seconds a request.
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
        if keep < 1:
            raise ValueError("the version in use must stay loaded: keep must be at least 1")
        urls = (base_url,) if isinstance(base_url, str) else tuple(base_url)
        if not urls:
            raise ValueError("there is no server to publish to")
        self._connections = [Connection(url, api_key=api_key, timeout=timeout) for url in urls]
        self._servers: tuple[AdapterServer, ...] = ()
        self._kind: ServerKind = server
        self._store = store
        self._keep = keep

    async def __aenter__(self) -> AdapterPublisher:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            await connection.aclose()

    async def publish(self, adapter: Adapter, probe: Probe | None = None) -> PublishReport:
        """Bring ``adapter`` into use. Raises ``PublishError``; then the version that was in use still is.

        The probe is stored beside the weights and used again when they are published later, for example to a restarted
        server. Without any probe, only the checksum is verified.
        """
        started = time.monotonic()
        async with AsyncExitStack() as undo:
            servers, difference = await self._load_and_probe(adapter, probe, undo)
            self._store.point(adapter)
            undo.pop_all()
        unloaded = await self._retire_older(servers, adapter)
        return PublishReport(
            adapter=adapter.name,
            seconds=time.monotonic() - started,
            difference=difference,
            unloaded=unloaded,
        )

    async def stage(self, adapter: Adapter, probe: Probe | None = None) -> float | None:
        """Load ``adapter`` beside the version in use, which stays that, and check it as ``publish`` does.

        Returns the largest mean absolute difference of a server's logprobs, in nats; ``None`` without any probe. Raises
        ``PublishError``; then it is unloaded wherever it was not before.
        """
        async with AsyncExitStack() as undo:
            _, difference = await self._load_and_probe(adapter, probe, undo)
            undo.pop_all()
        return difference

    async def _load_and_probe(
        self, adapter: Adapter, probe: Probe | None, undo: AsyncExitStack
    ) -> tuple[tuple[AdapterServer, ...], float | None]:
        self._store.verify(adapter)
        check_servable(adapter)
        if probe is not None:
            self._store.keep_probe(adapter, probe)
        probe = probe or self._store.probe(adapter)
        servers = await self._open_servers()
        if is_checkpoint(adapter):
            _taking_checkpoints(servers)
        await _on_all(servers, lambda server: self._load(server, adapter, undo))
        differences = await self._probe_servers(servers, adapter, probe) if probe else []
        return servers, max(differences, default=None)

    async def require_weights(self, base: tuple[str, str] | None = None) -> None:
        """Raise ``PublishError`` for a server that takes no full checkpoints, or holds adapters.

        ``base``: name and path of a base model that is put in place, as it was before anything was published.
        """
        for server in _taking_checkpoints(await self._open_servers()):
            await server.require_no_adapters()
            if base is not None and base[0] not in await server.loaded():
                await server.replace_weights(*base)

    async def retire(self, name: str) -> None:
        """Unload a version; the servers let its requests in flight end first. One that is not loaded is no error."""
        await _on_all(await self._open_servers(), lambda server: server.unload(name))

    async def served_model(self, adapter: Adapter) -> str:
        """The ``model`` of a completion request that is to be sampled with ``adapter``."""
        return await (await self._open_servers())[0].served_model(adapter.name)

    async def loaded(self) -> tuple[tuple[str, frozenset[str]], ...]:
        """The servers, each with the names of the adapters that it serves now."""
        servers = await self._open_servers()
        held = await _on_all(servers, lambda server: server.loaded())
        return tuple((server.url, frozenset(names)) for server, names in zip(servers, held, strict=True))

    async def _open_servers(self) -> tuple[AdapterServer, ...]:
        if not self._servers:
            opened = await _on_all(self._connections, lambda connection: open_server(connection, self._kind))
            self._servers = tuple(opened)
        return self._servers

    async def _retire_older(self, servers: Sequence[AdapterServer], adapter: Adapter) -> tuple[str, ...]:
        """Unload all but the newest ``keep`` versions, whose names are returned."""
        unloaded: set[str] = set()

        async def retire(server: AdapterServer) -> None:
            loaded = await server.loaded()
            versions = self._store.versions(adapter.name.rpartition("-v")[0])
            others = [each.name for each in versions if each.name in loaded and each.name != adapter.name]
            for name in others[: max(0, len(others) - (self._keep - 1))]:
                await server.unload(name)
                unloaded.add(name)

        try:
            await _on_all(servers, retire)
        except PublishError as error:
            # The new version is in use, so this is no reason to refuse it.
            log.warning("%s is in use, but an older version stays loaded: %s", adapter.name, error)
        return tuple(sorted(unloaded))

    async def _load(self, server: AdapterServer, adapter: Adapter, undo: AsyncExitStack) -> None:
        path = (await server.loaded()).get(adapter.name)
        if path == adapter.path and self._store.was_loaded(adapter, server.url):
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
        self._store.note_loaded(adapter, server.url)

    async def _probe_servers(self, servers: Sequence[AdapterServer], adapter: Adapter, probe: Probe) -> list[float]:
        """Each server's mean absolute difference in nats. Raises ``PublishError`` when a server fails the probe."""
        former = self._store.previous_probe(adapter, probe.token_ids)

        async def probe_server(server: AdapterServer) -> float:
            served, older = await server.logprobs(adapter.name, probe.token_ids), None
            if former is not None and former[0] in await server.loaded():
                older = former[0], former[1].logprobs, await server.logprobs(former[0], probe.token_ids)
            return check_served_logprobs(adapter.name, served, probe, older)

        differences = await _on_all(servers, probe_server)
        found = {server.url: each for server, each in zip(servers, differences, strict=True)}
        try:
            self._store.note_probed(adapter, found)
        except StorageError as error:
            log.warning("%s; the version is used all the same", error)
        return differences


def _taking_checkpoints(servers: Sequence[AdapterServer]) -> list[EmbeddedServer]:
    """The servers. Raises ``PublishError`` where one takes adapters only."""
    taking = [server for server in servers if isinstance(server, EmbeddedServer)]
    for server in servers:
        if server not in taking:
            raise PublishError(
                f'{server.url} takes adapters only: [rl.training] method = "full" publishes full checkpoints, which '
                'only `openhands-rl serve` loads from a directory; serve the model with it, or set method = "lora"'
            )
    return taking


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


async def _on_all[S, T](servers: Sequence[S], act: Callable[[S], Awaitable[T]]) -> list[T]:
    """The results of ``act`` on all servers at once; when it raises, every call has ended."""
    ended = await asyncio.gather(*(act(server) for server in servers), return_exceptions=True)
    failures = [each for each in ended if isinstance(each, BaseException)]
    if failures:
        first = failures[0]
        if len(servers) == 1 or not isinstance(first, PublishError):
            raise first
        raise PublishError(f"{len(failures)} of {len(servers)} servers failed: {first}") from first.__cause__
    return [each for each in ended if not isinstance(each, BaseException)]
