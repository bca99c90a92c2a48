"""The kinds of servers that adapters are published to, behind one protocol.

A kind is a class; ``open_server`` chooses it by name, or by ``owned_by`` in the answer of ``/v1/models``.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Protocol
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openhands_rl_plugin.core.errors import PublishError, describe
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS
from openhands_rl_plugin.core.types import Adapter, Frozen
from openhands_rl_plugin.models.engines.server_models import ListedModels

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
        self._timeout = timeout
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
            async with asyncio.timeout(self._timeout):
                return await self._client.request(method, path, json=body)
        except (TimeoutError, httpx.HTTPError) as error:
            raise PublishError(
                f"nothing answers at {self.root} ({describe(error)}): start the server, for example with "
                "`openhands-rl serve`, or set base_url in [rl.serving]"
            ) from error


ServerKind = Literal["auto", "embedded", "vllm", "sglang"]

_SAME = 0.05  # mean nats that rounding moves logprobs of equal requests by, at most

_MAX_LORA = re.compile(r'^vllm:lora_requests_info\{[^}]*\bmax_lora="(\d+)"', re.MULTILINE)


class Capacity(Frozen):
    """The LoRA limits that a server reports; ``None`` for what it does not report. ``targets``: names of modules.

    ``loaded`` bounds the adapters in memory, ``in_batch`` those in one batch: requests for others wait.
    """

    loaded: int | None = None
    in_batch: int | None = None
    rank: int | None = None
    targets: frozenset[str] | None = None


class AdapterServer(Protocol):
    """A server with adapters. Every method raises ``PublishError``."""

    url: str

    async def loaded(self) -> Mapping[str, str]:
        """The loaded adapters: name -> the path that each was loaded from."""
        ...

    async def capacity(self) -> Capacity:
        """The server's LoRA limits."""
        ...

    async def load(self, adapter: Adapter) -> None:
        """Serve ``adapter`` under its name."""
        ...

    async def unload(self, name: str) -> None:
        """Stop serving it once its requests in flight have ended. One that is not loaded is no error."""
        ...

    async def logprobs(self, name: str, token_ids: Sequence[int]) -> list[float]:
        """Those of ids 1 .. T-1, each given the ids before it, under the adapter."""
        ...

    async def unscaled(self, name: str, token_ids: Sequence[int]) -> bool:
        """Whether it is known to report logprobs of temperature 1 for what it samples at another one."""
        ...

    async def served_model(self, name: str) -> str:
        """The ``model`` of a completion request that is to be sampled with the adapter."""
        ...


class _Answer(BaseModel):
    model_config = ConfigDict(extra="ignore")


class _PromptLogprob(_Answer):
    logprob: float


class _Choice(_Answer):
    prompt_logprobs: list[dict[int, _PromptLogprob] | None]


class _TopLogprobs(_Answer):
    top_logprobs: list[dict[str, float]]


class _ChoiceLogprobs(_Answer):
    logprobs: _TopLogprobs


class _Alternatives(_Answer):
    choices: list[_ChoiceLogprobs] = Field(min_length=1)


class _Completion(_Answer):
    choices: list[_Choice] = Field(min_length=1)


class _HTTPServer:
    def __init__(self, connection: Connection) -> None:
        self._http = connection
        self.url = connection.root

    async def loaded(self) -> Mapping[str, str]:
        """``GET /v1/models``: a model with a parent is an adapter."""
        return {card.id: card.root or "" for card in (await _cards(self._http)).data if card.parent is not None}


async def prompt_logprobs(http: Connection, model: str, token_ids: Sequence[int]) -> list[float | None]:
    """``prompt_logprobs`` of a completion of one token: those of ids 1 .. T-1; ``None`` where there is none.

    A server that cuts a prompt short gives fewer. Raises ``PublishError``.
    """
    body = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    what = f"{model} cannot be probed at {http.root}"
    answer = http.read(await http.post("/v1/completions", body), _Completion, what)
    entries = answer.choices[0].prompt_logprobs[1:]
    found = [(entry or {}).get(token) for entry, token in zip(entries, token_ids[1:], strict=False)]
    return [each.logprob if each is not None and math.isfinite(each.logprob) else None for each in found]


