"""Products on a GPU are by tensor cores: float32 ones by TF32, none in a bfloat16 step, and positions stay exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_samples import make_samples
from matrix_products import matrix_products
from tiny_model import write_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.training.policies import packed_attention
from openhands_rl_plugin.training.policies.packed_model import keep_positions_exact, use_tensor_cores
from openhands_rl_plugin.training.trainer.local_trainer import LoraTrainer

BFLOAT16 = TrainingSettings(dtype="bfloat16", num_epochs=1, batch_size=2, lora_rank=4)


@pytest.fixture(autouse=True)
def own_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def causal(query: Tensor, key: Tensor, value: Tensor, rows: object, scaling: float, window: int | None) -> Tensor:
    found = nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return found.transpose(1, 2)


def step_of(model: Path, **changes: Any) -> list[Any]:
    """The products of a whole training step of single sequences, with recomputed layers."""
    settings = BFLOAT16.model_copy(update={"gradient_checkpointing": True, "max_tokens_per_micro_batch": 1, **changes})
    trainer = LoraTrainer(model, settings)
    found = matrix_products(lambda: trainer.reinforce(make_samples(2)))
    assert len(found) > 50, "the profiler saw no products"
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_bfloat16_step_has_no_float32_product_outside_attention(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "attention_in_blocks", causal)
    assert [each for each in step_of(write_model(tmp_path / "model", model_type=family)) if each.in_float32] == []


def test_float32_products_are_seen(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "attention_in_blocks", causal)
    assert any(each.in_float32 for each in step_of(model, lora_variant="dora"))


def rotary_of(width: int = 64) -> tuple[nn.Module, Tensor]:
    config = AutoConfig.for_model(
        "llama", hidden_size=2 * width, num_attention_heads=2, num_hidden_layers=1, vocab_size=8, intermediate_size=8
    )
    base = AutoModelForCausalLM.from_config(config)
    keep_positions_exact(base)
    rotary = base.model.rotary_emb
    exact = torch.arange(40_000, dtype=torch.float64)[:, None] * rotary.inv_freq.double()[None]
    return rotary, torch.cat([exact, exact], 1)


def test_positions_are_multiplied_in_full_float32_whatever_happens() -> None:
    rotary, _ = rotary_of()
    seen = []
    rotary.register_forward_pre_hook(lambda *_: seen.append(torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("high")
    rotary(torch.zeros(1), torch.arange(4)[None])
    with pytest.raises((AttributeError, TypeError)):
        rotary(None, None)
    assert seen == ["highest", "highest"]
    assert torch.get_float32_matmul_precision() == "high"


def test_processors_keep_full_float32(model: Path) -> None:
    use_tensor_cores(torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("family", ["llama", "qwen3"])
    def test_a_bfloat16_step_has_no_float32_product(self, family: str, tmp_path: Path) -> None:
        model = write_model(tmp_path / "model", model_type=family)
        for tokens in (1, 4096):
            found = step_of(model, max_tokens_per_micro_batch=tokens)
            assert [each for each in found if each.in_float32] == []
            assert torch.get_float32_matmul_precision() == "high"

    def test_positions_are_exact(self) -> None:
        rotary, exact = rotary_of()
        torch.set_float32_matmul_precision("high")
        rotary.cuda()
        cosine, _ = rotary(torch.zeros(1, device="cuda"), torch.arange(40_000, device="cuda")[None])
        assert (cosine[0].cpu().double() - exact.cos()).abs().max() < 5e-3  # float32's own error at 40,000 radians
