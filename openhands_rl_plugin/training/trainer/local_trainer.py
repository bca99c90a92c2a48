"""A trainer whose weights are on this machine: forward and backward passes, AdamW, checkpoints of both."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.distributed.ranks import all_reduce_metrics, shard_micro_batches
from openhands_rl_plugin.training.distributed.sharding import full_tensor, local_shard, shard_like
from openhands_rl_plugin.training.losses.logprobs import Diagnostics
from openhands_rl_plugin.training.losses.losses import MicroBatch, MicroBatchLoss
from openhands_rl_plugin.training.losses.micro_batches import TrainingSample
from openhands_rl_plugin.training.policies.packed_model import PackedModel
from openhands_rl_plugin.training.trainer.preparation import micro_batch_logprobs
from openhands_rl_plugin.training.trainer.run_files import fingerprint
from openhands_rl_plugin.training.trainer.trainer import WITHOUT_EFFECT, Trainer

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
