"""The kinds of servers that adapters are published to, behind one protocol.

A kind is a class; ``open_server`` chooses it by name, or by ``owned_by`` in the answer of ``/v1/models``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic_core import from_json

from openhands_rl_plugin.core.errors import PublishError
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.adapter_config import CONFIG_FILE
from openhands_rl_plugin.models.engines.client import Connections, HttpUpstream, ServerError, close_connections
from openhands_rl_plugin.models.engines.server_models import ListedModel, ListedModels

_LONGEST_CAUSE = 300
_AWAY = frozenset({429, 502, 503, 504})
_NOT_FOUND = 404


class RefusedByServer(PublishError):
    """The answer's status was no success. ``text``: the beginning of its body."""

    def __init__(self, what: str, status: int, text: str) -> None:
        super().__init__(f"{what}: HTTP {status} {text}")
        self.status, self.text = status, text


class Connection:
    """Requests below ``base_url``, which may end in ``/v1`` or not. ``timeout`` is in seconds a request.

    Every request raises ``PublishError``, whose ``__cause__`` is a ``ServerError`` where nobody answered, or a status
    says that the server is away or too busy: both may pass.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float = 120.0) -> None:
        parts = urlsplit(base_url)
        self.root = parts._replace(path=parts.path.rstrip("/").removesuffix("/v1")).geturl().rstrip("/")
        self._connections: Connections = {}
        self._server = HttpUpstream(self.root, api_key, timeout, connections=self._connections)

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        await close_connections(self._connections)

    async def ask[T](self, path: str, body: Mapping[str, object] | None, pick: Callable[[Any], T], what: str) -> T:
        """What ``pick`` takes from the JSON of an answer; ``GET`` without a body. ``what`` says what is wrong where
        there is no such answer."""
        answer = await self.send(path, body, what)
        try:
            return pick(from_json(answer))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise PublishError(f"{what}: {self.root}/{path} answered something else than expected") from error

    async def send(self, path: str, body: Mapping[str, object] | None, what: str) -> bytes:
        """The body of an answer. Raises ``RefusedByServer`` for a status of no success."""
        try:
            return await self._server.ask(path, body)
        except ServerError as error:
            if error.headers is None:
                raise PublishError(
                    f"nothing answers at {self.root} ({error}): start the server, for example with "
                    "`openhands-rl serve`, or set base_url in [rl.serving]"
                ) from error
            text = " ".join(error.body[:_LONGEST_CAUSE].decode("utf-8", "replace").split())
            raise RefusedByServer(what, error.status, text) from error if error.status in _AWAY else None


def is_checkpoint(adapter: Adapter) -> bool:
    """Whether a version is a full checkpoint, and no adapter."""
    path = Path(adapter.path)
    return (path / "config.json").is_file() and not (path / CONFIG_FILE).exists()


ServerKind = Literal["auto", "embedded", "vllm", "sglang"]


async def prompt_logprobs(http: Connection, model: str, token_ids: Sequence[int]) -> list[float | None]:
    """``prompt_logprobs`` of a completion of one token: those of ids 1 .. T-1; ``None`` where there is none.

    A server that cuts a prompt short gives fewer. Raises ``PublishError``.
    """
    body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}

    def pick(answer: Any) -> list[float | None]:
        entries = answer["choices"][0]["prompt_logprobs"][1:]
        found = [(entry or {}).get(str(token)) for entry, token in zip(entries, token_ids[1:], strict=False)]
        values = [None if each is None else each["logprob"] for each in found]
        return [each if each is not None and math.isfinite(each) else None for each in values]

    return await http.ask("v1/completions", body, pick, f"{model} cannot be probed at {http.root}")


class AdapterServer:
    """A server with adapters: vLLM, started with ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True``.

    It loads more adapters than fit into a batch: it evicts the least recently used ones and reads them again. Every
    method raises ``PublishError``.
    """

    _HINT: ClassVar[str] = "; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"

    def __init__(self, connection: Connection) -> None:
        self._http = connection
        self.url = connection.root

    async def loaded(self) -> Mapping[str, str]:
        """The loaded adapters: name -> the path that each was loaded from. Models with a parent are adapters."""
        return {card.id: card.root or "" for card in (await _cards(self._http)).data if card.parent is not None}

    async def served_model(self, name: str) -> str:
        """The ``model`` of a completion request that is to be sampled with the adapter."""
        return name

    async def _base(self) -> ListedModel:
        bases = (await _cards(self._http)).bases
        if len(bases) != 1:
            raise PublishError(f"{self.url} serves {len(bases)} base models, not one")
        return bases[0]

    async def load(self, adapter: Adapter) -> None:
        """Serve ``adapter`` under its name: ``POST /v1/load_lora_adapter``."""
        body = {"lora_name": adapter.name, "lora_path": adapter.path}
        try:
            await self._http.send("v1/load_lora_adapter", body, f"the server at {self.url} refused {adapter.name}")
        except RefusedByServer as error:
            if error.status == _NOT_FOUND and adapter.name not in error.text:  # there is no such route
                raise PublishError(f"{error}{self._HINT}") from error
            raise

    async def unload(self, name: str) -> None:
        """Stop serving it once its requests in flight have ended. One that is not loaded is no error."""
        try:
            what = f"{name} was not unloaded from {self.url}"
            await self._http.send("v1/unload_lora_adapter", {"lora_name": name}, what)
        except RefusedByServer as error:
            if error.status != _NOT_FOUND:
                raise

    async def logprobs(self, name: str, token_ids: Sequence[int]) -> list[float]:
        """Those of ids 1 .. T-1, each given the ids before it, under the adapter."""
        found = await prompt_logprobs(self._http, name, token_ids)
        if None in found or len(found) != len(token_ids) - 1:
            raise PublishError(f"{name} at {self.url}: its prompt_logprobs are not those of the prompt")
        return [each for each in found if each is not None]


class EmbeddedServer(AdapterServer):
    """``openhands-rl serve``: vLLM's routes. It refuses more than ``--max-adapters``, which it does not report.

    A full checkpoint takes the place of the weights that it serves, which unloading puts back.
    """

    NAME: ClassVar[str] = "`openhands-rl serve`"
    _HINT: ClassVar[str] = ""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._before = "", "", ""

    async def loaded(self) -> Mapping[str, str]:
        """The loaded adapters, and the weights that are served without one."""
        return {card.id: card.root or "" for card in (await _cards(self._http)).data}

    async def load(self, adapter: Adapter) -> None:
        """Serve an adapter under its name, or replace the weights by a full checkpoint."""
        if not is_checkpoint(adapter):
            return await super().load(adapter)
        base = await self._base()
        self._before = adapter.name, base.id, base.root or ""
        await self.replace_weights(adapter.name, adapter.path)

    async def unload(self, name: str) -> None:
        """Of a full checkpoint, serve what the last one that was loaded took the place of."""
        loaded, before, path = self._before
        if name != loaded:
            return await super().unload(name)
        try:
            if (await self.loaded()).get(before) != path:
                await self.replace_weights(before, path)
        except PublishError as error:
            raise PublishError(
                f"the former weights {before} could not be put back ({error}), so what {self.url} serves now was not "
                f"accepted: restart it (`openhands-rl serve --model {path}`), then start the same command again"
            ) from error

    async def replace_weights(self, name: str, path: str) -> None:
        """Serve the model in ``path`` as ``name``, instead of the weights that are served."""
        body = {"model_path": path, "weight_version": name}
        await self._http.send("update_weights_from_disk", body, f"the server at {self.url} refused {name}")

    async def require_no_adapters(self) -> None:
        """Raise ``PublishError`` where adapters are loaded, which fit the present weights only."""
        if held := sorted(await super().loaded()):
            raise PublishError(
                f"{self.url} holds adapters ({', '.join(held[:3])}), which fit its present weights only: "
                "unload them, or start a server for this run"
            )


class SGLangServer(AdapterServer):
    """SGLang, started with ``--enable-lora --max-lora-rank N --lora-target-modules all``.

    It refuses more adapters than its ``--max-loaded-loras``.
    """

    async def load(self, adapter: Adapter) -> None:
        """``POST /load_lora_adapter``, unpinned: a pinned adapter holds a place in every batch."""
        body: dict[str, object] = {"lora_name": adapter.name, "lora_path": adapter.path, "pinned": False}
        await self._update("load_lora_adapter", body, f"the server at {self.url} refused {adapter.name}")

    async def unload(self, name: str) -> None:
        """``POST /unload_lora_adapter``. It has no status of its own for a name that is not loaded."""
        try:
            await self._update("unload_lora_adapter", {"lora_name": name}, f"{name} was not unloaded from {self.url}")
        except PublishError:
            if name in await self.loaded():
                raise

    async def logprobs(self, name: str, token_ids: Sequence[int]) -> list[float]:
        """``input_token_logprobs`` of ``POST /generate``."""
        body: dict[str, object] = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "lora_path": name,
        }

        def pick(answer: Any) -> list[float]:
            found = answer["meta_info"]["input_token_logprobs"][1:]  # the first token has none
            if [token for _, token, _ in found] != list(token_ids[1:]):
                raise ValueError("it has other tokens")
            return [float(logprob) for logprob, _, _ in found]

        return await self._http.ask("generate", body, pick, f"{name} cannot be probed at {self.url}")

    async def served_model(self, name: str) -> str:
        """``BASE:ADAPTER``. SGLang answers with the base model, and no error, for the adapter's name alone."""
        base = (await self._base()).id
        if ":" in base:
            raise PublishError(
                f"SGLang at {self.url} cannot be asked for {name}: give it one base model without ':' in its name, "
                "with --served-model-name"
            )
        return f"{base}:{name}"

    async def _update(self, path: str, body: Mapping[str, object], what: str) -> None:
        if problem := await self._http.ask(path, body, lambda it: not it["success"] and f"{it['error_message']}", what):
            raise PublishError(f"{what}: {problem}")


_KINDS: Mapping[str, type[AdapterServer]] = {"embedded": EmbeddedServer, "vllm": AdapterServer, "sglang": SGLangServer}
# ``owned_by`` of the models that each kind lists.
_OWNERS = {"openhands_rl_plugin": "embedded", "vllm": "vllm", "sglang": "sglang"}


async def open_server(connection: Connection, kind: ServerKind = "auto") -> AdapterServer:
    """The server behind a connection. Raises ``PublishError`` for one of no known kind."""
    if kind != "auto":
        return _KINDS[kind](connection)
    owners = {card.owned_by or "" for card in (await _cards(connection)).bases}
    known = {_OWNERS[owner] for owner in owners if owner in _OWNERS}
    if len(known) != 1:
        listed = ", ".join(repr(owner[:40]) for owner in sorted(owners)) or "no model"
        raise PublishError(
            f'{connection.root} does not say which server it is (owned_by: {listed}): set server = "vllm", "sglang" '
            'or "embedded" in [rl.serving]'
        )
    return _KINDS[known.pop()](connection)


async def _cards(connection: Connection) -> ListedModels:
    what = f"the server at {connection.root} does not list its models"
    return await connection.ask("v1/models", None, ListedModels.model_validate, what)
