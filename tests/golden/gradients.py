"""The gradients of ``openhands-rl train`` in float64, by every algorithm and option of the loss, on a tiny Llama.

A script, ``gradients.py CASE ...`` (none: all cases): all of torch's float32 is float64 here, before anything is
imported that names it. The weights come from numpy's frozen generator; a parameter is found by its first value. The
episodes, ``gradients_episodes.json.zst``, were drawn: three groups of four with rewards of steps, logprobs near the
policy's, rewritten histories, one cut off, a group with a temperature and one with branches of a search.
"""

# ruff: noqa: E402
from __future__ import annotations

import contextlib
import gc
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)

import numpy as np
from golden import read
from tiny_model import write_adapter, write_model
from train_store import store_of

from openhands_rl_plugin import Trajectory, cli
from openhands_rl_plugin.models.adapters.store import AdapterStore

gc.freeze()  # each training looks for garbage, and not through all of that

SHAPE = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": "sft"},
    "rejection-sampling": {"algorithm": "rejection-sampling", "keep_best": 2},
    **{name: {"algorithm": name} for name in ("reinforce++", "reinforce++-baseline", "rloo", "grpo", "dr-grpo")},
    **{name: {"algorithm": name} for name in ("dapo", "gspo", "cispo", "dpo")},
    "recorded": {"algorithm": "dapo", "old_logprobs": "recorded"},
    "recomputed": {"algorithm": "dapo", "old_logprobs": "recomputed"},
    "k3": {"algorithm": "grpo", "kl": "k3", "kl_coefficient": 0.1},
    "entropy": {"algorithm": "grpo", "entropy_coefficient": 0.05},
    "truncate": {"algorithm": "dapo", "correction": "truncate", "correction_high": 1.05},
    **{f"by {each}": {"algorithm": "dapo", "aggregation": each} for each in ("sequence", "fixed")},
    "overlong": {"algorithm": "grpo", "overlong": "leave-out"},
    "step rewards": {"algorithm": "grpo", "step_rewards": "environment", "discount": 0.9},
    "states": {"algorithm": "grpo", "state_weight": 0.5},
    "search's rewards": {"algorithm": "grpo", "step_rewards": "search"},
    "preferred proposals": {"algorithm": "dpo", "tree": "proposals"},
    "small passes": {"algorithm": "grpo", "max_tokens_per_micro_batch": 1},
    "four steps": {"algorithm": "grpo", "num_epochs": 2, "batch_size": 6, "learning_rate": 1e-2},
    "rslora": {"algorithm": "grpo", "lora_variant": "rslora"},
    "all weights, sft": {"algorithm": "sft", "method": "full"},
    "all weights, grpo": {"algorithm": "grpo", "method": "full"},
}


def filled(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Other weights of the same shapes, the same with every release of torch."""
    draw = np.random.RandomState(seed)
    made = {}
    for name in sorted(weights):
        found = torch.from_numpy(draw.standard_normal(tuple(weights[name].shape)))
        made[name] = 1 + 0.1 * found if "norm" in name else 0.3 * found
    return made


def write_policy(folder: Path) -> tuple[Path, Path]:
    """The model's folder and that of an adapter of it."""
    model = write_model(folder / "tiny", num_key_value_heads=1, head_dim=8, tie_word_embeddings=False, **SHAPE)
    adapter = write_adapter(folder / "adapter", model, seed=0, rank=2)
    for at, file in enumerate((model / "model.safetensors", adapter / "adapter_model.safetensors")):
        weights = filled(safetensors.torch.load_file(file), at)
        safetensors.torch.save_file(weights, file, {"format": "pt"})
    return model, adapter


def gradients_of(case: dict[str, Any], model: Path, adapter: Path, episodes: list[Trajectory], folder: Path) -> Any:
    """Of the last optimiser step, by name, and the first step's line of ``metrics.jsonl``."""

    store_of(folder / "store", *episodes)
    full = case.get("method") == "full"
    rslora = case.get("lora_variant") == "rslora"
    if not full:

        def copy(to: Path) -> None:
            for file in adapter.iterdir():
                written = file.read_bytes()
                if rslora:
                    written = written.replace(b'"use_rslora": false', b'"use_rslora": true')
                to.joinpath(file.name).write_bytes(written)

        AdapterStore(folder / "adapters").create("policy", copy, base_model="tiny")
    trained = model / "model.safetensors" if full else adapter / "adapter_model.safetensors"
    weights = safetensors.torch.load_file(trained)
    names: dict[int, str] = {}
    found: dict[str, list[float]] = {}
    step = torch.optim.AdamW.step

    def recording(self: torch.optim.AdamW, *args: Any, **options: Any) -> Any:
        for parameter in (each for group in self.param_groups for each in group["params"]):
            value = parameter.detach()
            if id(parameter) not in names:
                same = [n for n, w in weights.items() if w.shape == value.shape and torch.equal(w, value)]
                names[id(parameter)] = same[0]
            found[names[id(parameter)]] = [float(f"{each:.10g}") for each in parameter.grad.flatten().tolist()]
        return step(self, *args, **options)

    torch.optim.AdamW.step = recording
    options = {"dtype": "float32", "lora_rank": 2, "lora_alpha": 4, "num_epochs": 1, "batch_size": 64, **case}
    words = ["--set", *(f"training.{name}={str(value).lower()}" for name, value in options.items())]
    words += ["training.max_grad_norm=1e9", "--reward=return", f"--model={model}", f"--adapters={folder / 'adapters'}"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = cli.main(["train", str(folder / "store"), *words])
    torch.optim.AdamW.step = step
    assert status == 0, printed.getvalue()
    [metrics] = (folder / "adapters").glob("*.training/metrics.jsonl")
    line = json.loads(metrics.read_text().splitlines()[0])
    kept = ("loss", "gradient_norm", "ratio", "approx_kl", "clip_share", "entropy", "kl", "weight", "drift")
    return {"gradients": found, "metrics": {name: line[name] for name in kept if name in line}}


def main() -> None:
    episodes = [Trajectory.model_validate(each) for each in read("gradients_episodes")]
    with tempfile.TemporaryDirectory() as folder:
        model, adapter = write_policy(Path(folder))
        made = {}
        for at, name in enumerate(sys.argv[1:] or CASES):
            own = Path(folder) / str(at)
            own.mkdir()
            made[name] = gradients_of(CASES[name], model, adapter, episodes, own)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
