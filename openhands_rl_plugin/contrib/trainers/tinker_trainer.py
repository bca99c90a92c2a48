"""Trains an adapter on a server of the Tinker API: our samples, advantages, normaliser and schedule, its passes.

The loss is computed here on the server's logprobs, and its gradient by them goes back as the advantages of a policy
gradient with a ratio of 1: exact for every loss of ``losses``, for one forward pass more than a loss of the server.
"""

from __future__ import annotations

import io
import json
import math
import secrets
import sys
import tarfile
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.types import Adapter, Frozen, Sample
from openhands_rl_plugin.models.adapters.adapter_config import CONFIG_FILE
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE
from openhands_rl_plugin.training.algorithms import digest_of
from openhands_rl_plugin.training.data.packing import Layout
from openhands_rl_plugin.training.losses import Loss, MicroBatch, TrainingSample
from openhands_rl_plugin.training.policies.packed_model import PACKED, PROBE_TOLERANCE, PackedModel
from openhands_rl_plugin.training.trainer.metrics import RunCheckpoint
from openhands_rl_plugin.training.trainer.trainer import Trainer

if TYPE_CHECKING:
    from openhands_rl_plugin.contrib.trainers.tinker import DatumRow, RemoteAdapter, TinkerService, TinkerSettings

ORIGIN = "tinker.json"
"""Beside the files of a version: where the service keeps its weights and its optimiser."""


class TinkerOrigin(Frozen):
    """The checkpoint of a version at the service: nothing can be uploaded, so it is what training goes on from."""

    path: str
    address: str
    base_model: str
    rank: int


