"""The configurations of the published SWE-Gym runs are valid, and their sizes follow from the shapes alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from openhands_rl_plugin import cli
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.training.learn import memory_needed

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
    needed = memory_needed(model, settings)
    assert f"memory: about {needed / 1e9:.2f} GB" in printed
    parameters = BILLIONS[model.name.rpartition("-")[2]] * 1e9
    full = settings.method == "full"
    assert needed == pytest.approx(parameters * 16, rel=0.01) if full else parameters * 2 < needed < parameters * 3
    assert settings.method == ("full" if "full" in config.stem else "lora")
    assert settings.method == "full" or settings.lora_rank == 64


PAGE = (Path(__file__).parents[2] / "docs/howto/scale-out.md").read_text(encoding="utf-8")
LONG = ["--set", "training.lora_rank=32", "training.dtype=bfloat16", "training.max_tokens_per_micro_batch=65536"]


def test_an_adapter_for_32b_at_64k(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--dry-run", "--model", str(FOLDER / "qwen2.5-coder-32b"), *LONG]
    assert " ".join(LONG) in " ".join(PAGE.replace("\\\n", " ").split()), "the page's command"
    assert cli.main(words) == 0
    assert "about 69.8" in capsys.readouterr().out and "70 GB" in PAGE


def test_there_is_one_for_every_published_run() -> None:
    names = [f"policy-{method}-{size}" for method in ("full", "lora") for size in ("14b", "32b", "7b")]
    assert [path.stem for path in CONFIGS] == [*names, "verifier-lora-32b"]
