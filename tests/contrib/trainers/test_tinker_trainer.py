"""``engine = "tinker"`` against a service in this process; the real one: ``test_tinker_server.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_samples import adapter_of, assert_same, learn, make_samples
from safetensors.torch import load_file
from tinker_double import TinkerDouble
from tiny_model import write_model

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.contrib.trainers.tinker import TinkerSettings
from openhands_rl_plugin.contrib.trainers.tinker_trainer import TinkerTrainer
from openhands_rl_plugin.core.errors import ConfigError, TrainingError
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

SETTINGS = TrainingSettings(
    engine="tinker", learning_rate=1e-2, num_epochs=2, batch_size=2, old_logprobs="recorded", lora_rank=4
)
SLOW = pytest.mark.slow
OWN = TinkerSettings(base_url="http://127.0.0.1:9", model="tiny")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model")


def trainer_of(service: TinkerDouble, *, adapter: Adapter | None = None, **changes: object) -> TinkerTrainer:
    return TinkerTrainer(SETTINGS.model_copy(update=changes), OWN, "tiny", adapter=adapter, service=service)


@pytest.mark.parametrize("reduction", ["sum", "sequence-mean"])
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": "reinforce++-baseline"},
        pytest.param({"algorithm": "gspo", "old_logprobs": "auto"}, marks=SLOW),
        pytest.param({"algorithm": "dr-grpo", "weight_decay": 0.1, "schedule": "linear"}, marks=SLOW),
        pytest.param({"correction": "truncate", "old_logprobs": "auto"}, marks=SLOW),
        pytest.param({"algorithm": "sft", "old_logprobs": "auto"}, marks=SLOW),
        pytest.param({"algorithm": "dpo", "old_logprobs": "auto"}, marks=SLOW),
    ],
)
def test_it_trains_as_the_local_trainer_does(
    reduction: str, changes: dict[str, object], model: Path, tmp_path: Path
) -> None:
    service, algorithm = TinkerDouble(model, reduction=reduction), str(changes.get("algorithm", SETTINGS.algorithm))
    local = LocalTrainer(model, SETTINGS.model_copy(update={**changes, "engine": "local", "dtype": "float32"}))
    remote = trainer_of(service, **changes)
    expected, found = (learn(each, make_samples(), algorithm)["loss"] for each in (local, remote))
    assert found == pytest.approx(expected, rel=1e-3)
    remote.save_adapter(tmp_path / "remote")
    # The order of sums differs, and the first steps of AdamW are of a gradient's sign.
    assert_same(load_file(tmp_path / "remote/adapter_model.safetensors"), adapter_of(local, tmp_path / "local"), 2e-3)


def test_a_killed_call_continues_from_its_last_checkpoint(model: Path, tmp_path: Path) -> None:
    service, samples = TinkerDouble(model), make_samples()

    def stop(progress: dict[str, float]) -> None:
        if progress["done"] == 3:
            raise KeyboardInterrupt

    whole = trainer_of(service, checkpoint_steps=2)
    whole.reinforce(samples)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(service, checkpoint_steps=2).reinforce(samples, stop, run=tmp_path / "run")
    again = trainer_of(service, checkpoint_steps=2)
    assert again.reinforce(samples, run=tmp_path / "run")["steps"] == 6
    for trainer, name in ((whole, "whole"), (again, "again")):
        trainer.save_adapter(tmp_path / name)
    left, right = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("whole", "again"))
    assert_same(left, right, 1e-6)
    whole.save_state(tmp_path)
    with pytest.raises(TrainingError, match="another engine"):
        LocalTrainer(model, SETTINGS.model_copy(update={"engine": "local"})).load_state(tmp_path)


def test_a_key_is_not_sent_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(ValueError, match="in the clear"):
        TinkerSettings(base_url="http://trainer.example.org")
    with pytest.raises(ConfigError, match="TINKER_API_KEY is not set"):
        TinkerSettings().api_key()
