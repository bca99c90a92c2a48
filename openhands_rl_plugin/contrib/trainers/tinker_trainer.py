"""Trains an adapter on a server of the Tinker API: our samples, advantages, normaliser and schedule, its passes.

The loss is computed here on the server's logprobs, and its gradient by them goes back as the factors of a likelihood:
exact for every loss of ``losses``, for one forward pass more than a loss of the server's own would take.
"""

from __future__ import annotations

import io
import json
import math
import secrets
import sys
import tarfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.contrib.trainers.rows import DatumRow, datums
from openhands_rl_plugin.contrib.trainers.tinker import (
    NewAdapter,
    RemoteAdapter,
    StepOptions,
    TinkerService,
    TinkerSettings,
)
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import Adapter, Frozen, Sample
from openhands_rl_plugin.models.adapters.adapter_config import CONFIG_FILE
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE
from openhands_rl_plugin.training.data.layout import Layout
from openhands_rl_plugin.training.losses.logprobs import Diagnostics
from openhands_rl_plugin.training.losses.losses import MicroBatch, MicroBatchLoss, TrainingSample
from openhands_rl_plugin.training.policies.packed_model import PACKED, PROBE_TOLERANCE
from openhands_rl_plugin.training.trainer.metrics import RunningMetrics
from openhands_rl_plugin.training.trainer.resume import RunCheckpoint, fingerprint
from openhands_rl_plugin.training.trainer.trainer import WITHOUT_EFFECT, Trainer

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
        service: TinkerService | None = None,
    ) -> None:
        self._tinker = tinker
        self._base_model = tinker.model or base_model
        self._service = TinkerService(tinker) if service is None else service
        self._model: RemoteAdapter | None = None
        self._path, self._optimizer = self._start(adapter, settings)
        """The newest checkpoint, and whether its moments are this trainer's."""
        self._saved_at: int | None = None
        """The step of that checkpoint, where it is one of this trainer."""
        self._reduces = False
        super().__init__(_RemotePolicy(self), settings, version=adapter.version if adapter is not None else 0)

    @property
    def model(self) -> RemoteAdapter:
        """The adapter at the service, from the newest checkpoint."""
        if self._model is None:
            if self._path is None:
                self._model = self._service.create(self._fresh(self.settings))
            else:
                self._model = self._service.open(self._path, optimizer=self._optimizer)
        return self._model

    def save_adapter(self, directory: Path) -> None:
        """Fetch the adapter in PEFT's format, and note its checkpoint at the service beside it."""
        path = self._saved()
        write_adapter(self.model.export(self._new_name()), directory, base_model=self._base_model)
        origin = TinkerOrigin(
            path=path, address=self._tinker.address, base_model=self._base_model, rank=self.settings.lora_rank
        )
        write_file(directory / ORIGIN, origin.model_dump_json(indent=1))

    @property
    def _micro_batch_tokens(self) -> int:
        """The server makes its own micro-batches."""
        return sys.maxsize

    def _state(self) -> dict[str, Tensor]:
        return {}

    def _counters(self) -> dict[str, str]:
        return super()._counters() | {"tinker": self._saved()}

    def _restore(self, tensors: dict[str, Tensor], counters: dict[str, str], source: str) -> None:
        try:
            step, version, path = int(counters["step"]), int(counters["version"]), counters["tinker"]
        except (KeyError, ValueError) as error:
            raise TrainingError(f'{source} does not hold a training state of engine = "tinker"') from error
        self._close()
        self._path, self._optimizer, self._saved_at = path, True, step
        self.step, self._version = step, version

    def _begin(
        self, items: list[TrainingSample], loss: MicroBatchLoss, kept: RunCheckpoint | None
    ) -> tuple[int, int, RunningMetrics, bool]:
        if not self._reduces:
            first = next((batch for batch in self._order(items, self.step) if any(map(loss.counts, batch))), items)
            with self._scratch() as adapter:
                check_reduction(adapter, [item for item in first if loss.counts(item)] or first, self._tinker.reduction)
            self._reduces = True
        return super()._begin(items, loss, kept)

    def _update(
        self, live: list[TrainingSample], weights: list[float], loss: MicroBatchLoss
    ) -> tuple[float, float, Diagnostics]:
        try:
            total, diagnostics = self._gradient(live, torch.tensor(weights), loss)
            if not math.isfinite(total):
                raise TrainingError(
                    f"step {self.step + 1}: the loss is {total}; the weights are unchanged. Lower learning_rate, or "
                    "check the recorded logprobs"
                )
            norm = self.model.step(
                StepOptions(self._rate, self.settings.weight_decay, max_grad_norm=self.settings.max_grad_norm)
            )
        except TrainingError:
            self._close()  # a gradient without a step: what comes next begins at the last checkpoint
            raise
        if norm is not None and not math.isfinite(norm):
            self._close()
            raise TrainingError(f"step {self.step + 1}: the norm of the gradient is {norm}; lower learning_rate")
        return total, norm or 0.0, diagnostics

    def _gradient(self, live: list[TrainingSample], weights: Tensor, loss: MicroBatchLoss) -> tuple[float, Diagnostics]:
        """Add the gradient of the batch at the service."""
        answers = self.model.forward(forward_rows([item.sample.input_ids for item in live]))
        logprobs = trained_logprobs(live, answers).requires_grad_()
        share, diagnostics = loss(MicroBatch(live, logprobs, -logprobs.detach(), weights))
        (gradient,) = torch.autograd.grad(share, logprobs)
        factors = list(torch.split(-gradient, [len(item.positions) for item in live]))
        self.model.forward_backward(*likelihood_rows(live, factors, self._tinker.reduction))
        return share.item(), diagnostics

    def _fingerprint(self, samples: list[Sample], loss: MicroBatchLoss) -> str:
        settings = self.settings.model_dump_json(exclude=WITHOUT_EFFECT)
        where = f"{self._tinker.address}\n{self._base_model}\n{self._tinker.reduction}\n{self._path}"
        return fingerprint(f"{type(loss).__name__}\n{where}\n{settings}", samples, (), self.step)

    def _start(self, adapter: Adapter | None, settings: TrainingSettings) -> tuple[str | None, bool]:
        """The checkpoint to start from. Raises ``TrainingError`` where the service has none."""
        if adapter is None:
            return None, False
        try:
            origin = TinkerOrigin.model_validate_json((Path(adapter.path) / ORIGIN).read_bytes())
        except (OSError, ValidationError) as error:
            raise TrainingError(
                f'{adapter.name} was not trained by engine = "tinker", and the service takes no adapters from '
                f'elsewhere ({describe(error)}): start from base, or set engine = "local"'
            ) from error
        here = TinkerOrigin(
            path=origin.path, address=self._tinker.address, base_model=self._base_model, rank=settings.lora_rank
        )
        if origin != here:
            raise TrainingError(
                f"{adapter.name} was trained as {origin!r}, and the settings say {here!r}: set [rl.tinker] and "
                "lora_rank to that, or start from base"
            )
        return origin.path, False

    def _fresh(self, settings: TrainingSettings) -> NewAdapter:
        targets = settings.target_modules
        return NewAdapter(
            base_model=self._base_model,
            rank=settings.lora_rank,
            seed=settings.seed,
            attention="q_proj" in targets,
            mlp="up_proj" in targets,
        )

    @contextmanager
    def _scratch(self) -> Iterator[RemoteAdapter]:
        """A fresh adapter beside the trained one, for the block."""
        adapter = self._service.create(self._fresh(self.settings))
        try:
            yield adapter
        finally:
            adapter.close()

    def _saved(self) -> str:
        """The path of a checkpoint of the present state."""
        if self._path is None or self._saved_at != self.step:
            self._path, self._optimizer, self._saved_at = self.model.save(self._new_name()), True, self.step
        return self._path

    def _new_name(self) -> str:
        return f"step-{self.step:06d}-{secrets.token_hex(4)}"

    def _close(self) -> None:
        if self._model is not None:
            self._model.close()
            self._model = None


