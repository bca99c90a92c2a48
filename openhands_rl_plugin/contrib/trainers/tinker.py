"""The training engine ``tinker``: ``[rl.tinker]``, and a service of the Tinker API by its own client.

The client (the package ``tinker``) is imported here only. It repeats requests that a server did not take for at most
five minutes; every response is waited for at most fifteen.
"""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import httpx
from pydantic import Field, model_validator

from openhands_rl_plugin.config.rl import HttpUrl, RLSettings, Settings, TrainingSettings, VariableName
from openhands_rl_plugin.core.errors import ConfigError, RLError, TrainingError, describe
from openhands_rl_plugin.core.servers import is_loopback, named_key
from openhands_rl_plugin.core.types import Adapter

if TYPE_CHECKING:
    from openhands_rl_plugin.training.trainer.trainer import Trainer

HOSTED = "https://tinker.thinkingmachines.dev/services/tinker-prod"
"""The address of the hosted service, as its own client has it."""
_TIMEOUT = 900.0
"""Seconds for one response of the service."""


class TinkerSettings(Settings):
    """``[rl.tinker]``: the address of a server of the Tinker API, and its base model."""

    base_url: HttpUrl = Field(default="", description="server of the Tinker API; empty: the hosted service")
    model: str = Field(default="", description="the base model by its name there; empty: [rl.serving] model")
    api_key_env: VariableName = Field(
        default="TINKER_API_KEY", description="NAME of the environment variable with the service's key"
    )

    @model_validator(mode="after")
    def _no_key_in_the_clear(self) -> Self:
        if self.base_url.startswith("http:") and not is_loopback(urlsplit(self.base_url).hostname or ""):
            raise ValueError("base_url: http:// sends the key in the clear: use https://, or a tunnel to 127.0.0.1")
        return self

    @property
    def address(self) -> str:
        """The server's URL, without a slash at the end."""
        return self.base_url or HOSTED

    def api_key(self) -> str:
        """The key, or what a server of one's own takes for none. Raises ``ConfigError`` for the hosted service."""
        if self.base_url and self.api_key_env not in os.environ:
            return "tml-none"  # what the client sends where a server wants no key; it refuses to send nothing
        return named_key(self.api_key_env, "[rl.tinker] api_key_env")


# The service answers with logprobs and nothing else, and chooses the layout of its batches itself.
_LACKS = "method lora_variant kl entropy_coefficient max_tokens_per_micro_batch sharding gradient_checkpointing dtype"
_ATTENTION, _MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}


def check_settings(training: TrainingSettings) -> None:
    """Raise ``ConfigError`` for what the service has no counterpart for."""
    fields = TrainingSettings.model_fields
    if lacking := [name for name in _LACKS.split() if getattr(training, name) != fields[name].default]:
        raise ConfigError(f'engine = "tinker" has no {", ".join(lacking)}: leave the default, or set engine = "local"')
    # The service's own; a request cannot change it (thinkingmachines.ai/blog/lora, SkyRL's ``api.py``).
    if training.lora_alpha != 32:
        raise ConfigError('engine = "tinker" trains with lora_alpha = 32 only: set that, or engine = "local"')
    if {*training.target_modules} not in (_ATTENTION, _MLP, _ATTENTION | _MLP):
        raise ConfigError('engine = "tinker" adapts all of attention, all of the MLP, or both: set target_modules')


def make_trainer(training: TrainingSettings, settings: RLSettings, base_model: str, adapter: Adapter | None) -> Trainer:
    """A trainer on the server of ``[rl.tinker]``. Raises ``ConfigError`` and ``TrainingError``."""
    from openhands_rl_plugin.contrib.trainers.tinker_trainer import TinkerTrainer

    own = settings.section("tinker", TinkerSettings)
    return TinkerTrainer(training, own, base_model, adapter=adapter, service=TinkerService(own))


class TinkerService:
    """The service of ``[rl.tinker]``, asked for a sign of life at first.

    Raises ``ConfigError`` without the client or the key, ``TrainingError`` where there is no route.
    """

    def __init__(self, settings: TinkerSettings) -> None:
        key = settings.api_key()
        self._settings = settings
        # Its client reports exceptions with the headers of requests, where the key is.
        os.environ.setdefault("TINKER_TELEMETRY", "0")
        try:
            self._tinker: Any = importlib.import_module("tinker")
        except ImportError as error:
            raise ConfigError("the Tinker API's client is not installed: pip install 'tinker>=0.25,<0.39'") from error
        with _asking(settings, "answer"), httpx.Client(transport=httpx.HTTPTransport(retries=3)) as client:
            client.get(f"{settings.address}/api/v1/healthz", timeout=10.0)  # any response shows that there is a server
        with _asking(settings, "open a session"):
            self._client: Any = self._tinker.ServiceClient(base_url=settings.address, api_key=key)
            # Before the interpreter ends, when the client could no longer end its own threads.
            weakref.finalize(self, self._client.holder.close)

    def create(self, base_model: str, training: TrainingSettings) -> RemoteAdapter:
        """A fresh adapter with the layers of attention, of the MLPs, or both: the service knows groups of layers only.
        Never with the output layer: few servers load that."""
        with _asking(self._settings, f"make an adapter of {base_model}"):
            made = self._client.create_lora_training_client(
                base_model=base_model,
                rank=training.lora_rank,
                seed=training.seed,
                train_attn="q_proj" in training.target_modules,
                train_mlp="up_proj" in training.target_modules,
                train_unembed=False,
            )
        return RemoteAdapter(self._tinker, made, self._settings)

    def open(self, path: str, *, optimizer: bool) -> RemoteAdapter:
        """Load a checkpoint, with or without the optimiser's moments."""
        kind = f"create_training_client_from_state{'_with_optimizer' if optimizer else ''}"
        with _asking(self._settings, f"load {path}"):
            return RemoteAdapter(self._tinker, getattr(self._client, kind)(path), self._settings)


