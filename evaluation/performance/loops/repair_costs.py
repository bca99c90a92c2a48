"""What an episode of a repair task costs with the compact prompt: the oracle's tokens and time, and fine-tuning on it.

    python -m evaluation.performance.loops.repair_costs --model DIR [--host v1] [--level 1] [--episodes N] [--trained N]

The episodes are played in OpenHands' own controller with commands in the sandbox, and graded. Fine-tuning is one step
of a LoRA adapter on the first ``--trained`` of them, on one thread: its figure is tokens for a second of the
processor's time, which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.apps.loop.run import LoopJob
from openhands_rl_plugin.apps.loop.tasks import LoopTasks, TaskSource, loop_tasks, open_demonstrator
from openhands_rl_plugin.config.host import HostName
from openhands_rl_plugin.config.rl import LoopSettings, RLSettings, ServingSettings, TrainingSettings, WorkspaceSettings
from openhands_rl_plugin.contrib.repair.suites import RepairBackend
from openhands_rl_plugin.core.types import EpisodeRequest, Sample, Trajectory
from openhands_rl_plugin.training.data.demonstrations import demonstration_samples, load_tokenizer
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


def played(host: HostName, native: bool, level: int, count: int, folder: Path) -> list[Trajectory]:
    """Episodes of the oracle, one after the other."""
    settings = RLSettings(
        host=host,
        serving=ServingSettings(base_url="http://127.0.0.1:1/v1", model="none"),
        workspace=WorkspaceSettings(prompt="compact"),
        loop=LoopSettings(demonstrations=count),
        max_turns=12,
    )
    tasks = loop_tasks(TaskSource(suite=f"repair-{level}"), settings)
    job = LoopJob(
        settings=settings,
        tasks=LoopTasks(tasks.suite, tasks.demonstrations, (), ()),
        model=folder,
        directory=folder,
        run_id="costs",
        limits=settings.limits(),
        backend=RepairBackend(),
        native_tool_calling=native,
    )

    async def play() -> list[Trajectory]:
        storage = FileTrajectoryStorage(folder / "trajectories")
        try:
            async with open_demonstrator(job, storage) as oracle:
                assert oracle is not None
                return [
                    await oracle.run(EpisodeRequest(task=entry.task, run_id="costs", group_id=entry.task.id))
                    for entry in tasks.demonstrations
                ]
        finally:
            await storage.close()

    return asyncio.run(play())


def trained(model: Path, samples: Sequence[Sample]) -> dict[str, object]:
    """One step on ``samples``."""
    import torch

    from openhands_rl_plugin.training.trainer.trainer import LocalTrainer

    torch.set_num_threads(1)
    settings = TrainingSettings(algorithm="sft", num_epochs=1, batch_size=len(samples), max_tokens_per_micro_batch=1536)
    trainer = LocalTrainer(model, settings)
    before = _processor_seconds()
    trainer.sft(list(samples))
    seconds = _processor_seconds() - before
    tokens = sum(len(each.input_ids) for each in samples)
    return {"tokens": tokens, "processor seconds": round(seconds, 1), "tokens a second": round(tokens / seconds)}


def _resolved(episode: Trajectory) -> bool:
    result = episode.evidence.get("test_result")
    report = result.get("report") if isinstance(result, dict) else None
    return isinstance(report, dict) and report.get("resolved") is True


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Play, count, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--level", type=int, choices=(1, 2, 3), default=1)
    parser.add_argument("--host", choices=("v0", "v1"), default="v0")
    parser.add_argument("--native", action="store_true", help="tool calls by the API, not in the text")
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--trained", type=int, default=4, help="episodes of the fine-tuning step; 0: none")
    args = parser.parse_args()
    tokenizer = load_tokenizer(str(args.model))
    with tempfile.TemporaryDirectory() as folder:
        started, before = time.monotonic(), _processor_seconds()
        episodes = played(args.host, args.native, args.level, args.episodes, Path(folder))
        seconds, processor = time.monotonic() - started, _processor_seconds() - before
    sequences = [demonstration_samples(each, tokenizer) for each in episodes]
    lengths = [sum(len(sample.input_ids) for sample in each) for each in sequences]
    acted = [sum(sum(map(bool, sample.mask)) for sample in each) for each in sequences]
    figures: dict[str, object] = {
        "episodes": len(episodes),
        "resolved": sum(map(_resolved, episodes)),
        "sequences": sum(map(len, sequences)),
        "turns": statistics.mean(len(each.acted()) for each in episodes),
        "tokens": {"median": statistics.median(lengths), "least": min(lengths), "most": max(lengths)},
        "answer tokens": {"median": statistics.median(acted), "least": min(acted), "most": max(acted)},
        "seconds an episode": round(seconds / len(episodes), 2),
        "processor seconds of the controller an episode": round(processor / len(episodes), 2),
    }
    print(json.dumps(figures, indent=1))
    if args.trained:
        first = [sample for each in sequences[: args.trained] for sample in each]
        print(json.dumps({"fine-tuning": trained(args.model, first)}, indent=1))


if __name__ == "__main__":
    main()
