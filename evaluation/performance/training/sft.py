"""One optimiser step of fine-tuning on multi-turn episodes, against TRL's SFTTrainer: wall time, and peak memory.

    python -m evaluation.performance.training.sft --model DIR [--what time memory] [--data tasks attempts] [--rounds 3]

Both train the same LoRA adapter of the same float32 model (SmolLM2's width and vocabulary, its first layers) on the
same token ids, with the loss on the model's messages only; their first losses must agree. Each side runs in a process
of its own, one after the other, over and over; figures are medians and the ratios of medians.

Time: eight episodes a step. "tasks": of eight tasks, so that they share the system prompt only; "attempts": four
attempts at each of two tasks, as rejection sampling has them. TRL's packing settings are all tried first, and the
fastest of them goes on, unless --setting names one. Memory: one episode of 8,192 tokens, with TRL's default of
recomputed activations and without; what a process held before its first step is shown too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from evaluation.performance.training.sft_sides import TRL_SETTINGS, Job, Measured

TOLERANCE = 2e-3
"""Of the first losses, in nats: sums in another order."""


def measured(job: Job) -> Measured:
    """One run of one side in a new process."""
    command = [sys.executable, "-m", "evaluation.performance.training.sft_sides", job.model_dump_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{job.side} failed:\n{done.stderr[-2000:]}")
    return Measured.model_validate_json(done.stdout.splitlines()[-1])


def interleaved(jobs: Sequence[Job], rounds: int) -> list[list[Measured]]:
    """``rounds`` runs of every job, in turn."""
    found: list[list[Measured]] = [[] for _ in jobs]
    for _ in range(rounds):
        for job, runs in zip(jobs, found, strict=True):
            runs.append(measured(job))
    losses = [runs[0].loss for runs in found]
    if max(losses) - min(losses) > TOLERANCE:
        raise SystemExit(f"the sides do not compute the same: their first losses are {losses}")
    return found


def times(
    model: str, rounds: int, data_sets: Sequence[Literal["tasks", "attempts"]], setting: str
) -> dict[str, object]:
    """Seconds a step on each data set; an empty ``setting`` of TRL's means its fastest."""
    figures: dict[str, object] = {}
    for data in data_sets:
        base = Job(side="ours", model=model, data=data)
        names = () if setting else TRL_SETTINGS
        tried = {name: measured(base.model_copy(update={"side": "trl", "setting": name})).seconds for name in names}
        best = setting or min(tried, key=tried.__getitem__)
        ours, theirs = interleaved([base, base.model_copy(update={"side": "trl", "setting": best})], rounds)
        own, other = _median(ours, "seconds"), _median(theirs, "seconds")
        figures[data] = {"ours_s": own, "trl_s": other, "times_faster": other / own, "trl_best": best, "tried": tried}
    return figures


def memory(model: str, rounds: int) -> dict[str, object]:
    """Peak resident megabytes at 8k."""
    figures: dict[str, object] = {}
    for checkpointing in (True, False):
        base = Job(side="ours", model=model, data="long", checkpointing=checkpointing, steps=1)
        ours, theirs = interleaved([base, base.model_copy(update={"side": "trl", "setting": "packed"})], rounds)
        own, other = _median(ours, "peak_mb"), _median(theirs, "peak_mb")
        figures["recomputed" if checkpointing else "kept"] = {
            "ours_mb": own,
            "trl_mb": other,
            "share": own / other,
            "ours_before_mb": _median(ours, "before_mb"),
            "trl_before_mb": _median(theirs, "before_mb"),
        }
    return figures


def shortened(model: Path, layers: int, target: Path) -> str:
    """The model's first layers, with its embeddings, norms and tokenizer, as a directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(model, num_hidden_layers=layers, dtype="float32").save_pretrained(target)
    AutoTokenizer.from_pretrained(model).save_pretrained(target)  # pyrefly: ignore[missing-attribute]
    return str(target)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: %(default)s of 30)")
    parser.add_argument("--what", nargs="+", choices=("time", "memory"), default=["time", "memory"])
    parser.add_argument("--data", nargs="+", choices=("tasks", "attempts"), default=["tasks", "attempts"])
    parser.add_argument("--setting", choices=TRL_SETTINGS, default="", help="of TRL's packing, instead of the fastest")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    figures: dict[str, object] = {"layers": options.layers}
    with tempfile.TemporaryDirectory(prefix="sft-benchmark-") as scratch:
        model = shortened(options.model, options.layers, Path(scratch) / "model")
        if "time" in options.what:
            figures["time"] = times(model, options.rounds, options.data, options.setting)
        if "memory" in options.what:
            figures["memory"] = memory(model, options.rounds)
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")


def _median(runs: Sequence[Measured], name: str) -> float:
    return statistics.median(getattr(run, name) for run in runs)


if __name__ == "__main__":
    main()
