"""Training on a server of the Tinker API: ``[rl.tinker]``, and the service by its own client.

The client (the package ``tinker``) is imported here only. It repeats requests that a server did not take for at most
five minutes; every response is waited for at most ``[rl.tinker] timeout``.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import httpx
from pydantic import Field, model_validator

from openhands_rl_plugin.config.fields import HttpUrl, Settings, VariableName
from openhands_rl_plugin.contrib.trainers.rows import DatumRow
from openhands_rl_plugin.core.errors import ConfigError, RLError, TrainingError, describe
from openhands_rl_plugin.core.servers import is_loopback
from openhands_rl_plugin.training.packages import check_package

HOSTED = "https://tinker.thinkingmachines.dev/services/tinker-prod"
"""The address of the hosted service, as its own client has it."""


class TinkerSettings(Settings):
    """``[rl.tinker]``: the address of a server of the Tinker API, its base model, and how it adds up a batch."""

    base_url: HttpUrl = Field(default="", description="server of the Tinker API; empty: the hosted service")
    model: str = Field(default="", description="the base model by its name there; empty: [rl.serving] model")
    api_key_env: VariableName = Field(
        default="TINKER_API_KEY", description="NAME of the environment variable with the service's key"
    )
    reduction: Literal["sum", "sequence-mean"] = Field(
        default="sum",
        description="how the server reduces token losses; sequence-mean: SkyRL's JAX back end; checked at the start",
    )
    timeout: float = Field(default=900.0, gt=0, description="seconds for one answer of the service")

    @model_validator(mode="after")
    def _no_key_in_the_clear(self) -> Self:
        parts = urlsplit(self.base_url)
        if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ValueError(
                "base_url: http:// would send key and data in the clear to another machine; use https:// or a tunnel "
                "to 127.0.0.1"
            )
        return self

    @property
    def address(self) -> str:
        """Of the server, without a slash at the end."""
        return self.base_url or HOSTED

    def api_key(self, environ: Mapping[str, str] | None = None) -> str | None:
        """The key, ``None`` where a server of one's own needs none. Raises ``ConfigError`` for the hosted service."""
        if key := (os.environ if environ is None else environ).get(self.api_key_env):
            return key
        if self.base_url:
            return None
        raise ConfigError(
            f"[rl.tinker] api_key_env: the environment variable {self.api_key_env} is not set; export it, or set "
            "base_url to a server of your own"
        )


_TRIES = 3
_KEYLESS = "tml-none"
"""What the client sends where a server wants no key; it refuses to send nothing."""


@dataclass(frozen=True)
class StepOptions:
    """Of one step of AdamW. ``epsilon`` is added to the root of the second moment; ``max_grad_norm`` 0: no clipping."""

    learning_rate: float
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8


@dataclass(frozen=True)
class NewAdapter:
    """What a fresh adapter is made of. The service itself knows groups of layers only."""

    base_model: str
    rank: int
    seed: int
    attention: bool
    mlp: bool


class TinkerService:
    """The service of ``[rl.tinker]``, asked for a sign of life at first.

    Raises ``ConfigError`` without the client or the key, ``TrainingError`` where there is no route.
    """

    def __init__(self, settings: TinkerSettings) -> None:
        key = settings.api_key()
        self._settings = settings
        self._tinker = _client_package()
        _greet(settings)
        with _asking(settings, "open a session"):
            self._client: Any = self._tinker.ServiceClient(base_url=settings.address, api_key=key or _KEYLESS)
            # Before the interpreter ends, when the client could no longer end its own threads.
            weakref.finalize(self, self._client.holder.close)

    def create(self, wanted: NewAdapter) -> RemoteAdapter:
        """With the layers of attention, of the MLPs, or both; never the output layer: few servers load that."""
        with _asking(self._settings, f"make an adapter of {wanted.base_model}"):
            made = self._client.create_lora_training_client(
                base_model=wanted.base_model,
                rank=wanted.rank,
                seed=wanted.seed,
                train_attn=wanted.attention,
                train_mlp=wanted.mlp,
                train_unembed=False,
            )
        return RemoteAdapter(self._tinker, made, self._settings)

    def open(self, path: str, *, optimizer: bool) -> RemoteAdapter:
        """With or without the moments."""
        with _asking(self._settings, f"load {path}"):
            make = self._client.create_training_client_from_state
            if optimizer:
                make = self._client.create_training_client_from_state_with_optimizer
            made = make(path)
        return RemoteAdapter(self._tinker, made, self._settings)


