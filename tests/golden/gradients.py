"""The gradients of ``openhands-rl train`` in float64, by every algorithm and option of the loss, on a tiny Llama.

A script: all of torch's float32 is float64 here, before anything is imported that names it. The weights come from
numpy's frozen generator; the episodes are ``gradients_episodes.json.zst``. A parameter is found by its first value.
"""

# ruff: noqa: E402
from __future__ import annotations

import asyncio
import contextlib
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
from peft import PeftModel
from tiny_model import write_adapter, write_model
from transformers import AutoModelForCausalLM

from openhands_rl_plugin import FileTrajectoryStorage, Trajectory, cli
from openhands_rl_plugin.models.adapters.store import AdapterStore

EPISODES = "gradients_episodes"
SHAPE = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
KL = {"kl_coefficient": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"algorithm": "sft"},
    "rejection-sampling": {"algorithm": "rejection-sampling", "keep_best": 2},
    **{name: {"algorithm": name} for name in ("reinforce++", "reinforce++-baseline", "rloo", "grpo", "dr-grpo")},
    **{name: {"algorithm": name} for name in ("dapo", "gspo", "cispo", "dpo")},
    "recorded": {"algorithm": "dapo", "old_logprobs": "recorded"},
    "recomputed": {"algorithm": "dapo", "old_logprobs": "recomputed"},
    **{kind: {"algorithm": "grpo", "kl": kind, **KL} for kind in ("k1", "k2", "k3")},
    "k3 without the ratio": {"algorithm": "grpo", "kl": "k3", "kl_bias_correction": False, **KL},
    "k1 in the reward": {"algorithm": "rloo", "kl": "k1", "kl_in": "reward", **KL},
    "entropy": {"algorithm": "grpo", "entropy_coefficient": 0.05},
    "dual clip": {"algorithm": "dapo", "dual_clip": 1.1, "old_logprobs": "recorded"},
    "truncate": {"algorithm": "dapo", "correction": "truncate", "correction_high": 1.05},
    "mask": {"algorithm": "dapo", "correction": "mask", "correction_low": 0.9, "correction_high": 1.1},
    "truncate sequences": {"algorithm": "grpo", "correction": "truncate", "correction_level": "sequence"},
    "truncate products": {"algorithm": "grpo", "correction": "truncate", "correction_level": "sequence-product"},
    **{f"by {each}": {"algorithm": "dapo", "aggregation": each} for each in ("sequence", "fixed", "rollout")},
    "overlong": {"algorithm": "grpo", "overlong": "leave-out"},
    "step rewards": {"algorithm": "grpo", "step_rewards": "environment", "discount": 0.9},
    "states": {"algorithm": "grpo", "state_weight": 0.5},
    "branches": {"algorithm": "grpo", "tree": "branches"},
    "search's rewards": {"algorithm": "grpo", "step_rewards": "search"},
    "preferred proposals": {"algorithm": "dpo", "tree": "branches"},
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

    async def fill() -> None:
        async with FileTrajectoryStorage(folder / "store") as storage:
            for each in episodes:
                await storage.add(each)

    asyncio.run(fill())
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
    words = [f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in options.items()]
    words += ["--max-grad-norm=1e9", "--reward=return", f"--model={model}", f"--adapters={folder / 'adapters'}"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = cli.main(["train", str(folder / "store"), *words])
    torch.optim.AdamW.step = step
    assert status == 0, said.getvalue()
    [metrics] = (folder / "adapters").glob("*.training/metrics.jsonl")
    line = json.loads(metrics.read_text().splitlines()[0])
    kept = ("loss", "gradient_norm", "ratio", "approx_kl", "clip_share", "entropy", "kl", "weight", "drift")
    return {"gradients": found, "metrics": {name: line[name] for name in kept if name in line}}


def make_episodes() -> list[Any]:
    """Three groups of four: rewards of steps, a rewritten history, a temperature, one cut off, one with branches."""
    with tempfile.TemporaryDirectory() as folder:
        model, adapter = write_policy(Path(folder))
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        policy = PeftModel.from_pretrained(base, str(adapter), autocast_adapter_dtype=False).eval()
        return [_episode(at, policy) for at in range(12)]


def _episode(at: int, policy: Any) -> Any:
    draw = np.random.RandomState(100 + at)
    prompt = [int(each) for each in np.random.RandomState(at // 4).randint(2, 300, 9)]
    temperature = 0.8 if at // 4 == 1 else 1.0

    def sampled(context: list[int]) -> tuple[list[int], list[float]]:
        ids = [int(each) for each in draw.randint(2, 300, 4 + at % 3)]
        with torch.no_grad():
            logits = policy(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1] / temperature
        exact = torch.log_softmax(logits, -1)[range(len(ids)), ids].numpy()
        return ids, [min(-1e-3, float(each)) for each in np.round(exact + 0.15 * draw.standard_normal(len(ids)), 5)]

    def node(parent: int, context: list[int], extends: bool, given: list[int], **more: Any) -> tuple[Any, list[int]]:
        ids, logprobs = sampled(context)
        tokens = {"extends": extends, "prompt_ids": given, "sampled_ids": ids, "logprobs": logprobs}
        asked = {"temperature": temperature} if temperature != 1.0 else {}
        made = {"message": {"role": "assistant", "content": f"{ids}"}, "sampled": True, "tokens": tokens}
        ref = {"base_model": "tiny", "adapter": "policy", "version": 1}
        return {"parent": parent, **made, "policy": ref, "sampling": asked, **more}, ids

    searched = at // 4 == 2
    notes = {"value": 0.5, "visits": 3} if searched else {}
    first, ids = node(0, prompt, False, prompt, reward=float(at % 2) / 4, **notes)
    nodes = [{"parent": None, "message": {"role": "user", "content": f"task {at // 4}"}}, first]
    if searched:
        for other in range(2):
            notes = {"value": other / 3, "visits": other + 1}
            nodes.append(node(0, prompt, False, prompt, reward=0.0, simulated=True, **notes)[0])
    nodes.append({"parent": 1, "message": {"role": "user", "content": f"seen {at % 2}"}})
    given = [int(each) for each in draw.randint(2, 300, 3)]
    rewritten = at % 4 == 3
    whole = given if rewritten else prompt + ids + given
    last, _ = node(len(nodes) - 1, whole, not rewritten, given, reward=(0.0, 1.0, 0.5, 0.25)[(at + at // 4) % 4])
    return {
        **{"id": f"episode-{at}", "run_id": "run", "group_id": f"group-{at // 4}"},
        "task": {"id": f"task-{at // 4}", "environment": "grid", "split": "train"},
        "strategy": {"name": "MCTS" if searched else "StandardReAct"},
        "policy": {"base_model": "tiny", "adapter": "policy", "version": 1},
        "nodes": [*nodes, last],
        "head": len(nodes),
        "stop": "max_turns" if at == 2 else "terminated",
        "times": {"started": 1000.0 + at, "finished": 1001.0 + at},
    }


def main() -> None:
    if sys.argv[1:] == ["episodes"]:
        print(json.dumps(make_episodes()))
        return
    episodes = [Trajectory.model_validate(each) for each in read(EPISODES)]
    with tempfile.TemporaryDirectory() as folder:
        model, adapter = write_policy(Path(folder))
        made = {}
        for at, (name, case) in enumerate(CASES.items()):
            own = Path(folder) / str(at)
            own.mkdir()
            made[name] = gradients_of(case, model, adapter, episodes, own)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
