"""A trainer whose weights are on this machine: forward and backward passes, AdamW, checkpoints of both."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, StorageError, TrainingError, describe
from openhands_rl_plugin.core.files import draft_folder, file_sha256, sync
from openhands_rl_plugin.core.types import Adapter, Frozen, Sample
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE, weights_sha256
from openhands_rl_plugin.training.distributed.ranks import (
    all_reduce_metrics,
    full_tensor,
    is_sharded,
    local_shard,
    shard_like,
    shard_micro_batches,
)
from openhands_rl_plugin.training.learn import WITHOUT_EFFECT
from openhands_rl_plugin.training.losses.logprobs import Diagnostics
from openhands_rl_plugin.training.losses.losses import MicroBatch, MicroBatchLoss, TrainingSample
from openhands_rl_plugin.training.policies.adapter_shape import check_start
from openhands_rl_plugin.training.policies.full_policy import FullPolicy
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.policies.packed_model import PackedModel
from openhands_rl_plugin.training.trainer.old_logprobs import micro_batch_logprobs
from openhands_rl_plugin.training.trainer.resume import fingerprint
from openhands_rl_plugin.training.trainer.trainer import Trainer

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class LocalTrainer(Trainer):
    """A model of this machine and its optimiser, in one process or sharded over several."""

    def __init__(self, policy: PackedModel, settings: TrainingSettings, *, version: int = 0) -> None:
        super().__init__(policy, settings, version=version)
        self._policy: PackedModel = policy
        self.parameters = policy.parameters
        """The float32 weights that are trained, by name."""
        self._optimizer = torch.optim.AdamW(
            list(policy.parameters.values()),
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _state(self) -> dict[str, Tensor]:
        tensors = {f"weights.{name}": tensor for name, tensor in self._policy.weights().items()}
        for name, parameter in self._policy.parameters.items():
            for key, moment in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = local_shard(moment)
        return tensors

    def _restore(self, tensors: dict[str, Tensor], counters: dict[str, str], source: str) -> None:
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            groups.setdefault(group, {})[rest] = tensor
        try:
            step, version = int(counters["step"]), int(counters.get("version", self._version))
            moments = {name: {key: groups[key][name] for key in _MOMENTS} for name in groups.get("exp_avg", {})}
            parameters = {name: self._policy.parameters[name] for name in moments}
        except (KeyError, ValueError) as error:
            raise TrainingError(f"{source} does not hold a training state of this policy") from error
        self._policy.set_weights(groups.get("weights", {}), source)
        self._optimizer.state.clear()
        for name, parameter in parameters.items():
            self._optimizer.state[parameter] = {
                # Where the step is counted on the device, fused AdamW wants it there.
                key: moment.to(parameter.device) if key == "step" else shard_like(parameter, moment)
                for key, moment in moments[name].items()
            }
        self.step, self._version = step, version

    def _update(
        self, live: list[TrainingSample], weights: list[float], loss: MicroBatchLoss
    ) -> tuple[float, float, Diagnostics]:
        share_of = dict(zip(map(id, live), weights, strict=True))
        self._optimizer.zero_grad(set_to_none=True)
        total, diagnostics = 0.0, Diagnostics()
        mine, idle = shard_micro_batches(self._ranks, live, self._micro_batch_tokens, whole_units=loss.whole_units)
        for group in mine:
            each = [share_of[id(item)] for item in group]
            share, found = self._backward(group, each, loss, len(group) / len(live))
            total, diagnostics = total + share, diagnostics + found
        for group in idle:
            self._backward(group, [0.0] * len(group), loss)
        for parameter in self.parameters.values():
            if parameter.grad is None:  # of an expert that no token was sent to: every rank has the same gradients
                parameter.grad = torch.zeros_like(parameter)
        if not self._policy.sharded:  # FSDP sums them in the backward pass
            self._ranks.all_reduce(
                [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
            )
        total, diagnostics = all_reduce_metrics(self._ranks, total, diagnostics)
        norm = self._clip_gradients()
        if not (math.isfinite(total) and math.isfinite(norm)):
            self._optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"step {self.step + 1}: the loss is {total} and the gradient norm {norm}; the weights are unchanged. "
                "Lower learning_rate, or check the recorded logprobs"
            )
        self._optimizer.param_groups[0]["lr"] = self._rate
        self._optimizer.step()
        return total, norm, diagnostics

    def _clip_gradients(self) -> float:
        """Clip by global norm; returns the norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters.values(), self.settings.max_grad_norm)
        return full_tensor(norm).item()

    def _backward(
        self, group: list[TrainingSample], weights: list[float], loss: MicroBatchLoss, portion: float = 0.0
    ) -> tuple[float, Diagnostics]:
        """Accumulate the gradient of one micro-batch, ``portion`` of the batch; returns its share of the loss."""
        logprobs, entropies = micro_batch_logprobs(self._policy, group)
        one = MicroBatch(group, logprobs, entropies, logprobs.new_tensor(weights))
        share, diagnostics = loss(one)
        share = share + portion * self._policy.router_loss()
        share.backward()
        return share.item(), diagnostics

    def _fingerprint(self, samples: list[Sample], loss: MicroBatchLoss) -> str:
        settings = self.settings.model_dump_json(exclude=WITHOUT_EFFECT)
        what = f"{type(loss).__name__}\n{self._policy.model_path}\n{settings}"
        # Sums of integers do not depend on the sharding of the weights.
        parts = self._policy.weights().values()
        sums = torch.stack([part.contiguous().view(torch.int32).sum(dtype=torch.int64).cpu() for part in parts])
        if self._policy.sharded:
            self._ranks.all_reduce([sums])
        return fingerprint(what, samples, sums.tolist(), self.step)


