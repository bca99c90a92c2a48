"""A GPU computes what the processor does: logprobs and gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_samples import make_samples
from tiny_model import write_model
from torch import Tensor

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.data.packing import lay_out
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy

pytestmark = pytest.mark.gpu

SETTINGS = TrainingSettings(dtype="float32", lora_rank=4, learning_rate=1e-3, num_epochs=1, batch_size=8)
NATS = {"float32": 5e-3, "bfloat16": 0.1}
"""Mean absolute difference of logprobs; bfloat16 on both sides."""

COSINES = {"float32": 0.999, "bfloat16": 0.98}


@pytest.fixture(params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", model_type=request.param, initializer_range=0.05, num_hidden_layers=3)


def on(device: str, monkeypatch: pytest.MonkeyPatch, model: Path, settings: TrainingSettings) -> TrainablePolicy:
    with monkeypatch.context() as patch:
        if device == "cpu":
            patch.setattr(torch.cuda, "is_available", lambda: False)
        policy = TrainablePolicy(model, settings)
    assert policy.device.type == device
    assert policy.packing.packed, policy.packing.reason
    torch.manual_seed(3)
    for parameter in policy.parameters.values():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape) * 0.05)
    return policy


def numbers_of(policy: TrainablePolicy, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """The logprobs of all trained tokens, and the gradient of a policy gradient as one vector."""
    wanted = [(s, t) for s, sample in enumerate(samples) for t, sampled in enumerate(sample.mask) if sampled]
    logprobs, _ = policy.logprobs(lay_out([sample.input_ids for sample in samples]), wanted)
    advantages = torch.tensor([samples[s].advantage for s, _ in wanted], device=policy.device)
    (logprobs * advantages).mean().backward()
    gradients = [each.grad.flatten().cpu() for each in policy.parameters.values() if each.grad is not None]
    return logprobs.detach().cpu(), torch.cat(gradients)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("together", [True, False], ids=["packed", "alone"])
def test_logprobs_and_gradients(dtype: str, together: bool, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS.model_copy(update={"dtype": dtype, "gradient_checkpointing": True})
    samples = make_samples(6 if together else 1, length=200)
    found, slope = numbers_of(on("cuda", monkeypatch, model, settings), samples)
    expected, right = numbers_of(on("cpu", monkeypatch, model, settings), samples)
    assert (found - expected).abs().mean() < NATS[dtype]
    assert torch.cosine_similarity(slope, right, dim=0) > COSINES[dtype]
    assert slope.norm() / right.norm() == pytest.approx(1.0, abs=0.05)
