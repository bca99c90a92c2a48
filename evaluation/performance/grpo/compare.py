"""Reinforcement by this project against TRL's GRPOTrainer: held-out success after the same processor time.

    python -m evaluation.performance.grpo.compare --run-dir runs/seed-0 --out runs/grpo-0
    python -m evaluation.performance.grpo.compare --report runs/grpo-0 runs/grpo-1 runs/grpo-2

The run directory is one of `openhands-rl demo`. Both sides go on from the adapter that its SFT made, on the same tasks
of the embedded shop in the same order, with the same prompts, sampling, learning rate and sizes of groups, batches and
steps; TRL in float32, ours as the demo does (float32 too, where the processor does not multiply bfloat16). The sides
run one after the other, each in a process of its own. A side's budget is user and system time of its whole process tree
(for ours trainer, model server, shop and OpenHands workers; for TRL one process) from its first iteration on; what was
loaded before that is free. The adapter that counts is the last one that was ready within the budget. Both, and that of
SFT, then run the same held-out goals through the demo's model server and OpenHands; that time is not counted.

A part that OUT holds is not run again. --report reads finished directories, one of every seed. With --ours-run our side
is a demo run that went on from the same adapter: its last evaluation counts, with the wall time of its iterations. How
much processor time they took is for the caller to know.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from evaluation.performance.grpo.budget import Job, Mark, read_marks
from evaluation.performance.grpo.ours import WARM_START, has_episodes, held_out_returns
from evaluation.performance.grpo.report import Part, report
from evaluation.performance.grpo.trl_side import PASS_EPISODES
from openhands_rl_plugin.apps.demo_model import ensure_model
from openhands_rl_plugin.contrib.demo.runs import DemoOptions, shop_tasks
from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.types import Task
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE
from openhands_rl_plugin.training.loop.plan import LoopState

SIDES = ("ours", "trl")
FINAL = "evaluate-final"
CPU_OF_ROLLOUTS, WALL_OF_ROLLOUTS = "rollout_cpu_seconds", "rollout_seconds"
_MODULES = {
    "ours": ["evaluation.performance.grpo.ours", "learn"],
    "trl": ["evaluation.performance.grpo.trl_side"],
    "held-out": ["evaluation.performance.grpo.ours", "measure"],
}


def sft_adapter(run: Path) -> Path:
    """The adapter that the run's SFT made. Exits with a line that says what is wrong with the directory."""
    state = LoopState.load(run / "state.json")
    record = state.record("warm-start")
    if record is None or record.adapter is None or state.record(WARM_START) is None:
        raise SystemExit(
            f"{run} holds no demo that finished its SFT: make one with openhands-rl demo --run-dir {run} --iterations 0"
        )
    adapter = run / "adapters" / record.adapter
    if not (adapter / "adapter_config.json").is_file():
        raise SystemExit(f"{adapter} is missing: give the whole run directory")
    return adapter


def seed_of(run: Path) -> int:
    """The run's seed. Exits where the run has another shop or other episodes than the demo has now."""
    noted = json.loads((run / "options.json").read_text())
    now = DemoOptions(run_directory=run)
    for name in ("max_turns", "demonstrations"):
        if noted.get(name) != getattr(now, name):
            raise SystemExit(f"{run} was run with {name} = {noted.get(name)}, the demo's is {getattr(now, name)}")
    return int(noted["seed"])