class LoraTrainer(LocalTrainer):
    """One adapter of one base model and its optimiser.

    ``adapter``: start from its weights instead of fresh ones. With ``method = "qlora"`` the base is quantised. Raises
    ``TrainingError`` when the model or the adapter cannot be used.
    """

    ENGINE = "local"
    """The value of ``[rl.training] engine`` that this trainer is."""

    def __init__(
        self,
        model_path: str | Path,
        settings: TrainingSettings,
        *,
        adapter: Adapter | None = None,
    ) -> None:
        if settings.engine != self.ENGINE:
            raise ConfigError(
                f'[rl.training] engine = "{settings.engine}": only `train` and `loop` train by it; set "{self.ENGINE}"'
            )
        if settings.nproc_per_node > 1:
            raise ConfigError(
                f"[rl.training] nproc_per_node = {settings.nproc_per_node}: only `train` of a policy and `loop` start "
                "processes; set 1"
            )
        if adapter is not None:
            _check_file(adapter)
            check_start(adapter, settings)
        self._adapter = self._open(model_path, settings)
        if adapter is not None:
            self._adapter.load(Path(adapter.path))
        if is_sharded(settings.sharding):
            self._adapter.shard()
        super().__init__(self._adapter, settings, version=adapter.version if adapter is not None else 0)

    def _open(self, model_path: str | Path, settings: TrainingSettings) -> TrainablePolicy:
        if settings.method != "qlora":
            return TrainablePolicy(model_path, settings)
        from openhands_rl_plugin.training.policies.quantised import QuantisedPolicy  # needs bitsandbytes

        return QuantisedPolicy(model_path, settings)

    @property
    def servers(self) -> tuple[str, ...]:
        """As far as the architecture and the adapter's layers say."""
        return self._adapter.servers

    def save_adapter(self, directory: Path) -> None:
        """Write the adapter in PEFT's format (adapter_config.json, adapter_model.safetensors)."""
        directory.mkdir(parents=True, exist_ok=True)
        self._adapter.save(directory)


def _check_file(adapter: Adapter) -> None:
    path = Path(adapter.path) / WEIGHTS_FILE
    try:
        digest = file_sha256(path)
    except OSError as error:
        raise TrainingError(f"adapter {adapter.name}: cannot read {path}: {error.strerror}") from error
    if digest != adapter.sha256:
        raise TrainingError(f"adapter {adapter.name}: {path} was changed since it was made (sha256 differs)")


MANIFEST = "trained.json"


class TrainedModel(Frozen):
    """The manifest of a trained model directory; ``sha256``: the digest of every weights file, by name."""

    path: str
    base_model: str
    step: int
    sha256: dict[str, str]
    metrics: dict[str, float]


class FullTrainer(LocalTrainer):
    """All weights of a model and their optimiser. Raises ``TrainingError`` when the model cannot be trained.

    There is no copy of the model that training began with, so that a KL term is refused; the logprobs that ratios and
    DPO are relative to are computed before the first step. ``adapter``: a version that is a whole model, whose weights
    are trained further instead of those in ``model_path``.
    """

    def __init__(self, model_path: str | Path, settings: TrainingSettings, *, adapter: Adapter | None = None) -> None:
        if adapter is not None:
            _check_weights(adapter)
            check_start(adapter, settings)
            model_path = adapter.path
        policy = FullPolicy(model_path, settings)
        super().__init__(policy, settings, version=adapter.version if adapter is not None else 0)
        self._model = policy
        self._optimizer.register_step_post_hook(lambda *_: policy.round())

    def hand_over(self) -> None:
        """Send this rank's shard of the weights to rank 0; called by all others while rank 0 calls ``save_model``."""
        if self._model.sharded:
            for _ in self._model.whole():
                pass

    def save_model(self, directory: Path, *, base_model: str, metrics: dict[str, float] | None = None) -> TrainedModel:
        """Write a model directory that any server can load, atomically; an existing one is refused.

        Raises ``StorageError``.
        """
        target = directory.expanduser()
        if target.exists():
            raise StorageError(f"{target} is there already: a model is never overwritten; choose another directory")
        try:
            with draft_folder(target.parent, ".new-") as fresh:
                self._model.save(fresh)
                made = TrainedModel(
                    path=str(target),
                    base_model=base_model,
                    step=self.step,
                    sha256={file.name: file_sha256(file) for file in sorted(fresh.glob("*.safetensors"))},
                    metrics=metrics or {},
                )
                (fresh / MANIFEST).write_text(made.model_dump_json(indent=1), encoding="utf-8")
                for path in (*fresh.iterdir(), fresh):
                    sync(path)
                os.rename(fresh, target)
        except OSError as error:
            raise StorageError(f"the model cannot be written to {target}: {describe(error)}") from error
        return made

    def save_adapter(self, directory: Path) -> None:
        """Write the whole model into ``directory``, in the layout of Hugging Face, as a version of its own."""
        directory.mkdir(parents=True, exist_ok=True)
        self._model.save(directory)


def _check_weights(adapter: Adapter) -> None:
    path = Path(adapter.path)
    try:
        digest = weights_sha256(path)
    except OSError as error:
        raise TrainingError(f"{adapter.name}: cannot read the weights in {path}: {error.strerror}") from error
    if digest != adapter.sha256:
        raise TrainingError(f"{adapter.name}: the weights in {path} were changed since they were made (sha256 differs)")