class _RemotePolicy:
    """The policy as what computes logprobs: ``TrainedPolicy``."""

    packing = PACKED
    longest = vocabulary = sys.maxsize  # the service refuses what is too long, or not in its vocabulary
    device = torch.device("cpu")
    sharded = False
    probe_tolerance = PROBE_TOLERANCE[torch.bfloat16]

    def __init__(self, trainer: TinkerTrainer) -> None:
        # Or a trainer that nobody uses would keep its place at the service until the garbage collector comes by.
        self._trainer: TinkerTrainer = weakref.proxy(trainer)

    def notes(self) -> list[str]:
        """Where it is trained."""
        return [f"trained by the Tinker service at {self._trainer._tinker.address}"]

    def logprobs(
        self, layout: Layout, wanted: list[tuple[int, int]], temperatures: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The service's, without a gradient; minus each is the estimate of the entropy."""
        if temperatures is not None:
            raise TrainingError("the Tinker service trains at temperature 1; set [rl.sampling] temperature = 1.0")
        sequences = [[layout.ids[row] for row in rows] for rows in layout.rows]
        answers = self._trainer.model.forward(forward_rows(sequences))
        found = torch.tensor([answers[s][t - 1] for s, t in wanted])
        return found, -found

    def sequence_logprobs(self, token_ids: tuple[int, ...]) -> list[float]:
        """Of ids 1 .. T-1."""
        return self._trainer.model.forward(forward_rows([token_ids]))[0]

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """There is none: ``kl`` is refused with the settings."""
        raise TrainingError('engine = "tinker" has no reference model: set kl = "none"')
        yield


Reduction = Literal["sum", "sequence-mean"]

_ONE: Mapping[str, float] = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}


