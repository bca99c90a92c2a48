"""Tokens a second and memory of one LoRA training step on a GPU, beside TRL's, and of attention alone.

    python -m evaluation.performance.training.gpu [--json FILE] [--seconds 180] [--shape tiny]

A step is the forward and the backward pass of a policy gradient, with gradient checkpointing, in bfloat16, on a Llama
of 1.2B random parameters (the shape of Llama 3.2 1B) with rank 16 on all linear layers; the optimiser is left out.
"8k", "32k": one sequence, trained after its first quarter (here a single sequence's attention is PyTorch's flash).
"8k x 8", "32k x 8": eight sequences that share their first three quarters and are trained after them: here one packed
pass with a block mask, there eight sequences (TRL shares no prefixes), 32k tokens at a time. All sequences of a batch
are of one length, so TRL pads nothing: with rollouts as they come it pads them to the longest. Tokens a second count
the tokens of the sequences, not the computed ones, for both sides.

Attention alone comes first, by its ways. Then sides alternate; a first step of each kind compiles and is not counted;
medians. Nothing begins that would end after ``--seconds`` (all in all) by what smaller ones took, but a first step's
compilation is not known before; the figures are written after each round of a case. Memory is the largest that PyTorch
had given out, without the other side's weights.
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

    @property
    def work(self) -> int:
        """Pairs of tokens: time grows with them at most."""
        return sum(len(sample.input_ids) ** 2 for sample in self.samples)


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


@dataclass
class Clock:
    """When all has to be over, and how long what was done took at best: seconds and work by kind and name."""

    deadline: float
    took: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)

    def fits(self, kind: str, name: str, work: int) -> bool:
        """Whether it would end in time: as before, or as the largest other of its kind for more work."""
        known = self.took.get(kind, {})
        if not known:
            return time.perf_counter() < self.deadline
        seconds, done = known[name] if name in known else max(known.values(), key=lambda each: each[1])
        return time.perf_counter() + seconds * max(1.0, work / done) < self.deadline

    def note(self, kind: str, name: str, work: int, seconds: float) -> None:
        """What it took; ``work`` in any unit, the same for all of a kind."""
        known = self.took.setdefault(kind, {})
        known[name] = (min(seconds, known.get(name, (seconds, work))[0]), work)


def run(
    cases: Sequence[Case], sides: Sequence[Side], device: torch.device, clock: Clock, keep: Callable[[], None]
) -> None:
    """Rounds while the time lasts, the sides in turn; in the first each does all twice. ``keep``: after each step."""
    for number in range(REPEATS):
        for case in cases:
            for side in sides if number % 2 else sides[::-1]:
                for _ in range(1 if number else 2):
                    _step(case, side, device, clock)
                keep()


def _step(case: Case, side: Side, device: torch.device, clock: Clock) -> None:
    if side.name in case.problems:
        return
    if not clock.fits(side.name, case.name, case.work):
        if not case.seconds.get(side.name):
            case.problems[side.name] = "no time left"
        return
    seconds = measure(case, side, device)
    clock.note(side.name, case.name, case.work, seconds)
    print(f"{case.name}, {side.name}: {seconds:.2f} s", flush=True)


def attention_alone(shape: str, device: torch.device, clock: Clock) -> dict[str, float]:
    """Milliseconds of forward and backward of one layer's attention over one sequence, as time allows."""
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
        if device.type == "cuda":
            ways["FlexAttention"] = partial(_by_flex_attention, ways["chosen"])
        for name, way in ways.items():
            if clock.fits(name, str(length), length**2):
                first, took = _milliseconds(way, inputs, device)
                clock.note(name, str(length), length**2, 4e-3 * took)
                found[f"{name}, {length}"] = took
                found[f"{name}, {length}, first call"] = first
    return found


def _by_flex_attention(way: Callable[[], Tensor]) -> Tensor:
    with patch.object(attention_on_cuda, "_has_flash", lambda *_: False):
        return way()


def _milliseconds(way: Callable[[], Tensor], inputs: Sequence[Tensor], device: torch.device) -> tuple[float, float]:
    """Of the first call, which may compile, and the median of three others."""
    took = []
    for _ in range(4):
        _wait(device)
        began = time.perf_counter()
        found = way()
        torch.autograd.grad(found, inputs, torch.ones_like(found))
        _wait(device)
        took.append(1e3 * (time.perf_counter() - began))
    return took[0], statistics.median(took[1:])


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
        print(f"attention alone, forward and backward, {name}: {value:.2f} ms")
    print(f"{'case':10s}{'side':30s}{'tokens/s':>10s}{'peak GB':>9s}{'steps':>7s}")
    for each in figures["steps"]:
        rate, peak = each.get("tokens_per_second", each.get("problem", "-")), each.get("peak_gb", "-")
        print(f"{each['case']:10s}{each['side']:30s}{rate!s:>10s}{peak!s:>9s}{each['steps']:7d}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--seconds", type=float, default=180.0, help="for all, from the start (default: 180)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.2B")
    options = parser.parse_args()
    clock = Clock(time.perf_counter() + options.seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": options.shape,
        "attention_milliseconds": attention_alone(options.shape, device, clock),
        "steps": [],
    }
    print(f"{figures['device']}: attention alone is measured; making two models", flush=True)
    weights: dict[str, int] = {}
    sides: list[Side] = []
    for make in (lambda: Ours(options.shape), lambda: Trl(options.shape, device, LENGTHS[options.shape][-1])):
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        sides.append(make())
        weights[sides[-1].name] = (torch.cuda.memory_allocated() if device.type == "cuda" else 0) - before
    cases = cases_of(options.shape)

    def keep() -> None:
        figures["steps"] = figures_of(cases, sides, weights)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

    keep()
    run(cases, sides, device, clock, keep)
    keep()
    print_table(figures)


if __name__ == "__main__":
    main()