class RemoteAdapter:
    """One adapter and its optimiser at a service. Every method raises ``TrainingError``."""

    def __init__(self, tinker: Any, client: Any, settings: TinkerSettings) -> None:
        self._tinker = tinker
        self._client = client
        self._settings = settings
        self._unload = weakref.finalize(self, _unload, settings, str(client.model_id))

    def forward(self, rows: Sequence[DatumRow]) -> list[list[float]]:
        """With the loss "cross_entropy", whose value is not used."""
        with _asking(self._settings, "compute logprobs"):
            return self._logprobs(self._client.forward(self._data(rows), "cross_entropy"))

    def forward_backward(self, rows: Sequence[DatumRow], loss: str, config: Mapping[str, float]) -> list[list[float]]:
        """The client sends a large batch in parts, which the service takes for one."""
        with _asking(self._settings, f"compute the gradient of {loss}"):
            return self._logprobs(self._client.forward_backward(self._data(rows), loss, dict(config) or None))

    def step(self, options: StepOptions) -> float | None:
        """The norm is a metric that servers name each in their own way."""
        adam = self._tinker.AdamParams(
            learning_rate=options.learning_rate,
            beta1=options.beta1,
            beta2=options.beta2,
            eps=options.epsilon,
            weight_decay=options.weight_decay,
            grad_clip_norm=options.max_grad_norm,
        )
        with _asking(self._settings, "make a step"):
            metrics = self._client.optim_step(adam).result(self._settings.timeout).metrics or {}
        return next((value for name, value in metrics.items() if "grad_norm" in name), None)

    def save(self, name: str) -> str:
        """A name is used once."""
        with _asking(self._settings, "save a checkpoint"):
            return self._client.save_state(name).result(self._settings.timeout).path

    def export(self, name: str) -> bytes:
        """By the archive's address: the client follows those of the hosted service only."""
        with _asking(self._settings, "export the adapter"):
            path: str = self._client.save_weights_for_sampler(name).result(self._settings.timeout).path
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        return _archive(self._settings, run, checkpoint.rpartition("/")[2])

    def close(self) -> None:
        """Once; also when the adapter is no longer used, and at the end of the process."""
        self._unload()

    def _data(self, rows: Sequence[DatumRow]) -> list[Any]:
        made = self._tinker.ModelInput.from_ints
        return [
            self._tinker.Datum(model_input=made(row["model_input"]), loss_fn_inputs=row["loss_fn_inputs"])
            for row in rows
        ]

    def _logprobs(self, future: Any) -> list[list[float]]:
        found = future.result(self._settings.timeout).loss_fn_outputs
        return [[float(value) for value in each["logprobs"].tolist()] for each in found]


def _client_package() -> Any:
    # Its client reports exceptions with the headers of requests, where the key is.
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    check_package("tinker")
    return importlib.import_module("tinker")


def _greet(settings: TinkerSettings) -> None:
    """Any response shows that there is a server. Raises ``TrainingError`` where there is none."""
    try:
        with httpx.Client(transport=httpx.HTTPTransport(retries=_TRIES)) as client:
            client.get(f"{settings.address}/api/v1/healthz", timeout=10.0)
    except httpx.HTTPError as error:
        raise TrainingError(
            f"no route to the Tinker service at {settings.address} ({describe(error)}): start it, or set "
            "[rl.tinker] base_url"
        ) from error


def _unload(settings: TinkerSettings, model: str) -> None:
    """The client has no call for it; a server without one drops models when their session ends."""
    with suppress(httpx.HTTPError, RLError):
        own = {"X-API-Key": settings.api_key() or _KEYLESS}
        body = {"model_id": model, "type": "unload_model"}
        httpx.post(f"{settings.address}/api/v1/unload_model", json=body, headers=own, timeout=10.0)


def _archive(settings: TinkerSettings, run: str, checkpoint: str) -> bytes:
    """The tar file with the adapter. Raises ``TrainingError``."""
    address = f"{settings.address}/api/v1/training_runs/{run}/checkpoints/{checkpoint}/archive"
    headers = {"X-API-Key": settings.api_key() or _KEYLESS}
    with _asking(settings, "send the adapter"), httpx.Client(timeout=settings.timeout) as client:
        answer = client.get(address, headers=headers)
        if answer.is_redirect and answer.next_request is not None:
            # A place in a store of objects signs its own address, and has no business with the key.
            own = str(answer.next_request.url).startswith(settings.address)
            answer = client.get(answer.next_request.url, headers=headers if own else {}, follow_redirects=True)
        return answer.raise_for_status().content


@contextmanager
def _asking(settings: TinkerSettings, what: str) -> Iterator[None]:
    """Whatever the client raises becomes one line."""
    try:
        yield
    except RLError:
        raise
    except TimeoutError as error:
        raise TrainingError(
            f"the Tinker service did not {what} in {settings.timeout:g} s: raise [rl.tinker] timeout; "
            "the same command continues from the last checkpoint"
        ) from error
    except (httpx.HTTPError, ValueError, RuntimeError, OSError, _client_error()) as error:
        raise TrainingError(f"the Tinker service at {settings.address} did not {what}: {describe(error)}") from error


def _client_error() -> type[Exception]:
    return importlib.import_module("tinker").TinkerError
