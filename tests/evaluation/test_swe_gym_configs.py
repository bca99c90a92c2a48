"""The configurations of the published SWE-Gym runs are valid, and their sizes follow from the shapes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.training.learn import estimate_memory, model_size

FOLDER = Path(__file__).parents[2] / "evaluation" / "configs" / "swe-gym"
CONFIGS = sorted(FOLDER.glob("*.toml"))
BILLIONS = {"7b": 7.62, "14b": 14.77, "32b": 32.76}


def model_of(config: Path) -> Path:
    return FOLDER / f"qwen2.5-coder-{config.stem.rpartition('-')[2]}"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_they_dry_run_without_weights_and_episodes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_of(config)
    verifier = ["--verifier"] if "verifier" in config.stem else []
    assert cli.main(["train", "--dry-run", *verifier, "--model", str(model), "--config", str(config)]) == 0
    printed = capsys.readouterr().out
    settings = load_settings(config).training
    size = model_size(model, settings)
    assert f"{size.parameters:,} parameters" in printed and f"{size.trained:,}" in printed
    assert f"{size.parameters / 1e9:.2f}" == f"{BILLIONS[model.name.rpartition('-')[2]]:.2f}"
    assert f"memory: about {estimate_memory(model, settings, 0).total / 1e9:.2f} GB" in printed
    assert settings.method == ("full" if "full" in config.stem else "lora")
    assert settings.method == "full" or settings.lora_rank == 64
    longest = load_settings(config).verifier.max_length if verifier else 0
    shares = {count: estimate_memory(model, settings, longest, count).total for count in (2, 4, 8, 16, 32)}
    for count, share in shares.items():
        line = next(each for each in printed.splitlines() if each.startswith(f"    {count:2} processes"))
        assert f"about {share / 1e9:.2f} GB (" in line and line.endswith("; fits 80 GB") == (share <= 80e9)
    totals = list(shares.values())
    assert totals == sorted(totals, reverse=True) and shares[8] < estimate_memory(model, settings, longest).total
    assert shares[16] < 80e9, "16 GPUs of the published runs' size hold it"


PAGE = (Path(__file__).parents[2] / "docs/howto/scale-out.md").read_text(encoding="utf-8")
LONG = ["--lora-rank", "32", "--dtype", "bfloat16", "--max-tokens-per-micro-batch", "65536"]
LONG += ["--gradient-checkpointing", "true"]


def test_an_adapter_for_32b_at_64k(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--dry-run", "--model", str(FOLDER / "qwen2.5-coder-32b"), *LONG]
    assert " ".join(LONG) in " ".join(PAGE.replace("\\\n", " ").split()), "the page's command"
    assert cli.main(words) == 0
    alone, *split = (line for line in capsys.readouterr().out.splitlines() if " GB (" in line)
    (eight,) = (line for line in split if line.startswith("     8 processes"))
    assert "about 137.7" in alone and "about 85.0" in eight
    assert "138 GB" in PAGE and "85 GB" in PAGE


def test_there_is_one_for_every_published_run() -> None:
    names = [f"policy-{method}-{size}" for method in ("full", "lora") for size in ("14b", "32b", "7b")]
    assert [path.stem for path in CONFIGS] == [*names, "verifier-lora-32b"]


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"head_dim": 48, "tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"head_dim": 20}),
        ("smollm3", {"tie_word_embeddings": True}),
    ],
)
def test_shapes_without_weights_are_those_of_transformers(
    model_type: str, changes: dict[str, object], tmp_path: Path
) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 256, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(model_type, **{**shape, **heads, **changes})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config)
    size = model_size(tmp_path, TrainingSettings())
    assert size.parameters == sum(parameter.numel() for parameter in expected.parameters())


def test_a_full_run_wants_its_optimiser_and_a_quantised_base_a_quarter() -> None:
    model = FOLDER / "qwen2.5-coder-7b"
    settings = TrainingSettings(method="full", algorithm="sft", dtype="bfloat16")
    count = model_size(model, settings).trained
    assert estimate_memory(model, settings, 0).weights == 18 * count
    assert estimate_memory(model, settings.model_copy(update={"dtype": "float32"}), 0).weights == 16 * count
    half = TrainingSettings(dtype="bfloat16")
    quantised = estimate_memory(model, half.model_copy(update={"method": "qlora"}), 0).weights
    assert 0.3 < quantised / estimate_memory(model, half, 0).weights < 0.45, "embeddings and output stay as they are"
