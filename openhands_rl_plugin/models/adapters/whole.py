"""Publish whole models: new weights take the place of the served ones, in place.

Only ``openhands-rl serve`` takes them. What vLLM documents for it ("Weight Transfer" on docs.vllm.ai) is NCCL or CUDA
IPC from the trainer's own process, with a server in development mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType

from openhands_rl_plugin.core.errors import PublishError
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher, on_all
from openhands_rl_plugin.models.adapters.servers import AdapterServer, EmbeddedServer

log = redacting_logger(__name__)


class WeightsPublisher(AdapterPublisher):
    """Publishes versions that are whole models. One is served at a time: the former name is unknown afterwards.

    A version comes into use as an adapter does: after the probe, or else the weights that were served before are served
    again, under their name. Where that fails too, ``publish`` says both.
    """

    async def require_servers(self, base: tuple[str, str] | None = None) -> None:
        """Also raises ``PublishError`` for a server of another kind, and puts the ``base`` weights back in place."""

        async def require(server: AdapterServer) -> None:
            embedded = _embedded(server)
            if held := sorted(await embedded.loaded()):
                raise PublishError(
                    f"{embedded.url} holds adapters ({', '.join(held[:3])}), which fit its present weights only: "
                    "unload them, or start a server for this run"
                )
            if base is not None and (await embedded.weights())[0] != base[0]:
                await embedded.replace_weights(*base)

        await on_all(await self._open_servers(), require)

    async def retire(self, name: str) -> None:
        """Nothing to do: a version is replaced by the next one."""

    async def served_model(self, adapter: Adapter) -> str:
        """The version's name."""
        return adapter.name

    def _check(self, adapter: Adapter) -> None:
        if not (Path(adapter.path) / "config.json").is_file():
            raise PublishError(f"{adapter.name} was not published: there is no whole model in {adapter.path}")

    async def _prepare(self, server: AdapterServer, adapter: Adapter) -> None:
        _embedded(server)

    async def _load(self, server: AdapterServer, adapter: Adapter, undo: AsyncExitStack) -> None:
        embedded = _embedded(server)
        before = await embedded.weights()
        if before == (adapter.name, adapter.path) and self._store.was_loaded(adapter, server.url):
            return

        async def put_back(
            kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            await _put_back(embedded, *before, error)

        undo.push_async_exit(put_back)
        await embedded.replace_weights(adapter.name, adapter.path)
        self._store.note_loaded(adapter, server.url)

    async def _retire_older(
        self, servers: Sequence[AdapterServer], adapter: Adapter
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), ()


def _embedded(server: AdapterServer) -> EmbeddedServer:
    if isinstance(server, EmbeddedServer):
        return server
    raise PublishError(
        f'{server.url} takes adapters only: [rl.training] method = "full" publishes whole models, which only '
        '`openhands-rl serve` loads from a directory; serve the model with it, or set method = "lora"'
    )


async def _put_back(server: EmbeddedServer, name: str, path: str, why: BaseException | None) -> None:
    """Serve the former weights again. Raises ``PublishError`` where that fails after ``why``, another one."""
    try:
        await server.replace_weights(name, path)
    except PublishError as error:
        with suppress(PublishError):
            if await server.weights() == (name, path):
                return  # they were never replaced
        told = (
            f"the former weights {name} could not be put back ({error}), so what {server.url} serves now was not "
            f"accepted: restart it (`openhands-rl serve --model {path}`), then start the same command again"
        )
        if isinstance(why, PublishError):
            raise PublishError(f"{told}. It was not accepted because {why}") from error
        log.error("%s", told)
