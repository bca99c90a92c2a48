"""Trains an adapter on a server of the Tinker API: our samples, advantages, normaliser and schedule, its passes.

PPO's and CISPO's objectives and the likelihood are the server's own losses, with the weight of each token in its
advantage. Any other loss of ``losses`` is computed here on the server's logprobs, and its gradient by them goes back as
the factors of a likelihood: exact, for one more forward pass.
"""

from __future__ import annotations

import math
import secrets
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.contrib.trainers.tinker.archive import write_adapter
from openhands_rl_plugin.contrib.trainers.tinker.reduction import check_reduction
from openhands_rl_plugin.contrib.trainers.tinker.rows import (
    forward_rows,
    likelihood_rows,
    policy_rows,
    trained_logprobs,
)
from openhands_rl_plugin.contrib.trainers.tinker.service import (
    NewAdapter,
    RemoteAdapter,
    Service,
    StepOptions,
    TinkerService,
)
from openhands_rl_plugin.contrib.trainers.tinker.settings import TinkerSettings
from openhands_rl_plugin.core.errors import TrainingError, describe
from openhands_rl_plugin.core.files import write_file
from openhands_rl_plugin.core.types import Adapter, Frozen, Sample
from openhands_rl_plugin.training.algorithms import algorithm_of, clip_bounds
from openhands_rl_plugin.training.data.layout import Layout
from openhands_rl_plugin.training.losses.logprobs import Diagnostics
from openhands_rl_plugin.training.losses.losses import Imitation, MicroBatch, MicroBatchLoss, Reinforcement
from openhands_rl_plugin.training.losses.micro_batches import TrainingSample
from openhands_rl_plugin.training.policies.packed_model import PROBE_TOLERANCE
from openhands_rl_plugin.training.policies.packing_check import PACKED
from openhands_rl_plugin.training.trainer.metrics import RunningMetrics
from openhands_rl_plugin.training.trainer.resume import RunCheckpoint
from openhands_rl_plugin.training.trainer.run_files import fingerprint
from openhands_rl_plugin.training.trainer.trainer import WITHOUT_EFFECT, Trainer

ORIGIN = "tinker.json"
"""Beside the files of a version: where the service keeps its weights and its optimiser."""


class TinkerOrigin(Frozen):
    """The checkpoint of a version at the service: nothing can be uploaded, so it is what training goes on from."""

    path: str
    address: str
    base_model: str


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
        service: Service | None = None,
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
        origin = TinkerOrigin(path=path, address=self._tinker.address, base_model=self._base_model)
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
        self._check_path(path, self.settings)
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
        reduction = self._tinker.reduction
        if (named := _own_loss(loss, self.settings)) is not None:
            name, config = named
            factors = [item.advantages * weight for item, weight in zip(live, weights, strict=True)]
            answers = self.model.forward_backward(policy_rows(live, factors, reduction), name, config)
            share, diagnostics = loss(_micro_batch(live, trained_logprobs(live, answers), weights))
            return share.item(), diagnostics
        if isinstance(loss, Imitation):
            factors = [weight.expand(len(item.positions)) for item, weight in zip(live, weights, strict=True)]
            answers = self.model.forward_backward(*likelihood_rows(live, factors, reduction))
            share, diagnostics = loss(_micro_batch(live, trained_logprobs(live, answers), weights))
            return share.item(), diagnostics
        answers = self.model.forward(forward_rows([item.sample.input_ids for item in live]))
        logprobs = trained_logprobs(live, answers).requires_grad_()
        share, diagnostics = loss(_micro_batch(live, logprobs, weights))
        (gradient,) = torch.autograd.grad(share, logprobs)
        factors = list(torch.split(-gradient, [len(item.positions) for item in live]))
        self.model.forward_backward(*likelihood_rows(live, factors, reduction))
        return share.item(), diagnostics

    def _fingerprint(self, samples: list[Sample], loss: MicroBatchLoss) -> str:
        settings = self.settings.model_dump_json(exclude=WITHOUT_EFFECT)
        where = f"{self._tinker.address}\n{self._base_model}\n{self._tinker.reduction}\n{self._path}"
        return fingerprint(f"{type(loss).__name__}\n{where}\n{settings}", samples, (), self.step)

    def _start(self, adapter: Adapter | None, settings: TrainingSettings) -> tuple[str | None, bool]:
        """The checkpoint to start from. Raises ``TrainingError`` where the service cannot."""
        if adapter is None:
            known = self._service.models()
            if known and self._base_model not in known:
                raise TrainingError(
                    f"the Tinker service at {self._tinker.address} does not train {self._base_model!r}: set "
                    f"[rl.tinker] model to one of {', '.join(known[:8])}"
                )
            return None, False
        try:
            origin = TinkerOrigin.model_validate_json((Path(adapter.path) / ORIGIN).read_bytes())
        except (OSError, ValidationError) as error:
            raise TrainingError(
                f'{adapter.name} was not trained by engine = "tinker", and the service takes no adapters from '
                f'elsewhere ({describe(error)}): start from base, or set engine = "local"'
            ) from error
        if origin.address != self._tinker.address:
            raise TrainingError(
                f"{adapter.name} is kept by the service at {origin.address}, not {self._tinker.address}: set "
                "[rl.tinker] base_url to that, or start from base"
            )
        self._check_path(origin.path, settings)
        return origin.path, False

    def _check_path(self, path: str, settings: TrainingSettings) -> None:
        base_model, rank = self._service.checkpoint(path)
        if base_model != self._base_model:
            raise TrainingError(
                f"the checkpoint {path} is of base model {base_model!r}, and {self._base_model!r} is trained: set "
                "[rl.tinker] model, or start from base"
            )
        if rank not in (None, settings.lora_rank):
            raise TrainingError(
                f"the checkpoint {path} has rank {rank}, and [rl.training] lora_rank is {settings.lora_rank}: set "
                f"lora_rank = {rank}, or start from base"
            )

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


def _own_loss(loss: MicroBatchLoss, settings: TrainingSettings) -> tuple[str, Mapping[str, float]] | None:
    """The service's loss and its options, where it has the one of the settings. Its bounds are absolute ratios."""
    objective = algorithm_of(settings).objective
    if not isinstance(loss, Reinforcement) or objective not in ("ppo", "cispo"):
        return None
    if settings.dual_clip or settings.correction != "none":
        return None
    low, high = clip_bounds(settings)
    return objective, {"clip_low_threshold": 1 - low, "clip_high_threshold": 1 + high}


def _micro_batch(live: list[TrainingSample], logprobs: Tensor, weights: Tensor) -> MicroBatch:
    return MicroBatch(live, logprobs, -logprobs.detach(), weights)