class TinkerTrainer(Trainer):
    """One adapter at a service, whose first version starts fresh, and any other from its checkpoint there.

    ``base_model``: by the name that our server of the policy has for it, where ``[rl.tinker] model`` is empty. Raises
    ``ConfigError`` and ``TrainingError`` for what the service cannot train; it holds nothing there before the first
    pass.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        tinker: TinkerSettings,
        base_model: str,
        *,
        adapter: Adapter | None = None,
        service: TinkerService,
    ) -> None:
        self._tinker = tinker
        self._base_model = tinker.model or base_model
        self._service = service
        self._model: RemoteAdapter | None = None
        self._path, self._with_moments = self._start(adapter, settings), False
        """The newest checkpoint, and whether its moments are this trainer's."""
        self._saved_at: int | None = None
        """The step of that checkpoint, where it is one of this trainer."""
        self._averages: bool | None = None
        """Whether the server divides the losses of a sequence by its tokens; ``None`` before the first gradient."""
        super().__init__(
            cast(PackedModel, _RemotePolicy(self)), settings, version=adapter.version if adapter is not None else 0
        )

    @property
    def model(self) -> RemoteAdapter:
        """The adapter at the service, from the newest checkpoint."""
        if self._model is None:
            if self._path is None:
                self._model = self._service.create(self._base_model, self.settings)
            else:
                self._model = self._service.open(self._path, optimizer=self._with_moments)
        return self._model

    def save_adapter(self, directory: Path) -> None:
        """Download the adapter in PEFT's format, and write the address of its checkpoint into the same folder."""
        path = self._saved()
        write_adapter(self.model.export(self._new_name()), directory, base_model=self._base_model)
        write_file(directory / ORIGIN, self._origin(path, self.settings).model_dump_json(indent=1))

    @property
    def _micro_batch_tokens(self) -> int:
        """The server makes its own micro-batches."""
        return sys.maxsize

    def _state(self) -> dict[str, Any]:
        return {"step": self.step, "version": self._version, "tinker": self._saved()}

    def _restore(self, state: dict[str, Any], source: str) -> None:
        self._close()
        self.step, self._version = state["step"], state["version"]
        self._path, self._with_moments, self._saved_at = state["tinker"], True, self.step

    def _begin(self, items: list[TrainingSample], loss: Loss, kept: RunCheckpoint | None) -> dict[str, Any]:
        if any(item.temperatures is not None for item in items):
            raise TrainingError("the Tinker service trains at temperature 1; set [rl.sampling] temperature = 1.0")
        if self._averages is None:
            item = max(items, key=lambda each: (loss.counts(each), len(each.positions)))
            with closing(self._service.create(self._base_model, self.settings)) as scratch:  # pyrefly: ignore[bad-specialization]
                self._averages = averages(scratch, item)
        return super()._begin(items, loss, kept)

    def _update(
        self, live: list[TrainingSample], weights: list[float], loss: Loss
    ) -> tuple[float, float | None, dict[str, float]]:
        try:
            total, sums = self._gradient(live, torch.tensor(weights), loss)
            if not math.isfinite(total):
                raise TrainingError(f"step {self.step + 1}: the loss is {total}; no step was made: lower learning_rate")
            decay, most = self.settings.weight_decay, self.settings.max_grad_norm
            norm = self.model.step(self._rate, weight_decay=decay, grad_clip_norm=most)
            if norm is not None and not math.isfinite(norm):
                raise TrainingError(f"step {self.step + 1}: the norm of the gradient is {norm}; lower learning_rate")
        except TrainingError:
            self._close()  # a gradient without a step, or a bad one: what comes next begins at the last checkpoint
            raise
        return total, norm, sums

    def _gradient(self, live: list[TrainingSample], weights: Tensor, loss: Loss) -> tuple[float, dict[str, float]]:
        """Add the gradient of the batch at the service."""
        answers = self.model.forward(forward_rows([item.sample.input_ids for item in live]))
        # An answer begins with the second token of a sequence.
        found = [answer[at - 1] for item, answer in zip(live, answers, strict=True) for at in item.positions]
        logprobs = torch.tensor(found, requires_grad=True)
        share, sums = loss(MicroBatch(live, logprobs, -logprobs.detach(), weights))
        (gradient,) = torch.autograd.grad(share, logprobs)
        sizes = [len(item.positions) for item in live]
        old, factors = torch.split(logprobs.detach(), sizes), torch.split(-gradient, sizes)
        self.model.forward_backward(gradient_rows(live, old, factors, averaged=bool(self._averages)))
        return share.item(), sums

    def _fingerprint(self, samples: list[Sample], loss: Loss) -> str:
        more = loss.kind, self._tinker.address, self._base_model, self._path, self.step
        return digest_of(samples, self.settings, *more)

    def _start(self, adapter: Adapter | None, settings: TrainingSettings) -> str | None:
        """The checkpoint to start from. Raises ``TrainingError`` where the service has none."""
        if adapter is None:
            return None
        try:
            origin = TinkerOrigin.model_validate_json((Path(adapter.path) / ORIGIN).read_bytes())
        except (OSError, ValidationError) as error:
            raise TrainingError(
                f'{adapter.name} was not trained by engine = "tinker", and the service takes no adapters from '
                f'elsewhere ({describe(error)}): start from base, or set engine = "local"'
            ) from error
        if origin != (here := self._origin(origin.path, settings)):
            raise TrainingError(
                f"{adapter.name} was trained as {origin!r}, and the settings say {here!r}: set [rl.tinker] and "
                "lora_rank to that, or start from base"
            )
        return origin.path

    def _origin(self, path: str, settings: TrainingSettings) -> TinkerOrigin:
        address, rank = self._tinker.address, settings.lora_rank
        return TinkerOrigin(path=path, address=address, base_model=self._base_model, rank=rank)

    def _saved(self) -> str:
        """The path of a checkpoint of the present state."""
        if self._path is None or self._saved_at != self.step:
            self._path, self._with_moments, self._saved_at = self.model.save(self._new_name()), True, self.step
        return self._path

    def _new_name(self) -> str:
        return f"step-{self.step:06d}-{secrets.token_hex(4)}"

    def _close(self) -> None:
        if self._model is not None:
            self._model.close()
            self._model = None