def policy_rows(items: Sequence[TrainingSample], factors: Sequence[Tensor], reduction: Reduction) -> list[DatumRow]:
    """Rows for a policy gradient, so that the server's reduction gives the gradient of the whole batch.

    Services add up the losses of all tokens (SkyRL: ``ppo_utils.py``). SkyRL's JAX back end divides those of a sequence
    by the sum of its weights, and the gradient by the number of sequences since the last step (``backends/jax.py``):
    there a token's weight is multiplied by both.
    ``factors``: [K] of each sample, advantages with all weights in them.

    The ratio is to ``TrainingSample.old``. Raises ``ExchangeError`` for samples that are not of temperature 1.
    """
    averaged = reduction == "sequence-mean"
    made = []
    for item, each in zip(items, factors, strict=True):
        scale = len(item.positions) * len(items) if averaged else 1
        changed = {
            "logprobs": _spread(item, item.old),
            "token_advantages": _spread(item, each * scale),
            "token_temperatures": _spread(
                item, torch.ones_like(each) if item.temperatures is None else item.temperatures
            ),
            "count": 1,  # the factors have it
        }
        made.append(item.sample.model_copy(update=changed))
    return datums(made, weights=averaged)


def likelihood_rows(
    items: Sequence[TrainingSample], factors: Sequence[Tensor], reduction: Reduction
) -> tuple[list[DatumRow], str, Mapping[str, float]]:
    """Rows, loss and its options with the gradient of ``-sum(factor * logprob)``; factors ([K]) of any sign.

    Where weights are divided by their own sum they cannot carry factors: there it is CISPO with a ratio clipped to 1.
    """
    rows = policy_rows(items, factors, reduction)
    if reduction == "sequence-mean":
        return rows, "cispo", _ONE
    for row in rows:
        inputs = row["loss_fn_inputs"]
        row["loss_fn_inputs"] = {"target_tokens": inputs["target_tokens"], "weights": inputs["advantages"]}
    return rows, "cross_entropy", {}


def forward_rows(sequences: Sequence[Sequence[int]]) -> list[DatumRow]:
    """Rows of which only the logprobs are wanted."""
    return [
        DatumRow(
            model_input=[*ids[:-1]],
            loss_fn_inputs={"target_tokens": [*ids[1:]], "weights": [1.0] * (len(ids) - 1)},
        )
        for ids in sequences
    ]


def trained_logprobs(items: Sequence[TrainingSample], answers: Sequence[Sequence[float]]) -> Tensor:
    """[K]: those of the trained tokens, sample by sample; an answer begins with the second token of a sequence."""
    pairs = zip(items, answers, strict=True)
    return torch.tensor([answer[at - 1] for item, answer in pairs for at in item.positions])