class VLLMServer(_HTTPServer):
    """vLLM, started with ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=True``."""

    _HINT: ClassVar[str] = "; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"

    async def capacity(self) -> Capacity:
        """From the metrics, which hold ``max_loras`` after the first LoRA request; the highest rank is not reported.

        vLLM loads more adapters than that: it evicts the least recently used ones and reads them again.
        """
        response = await self._http.get("/metrics")
        found = _MAX_LORA.search(response.text) if response.is_success else None
        return Capacity(in_batch=int(found[1]) if found else None)

    async def load(self, adapter: Adapter) -> None:
        """``POST /v1/load_lora_adapter``."""
        body: dict[str, object] = {"lora_name": adapter.name, "lora_path": adapter.path}
        response = await self._http.post("/v1/load_lora_adapter", body)
        no_route = response.status_code == httpx.codes.NOT_FOUND and adapter.name not in response.text
        hint = self._HINT if no_route else ""
        self._http.require(response, f"the server at {self.url} refused {adapter.name}{hint}")

    async def unload(self, name: str) -> None:
        """``POST /v1/unload_lora_adapter``."""
        response = await self._http.post("/v1/unload_lora_adapter", {"lora_name": name})
        if response.status_code != httpx.codes.NOT_FOUND:
            self._http.require(response, f"{name} was not unloaded from {self.url}")

    async def logprobs(self, name: str, token_ids: Sequence[int]) -> list[float]:
        """``prompt_logprobs`` of a completion of one token."""
        found = await prompt_logprobs(self._http, name, token_ids)
        if None in found or len(found) != len(token_ids) - 1:
            raise PublishError(f"{name} at {self.url}: its prompt_logprobs are not those of the prompt")
        return [each for each in found if each is not None]

    async def unscaled(self, name: str, token_ids: Sequence[int]) -> bool:
        """By the likeliest tokens: only ``--logprobs-mode processed_logprobs`` gives them others at temperature 3."""
        cold, hot = [await self._likeliest(name, token_ids, temperature) for temperature in (1.0, 3.0)]
        return sum(abs(one - other) for one, other in zip(cold, hot, strict=True)) < _SAME * len(cold)

    async def _likeliest(self, name: str, token_ids: Sequence[int], temperature: float) -> list[float]:
        """The largest reported logprob after each of a few beginnings."""
        body: dict[str, object] = {
            "model": name,
            "prompt": [list(token_ids[:length]) for length in range(1, len(token_ids) + 1, len(token_ids) // 8 + 1)],
            "max_tokens": 1,
            "temperature": temperature,
            "top_p": 1.0,
            **NEUTRAL_PARAMETERS,
            "ignore_eos": True,
            "logprobs": 1,
        }
        what = f"the logprobs of {self.url} cannot be checked"
        answer = self._http.read(await self._http.post("/v1/completions", body), _Alternatives, what)
        return [max(choice.logprobs.top_logprobs[0].values()) for choice in answer.choices]

    async def served_model(self, name: str) -> str:
        """The adapter's name."""
        return name


class EmbeddedServer(VLLMServer):
    """``openhands-rl serve``: vLLM's routes. It refuses more than ``--max-adapters``, which it does not report."""

    NAME: ClassVar[str] = "`openhands-rl serve`"
    _HINT: ClassVar[str] = ""

    async def capacity(self) -> Capacity:
        """Not reported."""
        return Capacity()

    async def unscaled(self, name: str, token_ids: Sequence[int]) -> bool:
        """Always."""
        return True

    async def weights(self) -> tuple[str, str]:
        """The name and the path of the weights that are served without an adapter."""
        bases = (await _cards(self._http)).bases
        if len(bases) != 1:
            raise PublishError(f"{self.url} serves {len(bases)} models, not one")
        return bases[0].id, bases[0].root or ""

    async def replace_weights(self, name: str, path: str) -> None:
        """Serve the model in ``path`` as ``name``, instead of the weights that are served."""
        body: dict[str, object] = {"model_path": path, "weight_version": name}
        response = await self._http.post("/update_weights_from_disk", body)
        self._http.require(response, f"the server at {self.url} refused {name}")


class _Update(_Answer):
    success: bool
    error_message: str | None = None


class _ServerInfo(_Answer):
    """``max_lora_rank`` and ``lora_target_modules`` are what the server was started with, or inferred."""

    enable_lora: bool | None = None
    max_loaded_loras: int | None = None
    max_loras_per_batch: int | None = None
    max_lora_rank: int | None = None
    lora_target_modules: frozenset[str] | None = None


class _Meta(_Answer):
    # (logprob, token id, text); the first token has no logprob.
    input_token_logprobs: list[tuple[float | None, int, str | None]]


class _Generated(_Answer):
    meta_info: _Meta


class SGLangServer(_HTTPServer):
    """SGLang, started with ``--enable-lora --max-lora-rank N --lora-target-modules all``."""

    async def capacity(self) -> Capacity:
        """From ``/server_info``, which earlier versions call ``/get_server_info``."""
        response = await self._http.get("/server_info")
        if response.status_code == httpx.codes.NOT_FOUND:
            response = await self._http.get("/get_server_info")
        info = self._http.read(response, _ServerInfo, f"SGLang at {self.url} does not report its options")
        if info.enable_lora is False:
            raise PublishError(
                f"SGLang at {self.url} serves no adapters: start it with --enable-lora --max-lora-rank N "
                "--lora-target-modules all"
            )
        targets = info.lora_target_modules
        return Capacity(
            loaded=info.max_loaded_loras,
            in_batch=info.max_loras_per_batch,
            rank=info.max_lora_rank,
            targets=None if not targets or "all" in targets else targets,
        )

    async def load(self, adapter: Adapter) -> None:
        """``POST /load_lora_adapter``, unpinned: a pinned adapter holds a place in every batch."""
        body: dict[str, object] = {"lora_name": adapter.name, "lora_path": adapter.path, "pinned": False}
        await self._update("/load_lora_adapter", body, f"the server at {self.url} refused {adapter.name}")

    async def unload(self, name: str) -> None:
        """``POST /unload_lora_adapter``. It has no status of its own for a name that is not loaded."""
        try:
            await self._update("/unload_lora_adapter", {"lora_name": name}, f"{name} was not unloaded from {self.url}")
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
        what = f"{name} cannot be probed at {self.url}"
        entries = self._http.read(await self._http.post("/generate", body), _Generated, what).meta_info
        found = entries.input_token_logprobs[1:]
        logprobs = [logprob for logprob, _, _ in found if logprob is not None]
        if [token for _, token, _ in found] != list(token_ids[1:]) or len(logprobs) != len(found):
            raise PublishError(f"{what}: its input_token_logprobs are not those of the prompt")
        return logprobs

    async def unscaled(self, name: str, token_ids: Sequence[int]) -> bool:
        """Not as it is started by default."""
        return False

    async def served_model(self, name: str) -> str:
        """``BASE:ADAPTER``. SGLang answers with the base model, and no error, for the adapter's name alone."""
        bases = (await _cards(self._http)).bases
        if len(bases) != 1 or ":" in bases[0].id:
            raise PublishError(
                f"SGLang at {self.url} cannot be asked for {name}: give it one base model without ':' in its name, "
                "with --served-model-name"
            )
        return f"{bases[0].id}:{name}"

    async def _update(self, path: str, body: dict[str, object], what: str) -> None:
        response = await self._http.post(path, body)
        update = self._http.read(response, _Update, what)
        if not update.success:
            raise PublishError(f"{what}: {update.error_message or 'no reason given'}")


_KINDS: Mapping[str, type[VLLMServer] | type[SGLangServer]] = {
    "embedded": EmbeddedServer,
    "vllm": VLLMServer,
    "sglang": SGLangServer,
}
# ``owned_by`` of the models that each kind lists.
_OWNERS = {"openhands_rl_plugin": "embedded", "vllm": "vllm", "sglang": "sglang"}


async def open_server(connection: Connection, kind: ServerKind = "auto") -> AdapterServer:
    """The server behind a connection. Raises ``PublishError`` when its kind cannot be told."""
    return _KINDS[await _kind(connection) if kind == "auto" else kind](connection)


async def _kind(connection: Connection) -> str:
    bases = (await _cards(connection)).bases
    owners = {card.owned_by or "" for card in bases}
    known = {_OWNERS[owner] for owner in owners if owner in _OWNERS}
    if len(known) != 1:
        listed = ", ".join(repr(owner[:40]) for owner in sorted(owners)) or "no model"
        raise PublishError(
            f'{connection.root} does not say which server it is (owned_by: {listed}): set server = "vllm", "sglang" '
            'or "embedded" in [rl.serving]'
        )
    return known.pop()


async def _cards(connection: Connection) -> ListedModels:
    response = await connection.get("/v1/models")
    return connection.read(response, ListedModels, f"the server at {connection.root} does not list its models")