DatumRow = dict[str, Any]
"""The fields of a ``Datum``, of T tokens: ``model_input``, the first T - 1, and ``loss_fn_inputs``, by name a value for
each of the last T - 1."""


class RemoteAdapter:
    """One adapter and its optimiser at a service. Every method raises ``TrainingError``."""

    def __init__(self, tinker: Any, client: Any, settings: TinkerSettings) -> None:
        self._tinker = tinker
        self._client = client
        self._settings = settings
        self.close = weakref.finalize(self, _unload, settings, str(client.model_id))
        """Unload the adapter, once. Also called when the object is deleted, and at the end of the process."""

    def forward(self, rows: Sequence[DatumRow]) -> list[list[float]]:
        """Logprobs of each row, by the loss "cross_entropy", whose value is not used."""
        with _asking(self._settings, "compute logprobs"):
            found = self._client.forward(self._data(rows), "cross_entropy").result(_TIMEOUT)
            return [[float(value) for value in each["logprobs"].tolist()] for each in found.loss_fn_outputs]

    def forward_backward(self, rows: Sequence[DatumRow]) -> None:
        """Add the gradient of ``-sum(ratio * advantage)``. The client sends a large batch in parts, which the service
        takes for one."""
        with _asking(self._settings, "compute a gradient"):
            self._client.forward_backward(self._data(rows), "importance_sampling").result(_TIMEOUT)

    def step(self, learning_rate: float, **given: float) -> float | None:
        """One step of AdamW; ``grad_clip_norm`` 0: no clipping. Returns the norm of the gradient, a metric that servers
        name each in their own way."""
        adamw = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0} | given
        options = self._tinker.AdamParams(learning_rate=learning_rate, **adamw)
        with _asking(self._settings, "make a step"):
            metrics = self._client.optim_step(options).result(_TIMEOUT).metrics or {}
        return next((value for name, value in metrics.items() if "grad_norm" in name), None)

    def save(self, name: str) -> str:
        """A name is used once."""
        with _asking(self._settings, "save a checkpoint"):
            return self._client.save_state(name).result(_TIMEOUT).path

    def export(self, name: str) -> bytes:
        """Download the adapter as an archive. Not by the client, which follows only URLs of the hosted service."""
        with _asking(self._settings, "export the adapter"):
            path: str = self._client.save_weights_for_sampler(name).result(_TIMEOUT).path
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        place = f"training_runs/{run}/checkpoints/{checkpoint.rpartition('/')[2]}/archive"
        headers = {"X-API-Key": self._settings.api_key()}
        with _asking(self._settings, "send the adapter"), httpx.Client(timeout=_TIMEOUT) as client:
            answer = client.get(f"{self._settings.address}/api/v1/{place}", headers=headers)
            if answer.is_redirect and answer.next_request is not None:
                # A place in a store of objects signs its own address, and has no business with the key.
                own = str(answer.next_request.url).startswith(self._settings.address)
                answer = client.get(answer.next_request.url, headers=headers if own else {}, follow_redirects=True)
            return answer.raise_for_status().content

    def _data(self, rows: Sequence[DatumRow]) -> list[Any]:
        made = self._tinker.ModelInput.from_ints
        return [self._tinker.Datum(**{**each, "model_input": made(each["model_input"])}) for each in rows]


def _unload(settings: TinkerSettings, model: str) -> None:
    """The client has no call for it; a server without one drops models when their session ends."""
    with suppress(httpx.HTTPError, RLError):
        body, own = {"model_id": model, "type": "unload_model"}, {"X-API-Key": settings.api_key()}
        httpx.post(f"{settings.address}/api/v1/unload_model", json=body, headers=own, timeout=10.0)


@contextmanager
def _asking(settings: TinkerSettings, what: str) -> Iterator[None]:
    """Whatever the client raises becomes one line."""
    try:
        yield
    except RLError:
        raise
    except (httpx.HTTPError, ValueError, RuntimeError, OSError, importlib.import_module("tinker").TinkerError) as error:
        raise TrainingError(f"the Tinker service at {settings.address} did not {what}: {describe(error)}") from error