def _spread(item: TrainingSample, values: Tensor) -> tuple[float, ...]:
    """[K] -> a value for each token; 0 where nothing is trained."""
    whole = [0.0] * len(item.sample.input_ids)
    for at, value in zip(item.positions, values.tolist(), strict=True):
        whole[at] = value
    return tuple(whole)


_LOG = redacting_logger(__name__)

_TOLERANCE = 0.05
"""Of the ratio of two norms, which are equal but for rounding; another reduction moves it by a quarter at least."""


def check_reduction(adapter: RemoteAdapter, items: Sequence[TrainingSample], reduction: Reduction) -> float | None:
    """The ratio of the two norms, ``None`` where the server says no norms, which is logged.

    One sequence, and the same one cut into two beside an equal one without advantages, have the same gradient, if the
    server reduces as the rows were made for. Their norms are compared, on an adapter of the check's own, at a learning
    rate of 0. ``items``: of the first batch. Raises ``TrainingError`` where the server reduces otherwise.
    """
    item = max(items, key=lambda each: len(each.positions))
    ones = torch.ones(len(item.positions))
    first = (torch.arange(len(ones)) < max(1, len(ones) // 2)).float()
    parts = [first, ones - first] if len(ones) > 1 else [ones]
    whole = _norm(adapter, [(item, ones)], reduction)
    split = _norm(adapter, [*((_only(item, part), part[part > 0]) for part in parts), (item, ones * 0)], reduction)
    if whole is None or split is None or not whole:
        _LOG.warning(
            "the server does not say the norm of a gradient, so that nothing shows whether it reduces by %r, as "
            "[rl.tinker] reduction says",
            reduction,
        )
        return None
    ratio = split / whole
    if abs(ratio - 1) > _TOLERANCE:
        other = "sequence-mean" if reduction == "sum" else "sum"
        raise TrainingError(
            f'[rl.tinker] reduction = "{reduction}": the server reduces a batch otherwise (the norm of a gradient is '
            f'{ratio:.2f} times what it should be); nothing was trained: set "{other}"'
        )
    return ratio


def _norm(adapter: RemoteAdapter, parts: Sequence[tuple[TrainingSample, Tensor]], reduction: Reduction) -> float | None:
    rows = policy_rows([item for item, _ in parts], [factors for _, factors in parts], reduction)
    adapter.forward_backward(rows, "importance_sampling", {})
    return adapter.step(StepOptions(learning_rate=0.0))


def _only(item: TrainingSample, part: Tensor) -> TrainingSample:
    """The same sequence with a part ([K], 0 or 1) of its trained tokens."""
    kept = {at for at, own in zip(item.positions, part.tolist(), strict=True) if own}
    mask = tuple(at in kept for at in range(len(item.sample.mask)))
    cut = TrainingSample(item.sample.model_copy(update={"mask": mask, "spans": ()}), item.unit)
    cut.temperatures = None if item.temperatures is None else item.temperatures[part > 0]
    return cut


_LARGEST = 16 << 30
"""Bytes of one file: many times the largest adapter."""


def write_adapter(archive: bytes, directory: Path, *, base_model: str) -> None:
    """Write the two files of the adapter into ``directory``. Raises ``TrainingError`` for an archive without them."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                name = member.name.rpartition("/")[2]
                file = tar.extractfile(member) if member.isfile() and member.size <= _LARGEST else None
                if name in (CONFIG_FILE, WEIGHTS_FILE) and file is not None:
                    found[name] = file.read()
        config, weights = json.loads(found[CONFIG_FILE]), load(found[WEIGHTS_FILE])
    except (tarfile.TarError, EOFError, OSError, KeyError, ValueError, SafetensorError) as error:
        raise TrainingError(f"what the Tinker service exported is no adapter: {describe(error)}") from error
    modules = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in weights})
    # SkyRL leaves the layers open, and names the base model by a folder of its own machine.
    config |= {"target_modules": config.get("target_modules") or modules, "base_model_name_or_path": base_model}
    config |= {"task_type": config.get("task_type") or "CAUSAL_LM"}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=1), encoding="utf-8")
    (directory / WEIGHTS_FILE).write_bytes(found[WEIGHTS_FILE])