def run_part(side: str, job: Job) -> None:
    """One process, with its output in a file. Exits with the end of that when it fails."""
    job.out.mkdir(parents=True, exist_ok=True)
    log = job.out / "log"
    threads = {"OMP_NUM_THREADS": str(job.threads), "MKL_NUM_THREADS": str(job.threads), "MALLOC_ARENA_MAX": "2"}
    with open(log, "wb") as output:
        command = [sys.executable, "-m", *_MODULES[side], job.model_dump_json()]
        done = subprocess.run(command, stdout=output, stderr=output, env={**os.environ, **threads}, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed: {log.read_text(errors='replace')[-1500:]}\n(log: {log})")


def learn(side: str, job: Job) -> Mark:
    """The side's last adapter within the budget, trained now if it is not there; SFT's where there was none."""
    noted = job.out / "trained.json"
    if not noted.exists():
        shutil.rmtree(job.out, ignore_errors=True)
        run_part(side, job)
        marks = read_marks(job.out / "marks.jsonl")
        none = Mark(step=0, adapter=job.adapter, cpu_seconds=0.0, wall_seconds=0.0, figures={})
        noted.write_text((marks[-1] if marks else none).model_dump_json(indent=1))
    return Mark.model_validate_json(noted.read_text())


def measure(job: Job) -> dict[str, float]:
    """Task -> return on the held-out goals; stored episodes are not run again."""
    run_part("held-out", job)
    return held_out_returns(job.out, job.seed, WARM_START)


def sft_part(job: Job) -> Part:
    """SFT's own held-out success: what its run stored, if that is all goals of this comparison."""
    wanted = {task.id for task in held_out_tasks(job)}
    stored = held_out_returns(job.run, job.seed, WARM_START) if has_episodes(job.run) else {}
    returns = {task: value for task, value in stored.items() if task in wanted}
    if returns.keys() != wanted:
        returns = measure(job)
    return Part(side="sft", seed=job.seed, minutes=0.0, returns=returns)


def trained_part(side: str, job: Job) -> Part:
    """A side's training and its held-out success."""
    last = learn(side, job)
    marks = read_marks(job.out / "marks.jsonl")
    returns = measure(job.model_copy(update={"out": job.out / "held-out", "adapter": last.adapter}))
    return Part(
        side=side,
        seed=job.seed,
        minutes=job.minutes,
        returns=returns,
        steps=last.step,
        episodes=int(sum(mark.figures.get("episodes", 0) for mark in marks)),
        cpu_seconds=last.cpu_seconds,
        wall_seconds=last.wall_seconds,
        rollout_success=tuple(mark.figures["success"] for mark in marks if "success" in mark.figures),
        rollout_share=rollout_share(last, marks),
    )


def taken_part(job: Job, run: Path) -> Part:
    """Our side as a finished demo run has it. Exits when it did not go on from the job's adapter."""
    mine = sft_adapter(run)
    if (mine / WEIGHTS_FILE).read_bytes() != (job.adapter / WEIGHTS_FILE).read_bytes():
        raise SystemExit(f"{run} went on from another adapter than {job.run}")
    records = LoopState.load(run / "state.json").records
    learnt = [record for record in records if record.name.startswith("iteration-")]
    returns = held_out_returns(run, job.seed, FINAL)
    if len(returns) < job.held_out:
        raise SystemExit(f"{run} finished {len(returns)} of {job.held_out} held-out goals")
    return Part(
        side="ours",
        seed=job.seed,
        minutes=job.minutes,
        returns=returns,
        steps=len(learnt),
        episodes=int(sum(record.metrics["episodes"] for record in learnt)),
        wall_seconds=sum(record.finished - record.started for record in learnt),
        rollout_success=tuple(record.metrics["success"] for record in learnt),
    )


def rollout_share(last: Mark, marks: Sequence[Mark]) -> float:
    """Of the processor time until ``last`` where the side knows it (TRL's), else of the wall time."""
    took = {name: sum(mark.figures.get(name, 0.0) for mark in marks) for name in (CPU_OF_ROLLOUTS, WALL_OF_ROLLOUTS)}
    if took[CPU_OF_ROLLOUTS]:
        return took[CPU_OF_ROLLOUTS] / last.cpu_seconds
    return took[WALL_OF_ROLLOUTS] / last.wall_seconds if last.wall_seconds else 0.0


def demo_batch() -> int:
    """Samples of an optimiser step of the demo's reinforcement."""
    return DemoOptions(run_directory=Path()).settings().training.batch_size


def held_out_tasks(job: Job) -> Sequence[Task]:
    """The demo's held-out goals."""
    options = DemoOptions(run_directory=job.run, held_out=job.held_out, seed=job.seed)
    return [entry.task for entry in shop_tasks(options).held_out]


def compare(args: argparse.Namespace) -> None:
    """Run what is missing, and show the table of this seed."""
    adapter = sft_adapter(args.run_dir)
    seed = seed_of(args.run_dir) if args.seed is None else args.seed
    step_episodes = args.step_episodes or demo_batch()
    if step_episodes % PASS_EPISODES or args.tasks * args.samples % step_episodes:
        raise SystemExit(f"--step-episodes {step_episodes} has to be even, and a divisor of --tasks times --samples")
    job = Job(
        run=args.run_dir.resolve(),
        model=ensure_model(args.model).resolve(),
        out=args.out.resolve(),
        adapter=adapter.resolve(),
        seed=seed,
        held_out=args.held_out,
        minutes=args.cpu_minutes,
        tasks=args.tasks,
        samples=args.samples,
        step_episodes=step_episodes,
        threads=args.threads,
        generation=args.trl_generation,
        trl_learning_rate=args.trl_learning_rate,
    )
    claim(job)
    for side in ("sft", *args.sides):
        noted = job.out / f"{side}.json"
        if noted.exists():
            continue
        Console(stderr=True).print(f"{side} ...")
        mine = job.model_copy(update={"out": job.out / side})
        if side == "ours" and args.ours_run is not None:
            part = taken_part(mine, args.ours_run)
        else:
            part = sft_part(mine) if side == "sft" else trained_part(side, mine)
        noted.write_text(part.model_dump_json(indent=1))
    report([job.out])


def claim(job: Job) -> None:
    """Bind the directory to this comparison."""
    job.out.mkdir(parents=True, exist_ok=True)
    noted = job.out / "job.json"
    if not noted.exists():
        noted.write_text(job.model_dump_json(indent=1))
    elif Job.model_validate_json(noted.read_text()) != job:
        raise SystemExit(f"{job.out} holds a comparison with other options ({noted}): give another --out")


def main() -> None:
    """Compare, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run-dir", type=Path, help="a run of openhands-rl demo that finished its SFT")
    what.add_argument("--report", type=Path, nargs="+", metavar="OUT", help="print the table over these directories")
    parser.add_argument("--out", type=Path, help="where everything is written")
    parser.add_argument("--seed", type=int, help="of tasks and sampling (default: the run's)")
    parser.add_argument("--cpu-minutes", type=float, default=30.0, help="of every side (default: %(default)s)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--ours-run", type=Path, metavar="RUN", help="take our side from this finished demo run")
    parser.add_argument("--held-out", type=int, default=100, metavar="GOALS", help="default: %(default)s")
    demo = DemoOptions(run_directory=Path())
    parser.add_argument("--tasks", type=int, default=demo.tasks_per_iteration, help="of an iteration (%(default)s)")
    parser.add_argument("--samples", type=int, default=demo.samples_per_task, help="of a task (%(default)s)")
    parser.add_argument("--step-episodes", type=int, help="of an optimiser step of TRL's (default: the demo's)")
    parser.add_argument(
        "--trl-generation",
        choices=("cached", "plain"),
        default="cached",
        help="cached: turns go on from the keys and values of the turn before; plain: TRL's own generator, which reads "
        "the whole conversation at every turn (default: cached)",
    )
    parser.add_argument("--trl-learning-rate", type=float, help="default: the demo's, as ours")
    parser.add_argument("--threads", type=int, default=2, help="of torch in every process (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="the base model's directory (default: the demo's)")
    args = parser.parse_args()
    if args.report is not None:
        report(args.report)
        return
    if args.out is None:
        parser.error("--run-dir needs --out")
    try:
        compare(args)
    except RLError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