class _RemotePolicy:
    """The methods of ``PackedModel`` that a trainer uses, by calls of the service."""

    packing = PACKED
    longest = vocabulary = sys.maxsize  # the service refuses what is too long, or not in its vocabulary
    device = torch.device("cpu")
    sharded, parameters = False, dict[str, Tensor]()
    probe_tolerance = PROBE_TOLERANCE[torch.bfloat16]

    def __init__(self, trainer: TinkerTrainer) -> None:
        # A strong reference would keep an unused trainer at the service until the next garbage collection.
        self._trainer: TinkerTrainer = weakref.proxy(trainer)

    def notes(self) -> list[str]:
        """A line for the user: the address of the service."""
        return [f"trained by the Tinker service at {self._trainer._tinker.address}"]

    def logprobs(
        self, layout: Layout, wanted: list[tuple[int, int]], temperatures: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The service's, without a gradient; minus each is the estimate of the entropy."""
        sequences = [[layout.ids[row] for row in rows] for rows in layout.rows]
        answers = self._trainer.model.forward(forward_rows(sequences))
        found = torch.tensor([answers[s][t - 1] for s, t in wanted])
        return found, -found

    def sequence_logprobs(self, token_ids: tuple[int, ...]) -> list[float]:
        """Logprobs of ids 1 .. T-1, each given the ids before it."""
        return self._trainer.model.forward(forward_rows([token_ids]))[0]

    def without_adapter(self) -> AbstractContextManager[None]:
        """There is none: ``kl`` is refused with the settings."""
        raise TrainingError('engine = "tinker" has no reference model: set kl = "none"')


def gradient_rows(
    items: Sequence[TrainingSample], old: Sequence[Tensor], factors: Sequence[Tensor], *, averaged: bool
) -> list[DatumRow]:
    """Rows with the gradient of ``-sum(factor * logprob)`` over all tokens, by the server's reduction (``averages``).

    Services add up the losses of all tokens (SkyRL: ``ppo_utils.py``). SkyRL's JAX back end divides those of a sequence
    by the sum of its weights, and the gradient by the number of sequences since the last step (``backends/jax.py``):
    there a token's factor is multiplied by both.
    ``old``: [K] of each sample, the logprobs that the ratio is to. ``factors``: [K], of any sign.
    """
    rows: list[DatumRow] = []
    for item, logprobs, each in zip(items, old, factors, strict=True):
        ids = item.sample.input_ids
        scale = len(item.positions) * len(items) if averaged else 1
        inputs: dict[str, list[int] | list[float]] = {"target_tokens": [*ids[1:]]}
        columns = {"logprobs": logprobs, "advantages": each * scale, "weights": torch.ones_like(each)}
        for name, values in columns.items():
            whole = torch.zeros(len(ids)).index_put((torch.tensor(item.positions),), values)  # 0: not trained
            if averaged or name != "weights":
                inputs[name] = whole[1:].tolist()
        rows.append(dict(model_input=[*ids[:-1]], loss_fn_inputs=inputs))
    return rows


def forward_rows(sequences: Sequence[Sequence[int]]) -> list[DatumRow]:
    """Rows of which only the logprobs are wanted."""
    weights = [1.0] * max(map(len, sequences), default=0)
    inputs = [{"target_tokens": [*ids[1:]], "weights": weights[1 : len(ids)]} for ids in sequences]
    return [dict(model_input=[*ids[:-1]], loss_fn_inputs=it) for ids, it in zip(sequences, inputs, strict=True)]


def averages(adapter: RemoteAdapter, item: TrainingSample) -> bool:
    """Whether the server averages over sequences and their tokens, as SkyRL's JAX back end does, or sums.

    The check compares two gradient norms: of a sequence alone, and of a batch that adds an equal sequence with zero
    advantages. They are equal if losses are summed; the second is half if they are averaged. It uses its own adapter,
    at a learning rate of 0. A server without norms is taken to sum. Raises ``TrainingError`` for another result.
    """
    ones = torch.ones(len(item.positions))
    norms: list[float | None] = []
    for factors in ([ones], [ones, ones * 0]):
        items = [item] * len(factors)
        adapter.forward_backward(gradient_rows(items, [each.old for each in items], factors, averaged=False))
        norms.append(adapter.step(0.0))
    alone, padded = norms
    if alone is None or padded is None or not alone:
        return False
    for share, found in ((1.0, False), (0.5, True)):
        if abs(padded / alone / share - 1) < 0.05:  # equal but for rounding
            return found
    raise TrainingError(f"the server neither sums nor averages: a batch has {padded / alone:.2f} times a gradient")


def write_adapter(archive: bytes, directory: Path, *, base_model: str) -> None:
    """Write the two files of the adapter into ``directory``. Raises ``TrainingError`` for an archive without them."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            files = {member.name.rpartition("/")[2]: tar.extractfile(member) for member in tar if member.isfile()}
            config, weights = (cast(IO[bytes], files[name]).read() for name in (CONFIG_FILE, WEIGHTS_FILE))
        shape, tensors = json.loads(config), load(weights)
    except (tarfile.TarError, EOFError, OSError, KeyError, ValueError, SafetensorError) as error:
        raise TrainingError(f"what the Tinker service exported is no adapter: {describe(error)}") from error
    modules = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in tensors})
    # SkyRL leaves the layers open, and names the base model by a folder of its own machine.
    shape |= {"target_modules": shape.get("target_modules") or modules, "base_model_name_or_path": base_model}
    shape |= {"task_type": shape.get("task_type") or "CAUSAL_LM"}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(shape, indent=1), encoding="utf-8")
    (directory / WEIGHTS_FILE).write_bytes(weights)
