"""What token notes cost: a training step that keeps them against one that does not, and bytes a token.

    python -m evaluation.performance.training.notes [--repeats 15] [--width 256] [--layers 4] [--vocabulary 8192]

A random Llama; 8 rollouts of 1,024 tokens, half of them sampled; one optimiser step a call, "none" and "last" in turns
(in one epoch "last" notes every token, as "all" does). Times are the process's own, medians of paired ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from evaluation.performance.serving.random_weights import tiny_model
from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.types import Sample
from openhands_rl_plugin.training.trainer.lora_trainer import LoraTrainer
from openhands_rl_plugin.training.trainer.note_files import (
    NOTES_FOLDER,
    NotedSample,
    NotedTraining,
    NoteFile,
    frame_bytes,
)

_ROLLOUTS, _TOKENS, _TURN = 8, 1024, 128


def rollouts(vocabulary: int) -> list[Sample]:
    """Turns of an observation and an answer of half its length each; every rollout is another episode."""
    drawn = random.Random(0)
    made = []
    for at in range(_ROLLOUTS):
        ids = tuple(drawn.randrange(vocabulary) for _ in range(_TOKENS))
        mask = tuple(place % _TURN >= _TURN // 2 for place in range(_TOKENS))
        starts = range(_TURN // 2, _TOKENS, _TURN)
        made.append(
            Sample(
                trajectory_id=f"episode-{at}",
                leaf=len(starts),
                input_ids=ids,
                mask=mask,
                logprobs=tuple(-drawn.expovariate(0.3) if own else 0.0 for own in mask),
                advantage=drawn.choice((-1.0, 1.0)) * drawn.random(),
                spans=tuple((2 * n + 1, start, start + _TURN // 2) for n, start in enumerate(starts)),
            )
        )
    return made


def seconds_of(trainer: LoraTrainer, samples: list[Sample], run: Path) -> float:
    """Processor time of a call of one step."""
    started = time.process_time()
    trainer.reinforce(samples, run=run)
    return time.process_time() - started


def writing(samples: list[Sample], folder: Path) -> float:
    """Processor time of making and appending the notes of a step, by itself: the least of seven."""
    about = NotedTraining(fingerprint="", algorithm="grpo", version=0, epochs=1, at=0.0)
    file, drawn = NoteFile(folder, about, 0, 0), random.Random(1)
    columns = ("trainer", "entropy", "advantage", "clipped")
    found = []
    for _ in range(7):
        tables = []
        for sample in samples:
            count = sum(sample.mask)
            tables.append([[drawn.gauss(-6, 2) for _ in range(count)] for _ in "ab"] + [[0.5] * count, [0.0] * count])
        started = time.process_time()
        for sample, table in zip(samples, tables, strict=True):
            nodes = tuple((node, stop - start) for node, start, stop in sample.spans)
            noted = NotedSample(step=1, epoch=1, episode=sample.trajectory_id, nodes=nodes, columns=columns)
            file.append(frame_bytes(noted, table))
        found.append(time.process_time() - started)
    file.close()
    return min(found)


def main() -> None:
    """Print the ratios and the bytes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for name, default in (("repeats", 15), ("width", 256), ("layers", 4), ("vocabulary", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path, samples = Path(folder), rollouts(args.vocabulary)
        model = tiny_model(path / "model")
        shape = {"hidden_size": args.width, "intermediate_size": 3 * args.width, "num_hidden_layers": args.layers}
        config = LlamaConfig.from_pretrained(model, vocab_size=args.vocabulary, **shape)
        LlamaForCausalLM(config).save_pretrained(model)
        options = {"algorithm": "grpo", "num_epochs": 1, "old_logprobs": "recorded", "checkpoint_steps": 0}
        options |= {"batch_size": _ROLLOUTS, "dtype": "float32"}
        trainers = {
            keep: LoraTrainer(model, TrainingSettings.model_validate(options | {"keep_token_notes": keep}))
            for keep in ("none", "last")
        }
        found: dict[str, list[float]] = {keep: [] for keep in trainers}
        for at in range(args.repeats + 1):
            # Each of both goes first every other time.
            for keep in sorted(trainers, reverse=bool(at % 2)):
                taken = seconds_of(trainers[keep], samples, path / keep)
                if at:  # the first one warms up
                    found[keep].append(taken)
        alone = writing(samples, path / "alone")
        size = max(file.stat().st_size for file in (path / "last" / NOTES_FOLDER).iterdir())
    trained = sum(sum(sample.mask) for sample in samples)
    ratios = [last / none for none, last in zip(found["none"], found["last"], strict=True)]
    medians = {keep: statistics.median(each) for keep, each in found.items()}
    print(f"{args.layers} layers of {args.width}, {_ROLLOUTS * _TOKENS:,} tokens a step, {trained:,} of them noted")
    print(f"seconds a step: none {medians['none']:.3f}, last {medians['last']:.3f}")
    quarters = statistics.quantiles(ratios, n=4)
    print(f"ratio: {statistics.median(ratios):.4f} ({quarters[0]:.4f} to {quarters[2]:.4f}), {args.repeats} pairs")
    print(f"making and writing the notes alone: {1000 * alone:.1f} ms, {alone / medians['none']:.4f} of a step")
    print(f"bytes a token and epoch: {size / trained:.2f}")


if __name__ == "__main__":
    main()
