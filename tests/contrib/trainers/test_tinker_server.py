"""``engine = "tinker"`` on the real server: SkyRL 0.4.0 with JAX on the processor, by the real client.

.ci/peers tinker
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from subprocess import run

import pytest
import torch
from engines_shown import SHOWN
from made_samples import learn, make_samples, segmented
from safetensors.torch import load_file
from tinker_server import PYTHON, skyrl_server
from tiny_model import write_model

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.contrib.trainers.tinker import RemoteAdapter, TinkerService, TinkerSettings
from openhands_rl_plugin.contrib.trainers.tinker_trainer import TinkerTrainer
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.learn import create_version
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHOWS = SHOWN["tinker"]
SETTINGS = TrainingSettings(
    engine="tinker", learning_rate=1e-2, num_epochs=1, batch_size=6, lora_rank=4, old_logprobs="recorded"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tinker") / "model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[TinkerSettings]:
    pytest.importorskip("tinker", reason="the client is not installed: .ci/peers tinker")
    with skyrl_server(model, model.parent / "server") as url:
        yield TinkerSettings(base_url=url, model=str(model))


@pytest.fixture(scope="module")
def start(server: TinkerSettings, model: Path) -> Adapter:
    """A version after one step on the server, so that both halves of every layer have a gradient."""
    store = AdapterStore(model.parent / "adapters")
    trainer = TinkerTrainer(SETTINGS, server, "policy", service=TinkerService(server))
    trainer.reinforce(make_samples())
    adapter, probe = create_version(
        trainer, store, "policy", base_model="policy", parent=None, steps=1, metrics={}, probe_ids=range(2, 40)
    )
    assert adapter is not None
    local = LocalTrainer(model, _local(), adapter=adapter)
    torch.testing.assert_close(probe.logprobs, local.probe(range(2, 40)).logprobs, rtol=0, atol=1e-3)
    return adapter


def _local(**changes: object) -> TrainingSettings:
    return SETTINGS.model_copy(update={"engine": "local", "dtype": "float32", **changes})


class _Plain:
    """The server's adapter whose step subtracts the gradient: with a large epsilon AdamW is linear in it."""

    def __init__(self, adapter: RemoteAdapter) -> None:
        self._adapter = adapter
        self.save, self.export, self.close = adapter.save, adapter.export, adapter.close
        self.forward, self.forward_backward = adapter.forward, adapter.forward_backward

    def step(self, learning_rate: float, **options: float) -> float | None:
        if learning_rate:
            return self._adapter.step(1e5, **(options | {"eps": 1e5, "grad_clip_norm": 0.0}))
        return self._adapter.step(learning_rate, **options)


class _PlainService(TinkerService):
    def create(self, base_model: str, training: TrainingSettings) -> RemoteAdapter:
        return _Plain(super().create(base_model, training))

    def open(self, path: str, *, optimizer: bool) -> RemoteAdapter:
        return _Plain(super().open(path, optimizer=optimizer))


def _weights(directory: str | Path) -> dict[str, torch.Tensor]:
    return load_file(Path(directory) / "adapter_model.safetensors")


def _difference(after: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]) -> torch.Tensor:
    assert after.keys() == before.keys() and len(after) == 28
    return torch.cat([(after[name] - before[name]).flatten() for name in sorted(after)])


def _cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(left, right, dim=0).item()


def test_it_is_the_release_of_the_table(server: TinkerSettings) -> None:
    program = "from importlib.metadata import version; print(version('skyrl'))"
    found = run([os.environ[PYTHON], "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    assert {"tinker": version("tinker"), "skyrl": found} == SHOWS.packages


@pytest.mark.parametrize("algorithm", SHOWS.gradients)
def test_the_gradient_is_that_of_the_local_trainer(
    algorithm: str, server: TinkerSettings, model: Path, start: Adapter, tmp_path: Path
) -> None:
    """Compared: the change of all 28 tensors by a plain gradient step there, and the gradient here."""
    chosen = {"algorithm": algorithm, "old_logprobs": "auto", **SHOWS.gradients[algorithm]}
    samples = make_samples() if algorithm == "dpo" else segmented(make_samples())
    local = LocalTrainer(model, _local(**chosen), adapter=start)
    learn(local, samples, algorithm)
    local.save_adapter(tmp_path / "names")
    expected = {name: parameter.grad for name, parameter in local.parameters.items() if parameter.grad is not None}

    remote = TinkerTrainer(
        SETTINGS.model_copy(update=chosen), server, "policy", adapter=start, service=_PlainService(server)
    )
    learn(remote, samples, algorithm)
    remote.save_adapter(tmp_path / "after")
    step = _difference(_weights(tmp_path / "after"), _weights(start.path))
    gradient = _in_order(expected, _weights(tmp_path / "names"), local)
    similarity = _cosine(-step, gradient)
    print(f"{algorithm}: cosine {similarity:.6f}")
    assert similarity > SHOWS.cosine


def _in_order(
    gradients: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], trainer: LocalTrainer
) -> torch.Tensor:
    """The gradients in the order of the names in a file, found by the values of their parameters."""
    values = {name: parameter.detach() for name, parameter in trainer.parameters.items()}
    found = []
    for name in sorted(saved):
        same = [each for each, value in values.items() if value.shape == saved[name].shape]
        own = min(same, key=lambda each: (values[each] - saved[name]).abs().sum().item())
        found.append(gradients[own].flatten())
    return torch.cat(found)
