"""Tokens a second and memory of one LoRA training step on a GPU, beside TRL's, and of attention alone.

    python -m evaluation.performance.training.gpu [--json FILE] [--seconds 90] [--shape tiny]

A step is the forward and the backward pass of a policy gradient, with gradient checkpointing, in bfloat16, on a Llama
of 1.2B random parameters (the shape of Llama 3.2 1B) with rank 16 on all linear layers; the optimiser is left out.
"8k", "32k": one sequence, trained after its first quarter (here a single sequence's attention is PyTorch's flash).
"8k x 8", "32k x 8": eight sequences that share their first three quarters and are trained after them: here one packed
pass with a block mask, there eight sequences (TRL shares no prefixes), 32k tokens at a time. All sequences of a batch
are of one length, so TRL pads nothing: with rollouts as they come it pads them to the longest. Tokens a second count
the tokens of the sequences, not the computed ones, for both sides.

Sides alternate; after a first step of each kind, which compiles, steps are repeated while ``--seconds`` last; medians.
Memory is the largest that PyTorch had given out, without the other side's weights. Last, attention alone by its ways.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

from evaluation.performance.training.gpu_sides import SHAPES, Ours, Trl
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.data.layout import lay_out
from openhands_rl_plugin.training.policies import attention_on_cuda
from openhands_rl_plugin.training.policies.attention_in_blocks import attention_in_blocks
from openhands_rl_plugin.training.policies.packed_attention import attention_of
from openhands_rl_plugin.training.policies.packed_rows import PackedRows

LENGTHS = {"1.2B": (8192, 32_768), "tiny": (128, 256)}
CONTINUATIONS, SHARED, PROMPT = 8, 0.75, 0.25
REPEATS = 5


class Side(Protocol):
    """One trainer."""

    name: str
    parameters: list[Any]

    def step(self, samples: Sequence[Sample]) -> float:
        """Forward and backward; returns the loss."""
        ...


@dataclass
class Case:
    """The sequences of a step, and what was measured, by side."""

    name: str
    samples: list[Sample]
    seconds: dict[str, list[float]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(len(sample.input_ids) for sample in self.samples)


def cases_of(shape: str) -> list[Case]:
    made = []
    for length in LENGTHS[shape]:
        name = f"{length // 1024}k" if length >= 1024 else str(length)
        made.append(Case(name, [_sample(shape, length, PROMPT, 0, length)]))
        group = [_sample(shape, length, SHARED, number, length + 1) for number in range(CONTINUATIONS)]
        made.append(Case(f"{name} x {CONTINUATIONS}", group))
    return sorted(made, key=lambda case: case.tokens)


def _sample(shape: str, length: int, untrained: float, number: int, seed: int) -> Sample:
    """Sequences of one ``seed`` begin alike; ``untrained``: the share of tokens that are given."""
    start = int(length * untrained)
    vocabulary = range(2, SHAPES[shape]["vocab_size"])
    begin = random.Random(seed).choices(vocabulary, k=start)
    rest = random.Random(1000 * seed + number).choices(vocabulary, k=length - start)
    mask = tuple(at >= start for at in range(length))
    return Sample(
        trajectory_id=f"{seed}-{number}",
        leaf=0,
        input_ids=(*begin, *rest),
        mask=mask,
        logprobs=tuple(-11.0 * trained for trained in mask),
        advantage=1.0 if number % 2 else -1.0,
    )


def measure(case: Case, side: Side, device: torch.device) -> float:
    """The seconds of one step; what it took is kept in ``case`` except for those of the first."""
    for parameter in side.parameters:
        parameter.grad = None
    idle = _reset_peak(device)
    began = time.perf_counter()
    try:
        side.step(case.samples)
        _wait(device)
    except torch.OutOfMemoryError:
        case.problems[side.name] = "out of memory"
        return 0.0
    took = time.perf_counter() - began
    if side.name not in case.seconds:
        case.seconds[side.name] = []
    else:
        case.seconds[side.name].append(took)
        case.peaks[side.name] = max(case.peaks.get(side.name, 0), _peak(device) - idle)
    return took


def run(cases: Sequence[Case], sides: Sequence[Side], device: torch.device, seconds: float) -> None:
    """A first step of all, then rounds while the time lasts, the sides in turn."""
    deadline = time.perf_counter() + seconds
    took: dict[tuple[str, str], float] = {}
    for number in range(REPEATS + 1):
        for case in cases:
            for side in sides if number % 2 else sides[::-1]:
                key = (case.name, side.name)
                late = time.perf_counter() + took.get(key, 0.0) > deadline
                if side.name in case.problems or (late and len(case.seconds.get(side.name, ())) > 0):
                    continue
                took[key] = measure(case, side, device)
                print(f"round {number}: {case.name}, {side.name}: {took[key]:.2f} s", flush=True)


def attention_alone(shape: str, device: torch.device) -> dict[str, float]:
    """Milliseconds of forward and backward of one layer's attention over one sequence, by its ways."""
    heads, kv_heads, width = (
        SHAPES[shape][name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    found: dict[str, float] = {}
    for length in LENGTHS[shape]:
        rows = PackedRows(lay_out([tuple(range(length))]), device)
        inputs = [
            torch.randn(1, count, length, width, dtype=torch.bfloat16, device=device, requires_grad=True)
            for count in (heads, kv_heads, kv_heads)
        ]
        query, key, value = inputs
        scale = width**-0.5
        ways: dict[str, Callable[[], Tensor]] = {
            "chosen": partial(attention_of, query, key, value, rows, scale, None),
            "in blocks": partial(attention_in_blocks, query, key, value, rows, scale, None),
        }
        for name, way in ways.items():
            found[f"{name}, {length}"] = _milliseconds(way, inputs, device)
        if device.type == "cuda":
            with patch.object(attention_on_cuda, "_has_flash", lambda *_: False):
                found[f"FlexAttention, {length}"] = _milliseconds(ways["chosen"], inputs, device)
    return found


def _milliseconds(way: Callable[[], Tensor], inputs: Sequence[Tensor], device: torch.device) -> float:
    def once() -> None:
        found = way()
        torch.autograd.grad(found, inputs, torch.ones_like(found))

    took = []
    once()
    for _ in range(3):
        _wait(device)
        began = time.perf_counter()
        once()
        _wait(device)
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _reset_peak(device: torch.device) -> int:
    """The bytes that are given out before a step: of both sides' weights."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def figures_of(cases: Sequence[Case], sides: Sequence[Side], weights: dict[str, int]) -> list[dict[str, Any]]:
    """One entry a case and side."""
    made = []
    for case in cases:
        for side in sides:
            seconds = case.seconds.get(side.name, [])
            entry: dict[str, Any] = {"case": case.name, "side": side.name, "steps": len(seconds)}
            if side.name in case.problems:
                entry["problem"] = case.problems[side.name]
            if seconds:
                entry["seconds"] = [round(each, 4) for each in seconds]
                entry["tokens_per_second"] = round(case.tokens / statistics.median(seconds))
                entry["peak_gb"] = round((case.peaks[side.name] + weights[side.name]) / 1e9, 2)
            made.append(entry)
    return made


def print_table(figures: dict[str, Any]) -> None:
    print(
        f"\n{figures['device']}, torch {figures['torch']}, transformers {figures['transformers']}: {figures['shape']}"
    )
    for name, value in figures["attention_milliseconds"].items():
        print(f"attention alone, forward and backward, {name} tokens: {value:.2f} ms")
    print(f"{'case':10s}{'side':30s}{'tokens/s':>10s}{'peak GB':>9s}{'steps':>7s}")
    for each in figures["steps"]:
        rate, peak = each.get("tokens_per_second", each.get("problem", "-")), each.get("peak_gb", "-")
        print(f"{each['case']:10s}{each['side']:30s}{rate!s:>10s}{peak!s:>9s}{each['steps']:7d}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--seconds", type=float, default=90.0, help="for the steps, those that compile included")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.2B")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}: making two models", flush=True)
    weights: dict[str, int] = {}
    sides: list[Side] = []
    for make in (lambda: Ours(options.shape), lambda: Trl(options.shape, device, LENGTHS[options.shape][-1])):
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        sides.append(make())
        weights[sides[-1].name] = (torch.cuda.memory_allocated() if device.type == "cuda" else 0) - before
    cases = cases_of(options.shape)
    run(cases, sides, device, options.seconds)
    figures = {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": options.shape,
        "attention_milliseconds": attention_alone(options.shape, device),
        "steps": figures_of(cases, sides, weights),
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print_table(figures)


if __name__ == "__main__":
    main()
