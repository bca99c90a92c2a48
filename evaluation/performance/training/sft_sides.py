"""The two sides of ``sft``, each in its own process: ``python -m evaluation.performance.training.sft_sides JOB``."""

from __future__ import annotations

import itertools
import os
import random
import resource
import sys
import tempfile
import time
from typing import Any, Literal

from pydantic import BaseModel

THREADS = 2
EPISODES, TURNS = 8, (2, 4)
SYSTEM, INSTRUCTION, OBSERVATION, SAMPLED = 60, 100, (40, 80), (20, 40)
LONG = 8_192
RATE, RANK, ALPHA = 1e-4, 16, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TRL_SETTINGS = ("padded", "one-by-one", "packed", "packed-in-one")


class Job(BaseModel):
    """What one process measures. ``steps`` are timed after a first one."""

    side: Literal["ours", "trl"]
    model: str
    data: Literal["tasks", "attempts", "long"]
    setting: str = ""
    checkpointing: bool = False
    steps: int = 1


class Measured(BaseModel):
    """``seconds``: median of a step; ``loss``: of the first one; ``before_mb``: resident before it."""

    seconds: float
    loss: float
    peak_mb: float
    before_mb: float


Episode = tuple[tuple[int, ...], tuple[bool, ...]]
"""Token ids, and which of them were sampled."""


def episodes(data: str, vocabulary: int) -> list[Episode]:
    """The same in every run."""
    source = random.Random(data)

    def some(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(vocabulary) for _ in range(count))

    system = some(SYSTEM)
    if data == "long":
        return [_episode(source, system + some(INSTRUCTION), vocabulary, longest=LONG)]
    groups = {"tasks": EPISODES, "attempts": 2}[data]
    openings = [system + some(INSTRUCTION) for _ in range(groups)]
    return [_episode(source, openings[at % groups], vocabulary) for at in range(EPISODES)]


def _episode(source: random.Random, opening: tuple[int, ...], vocabulary: int, longest: int | None = None) -> Episode:
    ids, mask = list(opening), [False] * len(opening)
    turns = source.randint(*TURNS) if longest is None else longest
    for turn in range(turns):
        for (low, high), sampled in ((SAMPLED, True), (OBSERVATION, False)):
            if not sampled and turn == turns - 1:
                break
            count = source.randint(low, high)
            ids += [source.randrange(vocabulary) for _ in range(count)]
            mask += [sampled] * count
        if longest is not None and len(ids) > longest:
            return tuple(ids[:longest]), (*mask[: longest - 1], True)
    return tuple(ids), tuple(mask)


def ours(job: Job) -> Measured:
    """``LocalTrainer``, all episodes of a step in one pass."""
    from transformers import AutoConfig

    from openhands_rl_plugin.config.rl import TrainingSettings
    from openhands_rl_plugin.core.types import Sample
    from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

    found = episodes(job.data, AutoConfig.from_pretrained(job.model).vocab_size)
    samples = [
        Sample.model_validate(
            {"trajectory_id": str(at), "leaf": 0, "input_ids": ids, "mask": mask, "logprobs": [0.0] * len(ids)}
        )
        for at, (ids, mask) in enumerate(found)
    ]
    settings = TrainingSettings(
        algorithm="sft",
        aggregation="token",
        learning_rate=RATE,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        target_modules=TARGETS,
        batch_size=EPISODES,
        num_epochs=job.steps + 1,
        max_tokens_per_micro_batch=65_536,
        gradient_checkpointing=job.checkpointing,
        dtype="float32",
    )
    trainer = LocalTrainer(job.model, settings)
    ends, losses = [time.perf_counter()], []
    before = _peak_mb()

    def ended(progress: Any) -> None:
        ends.append(time.perf_counter())
        losses.append(progress["loss"])

    trainer.sft(samples, ended)
    return _measured(ends, losses[0], before)


def trl(job: Job) -> Measured:
    """``SFTTrainer``; an epoch of the packed data set is one step."""
    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from transformers import AutoConfig, TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    disable_progress_bars()
    found = episodes(job.data, AutoConfig.from_pretrained(job.model).vocab_size)
    rows = {
        "input_ids": [list(ids) for ids, _ in found],
        "labels": [[i if sampled else -100 for i, sampled in zip(ids, mask, strict=True)] for ids, mask in found],
    }
    longest, total = max(len(ids) for ids, _ in found), sum(len(ids) for ids, _ in found)
    packing = job.setting.startswith("packed")
    batch = len(found) if job.setting == "padded" else 1
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory(prefix="sft-benchmark-") as output:
        config = SFTConfig(
            output_dir=output,
            model_init_kwargs={"dtype": "float32"},
            packing=packing,
            packing_strategy="bfd",
            max_length=total if job.setting == "packed-in-one" else longest,
            per_device_train_batch_size=batch,
            num_train_epochs=job.steps + 1,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            gradient_checkpointing=job.checkpointing,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        adapter = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), task_type="CAUSAL_LM")
        trainer = SFTTrainer(
            job.model, args=config, train_dataset=Dataset.from_dict(rows), peft_config=adapter, callbacks=[Clock()]
        )
        # Known only now: how many rows the episodes were packed into.
        trainer.args.gradient_accumulation_steps = len(trainer.train_dataset) // batch  # pyrefly: ignore[bad-argument-type]
        trainer.accelerator.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
        before = _peak_mb()
        ends.append(time.perf_counter())
        trainer.train()
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return _measured(ends, loss, before)


def _measured(ends: list[float], loss: float, before: float) -> Measured:
    steps = [after - start for start, after in itertools.pairwise(ends)]
    timed = sorted(steps[1:] or steps)
    return Measured(seconds=timed[len(timed) // 2], loss=float(loss), peak_mb=_peak_mb(), before_mb=before)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure the job of the command line and print it as one line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from openhands_rl_plugin.models.generator.threads import prepare_threads

    prepare_threads()
    import torch

    torch.set_num_threads(THREADS)
    job = Job.model_validate_json(sys.argv[1])
    sys.stdout.flush()
    print({"ours": ours, "trl": trl}[job.side](job).model_dump_json())


if __name__ == "__main__":
    main()
