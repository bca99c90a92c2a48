"""A service of the Tinker API in this process: our policy and torch's AdamW, reduced as the real servers do.

No recording: the formulas of its losses and reductions are those that were read in SkyRL 0.4.0 (``loss_fns.py``,
``jax.py``, ``ppo_utils.py``), whose real server ``.ci/peers tinker`` compares with the local trainer.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.contrib.trainers.tinker import DatumRow, RemoteAdapter
from openhands_rl_plugin.training.data.packing import lay_out
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy


class TinkerDouble:
    """Keeps its checkpoints in memory."""

    def __init__(self, model: Path, *, reduction: str = "sum") -> None:
        self.model, self.reduction = model, reduction
        self.saved: dict[str, tuple[TrainingSettings, dict[str, Tensor], dict]] = {}

    def create(self, base_model: str, training: TrainingSettings) -> RemoteAdapter:
        return _Adapter(self, training)

    def open(self, path: str, *, optimizer: bool) -> RemoteAdapter:
        wanted, weights, moments = self.saved[path]
        made = _Adapter(self, wanted)
        made.policy.set_weights(weights, path)
        if optimizer:
            made.optimizer.load_state_dict(moments)
        return made


class _Adapter:
    def __init__(self, service: TinkerDouble, wanted: TrainingSettings) -> None:
        self.service, self.wanted = service, wanted
        self.policy = TrainablePolicy(
            service.model, TrainingSettings(lora_rank=wanted.lora_rank, seed=wanted.seed, dtype="float32")
        )
        self.optimizer = torch.optim.AdamW(list(self.policy.parameters.values()), lr=0.0)
        self.sequences = 0

    def forward(self, rows: Sequence[DatumRow]) -> list[list[float]]:
        with torch.no_grad():
            return [self._row(row).tolist() for row in rows]

    def forward_backward(self, rows: Sequence[DatumRow]) -> None:
        for row in rows:
            inputs = {name: torch.tensor(values) for name, values in row["loss_fn_inputs"].items()}
            logprobs = self._row(row)
            weights = inputs.get("weights", torch.ones(len(logprobs)))
            total = -(weights * torch.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]).sum()
            (total / weights.sum() if self.service.reduction == "sequence-mean" else total).backward()
        self.sequences += len(rows)

    def step(self, learning_rate: float, *, weight_decay: float = 0.0, grad_clip_norm: float = 0.0) -> float | None:
        parameters = list(self.policy.parameters.values())
        if self.service.reduction == "sequence-mean":
            for parameter in parameters:
                parameter.grad /= self.sequences
        norm = torch.nn.utils.clip_grad_norm_(parameters, grad_clip_norm or float("inf")).item()
        own = {"lr": learning_rate, "weight_decay": weight_decay}
        self.optimizer.param_groups[0].update(own, betas=(0.9, 0.999))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sequences = 0
        return norm

    def save(self, name: str) -> str:
        path = f"tinker://run/weights/{name}"
        moments = {key: value for key, value in self.optimizer.state_dict().items()}
        weights = {key: value.detach().clone() for key, value in self.policy.weights().items()}
        self.service.saved[path] = (self.wanted, weights, _copied(moments))
        return path

    def export(self, name: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder, io.BytesIO() as made:
            self.policy.save(Path(folder))
            with tarfile.open(fileobj=made, mode="w:gz") as tar:
                tar.add(folder, arcname="")
            return made.getvalue()

    def close(self) -> None:
        """Nothing is held."""

    def _row(self, row: DatumRow) -> Tensor:
        ids = (*row["model_input"], int(row["loss_fn_inputs"]["target_tokens"][-1]))
        return self.policy.logprobs(lay_out([ids]), [(0, at) for at in range(1, len(ids))])[0]


def _copied(state: dict) -> dict:
    moments = {at: {key: value.clone() for key, value in each.items()} for at, each in state["state"].items()}
    return {"state": moments, "param_groups": [dict(each) for each in state["param_groups"]]}
