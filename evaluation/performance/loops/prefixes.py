"""Groups with a signal for each rollout and each processor hour: prefix sampling against plain starts, in the shop.

    python -m evaluation.performance.loops.prefixes --run-dir runs/prefixes [--model DIR] [--tasks 8] [--passes 2]

A policy is fine-tuned on demonstrations of other goals, as in the demo, and then stays as it is: what differs is where
the groups begin. Both ways share their first pass over the tasks (plain starts; nothing is known of them yet) and take
turns afterwards, a pass each. A group has a signal where not all of its attempts have the same outcome; the reward is
success, 0 or 1. The store has a demonstration of each task, from which a prefix comes where no attempt solved it;
``--alone`` leaves these out. Processor time is that of the model server, the shop and the sessions; it does not depend
on what else the machine does, as wall time does. The same command goes on with a run that was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.apps.loop.parts import open_parts, probe_ids
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.demo.child import free_port, running_command
from openhands_rl_plugin.contrib.demo.model import ensure_model
from openhands_rl_plugin.contrib.demo.options import CONTEXT_TOKENS, DemoOptions
from openhands_rl_plugin.contrib.webshop.demonstrator import DemonstratorOptions
from openhands_rl_plugin.core.records import TrajectoryFilter, prefix_of
from openhands_rl_plugin.core.types import Frozen, Task, Trajectory
from openhands_rl_plugin.hosts.shared.environment_sessions import EnvironmentSessions
from openhands_rl_plugin.rewards.outcome import ReturnReward, SuccessReward
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.training.loop.plan import LoopPlan
from openhands_rl_plugin.training.loop.prefixes import PrefixSampler
from openhands_rl_plugin.training.loop.stages import LoopParts
from openhands_rl_plugin.training.loop.sync import ClosedLoop
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

MODEL = "policy"
KINDS = ("none", "adaptive")
FIGURES = "figures.json"


class Pass(Frozen):
    """What one pass over the tasks gave. Times are in seconds; ``processor`` is of all processes."""

    kind: str
    number: int
    groups: int
    with_signal: int
    rollouts: int
    successes: int
    prefixed: int
    differed: int
    seconds: float
    processor: float


@dataclass(frozen=True)
class World:
    """The open parts, and the plan of the runs that are measured."""

    plan: LoopPlan
    parts: LoopParts
    settings: RLSettings
    served: str
    directory: Path
    processes: tuple[int, ...]

    def processor(self) -> float:
        """Seconds of processor time of the servers and this process so far."""
        return time.process_time() + sum(map(processor_seconds, self.processes))

    async def play(self, kind: str, number: int, storage: FileTrajectoryStorage) -> Pass:
        """One pass over the tasks; groups begin where ``kind`` says."""
        plan = self.plan.model_copy(update={"prefix_sampling": kind})
        sampler = PrefixSampler(plan, storage, ReturnReward(), SuccessReward())
        run_id = f"{plan.run_id}/iteration-{number:03d}"
        # What a killed process left of this pass would cost nothing now.
        left = TrajectoryFilter(run_id=run_id, finished=None)
        await storage.drop([each.id async for each in storage.summaries(left)])
        started, processor = time.monotonic(), self.processor()
        prefixes = {task.id: await sampler.choose(task, run_id, f"{run_id}/{task.id}") for task in plan.training}
        runner = EnvironmentSessions(self.settings, storage=storage)
        try:
            rollouts = RolloutPlan(
                run_id=run_id,
                tasks=plan.training,
                samples_per_task=plan.samples_per_task,
                served_model=self.served,
                sampling=plan.sampling,
                seed=plan.seed,
                concurrency=plan.concurrency,
                prefixes=prefixes,
            )
            played = await roll_out(rollouts, runner, storage)
        finally:
            await runner.close()
        differed = await sampler.differed(run_id, [f"{run_id}/{task.id}" for task in plan.training])
        solved = {task.id: outcomes(plan, played, task) for task in plan.training}
        return Pass(
            kind=kind,
            number=number,
            groups=len(solved),
            with_signal=sum(len(set(each)) > 1 for each in solved.values()),
            rollouts=len(played),
            successes=sum(map(sum, solved.values())),
            prefixed=sum(prefix_of(each) is not None for each in played),
            differed=differed,
            seconds=time.monotonic() - started,
            processor=self.processor() - processor,
        )


def outcomes(plan: LoopPlan, played: Sequence[Trajectory], task: Task) -> list[bool]:
    """Whether each valid attempt at the task succeeded."""
    valid = [each for each in played if each.task.id == task.id and each.failure is None]
    return [plan.succeeded(each, each.episode_return) for each in valid]


def processor_seconds(pid: int) -> float:
    """User and system time of a process with its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(world: World, options: argparse.Namespace) -> list[Pass]:
    """All passes: those of an earlier process are read."""
    noted = world.directory / FIGURES
    done = [Pass.model_validate(each) for each in json.loads(noted.read_text())] if noted.exists() else []

    def note(one: Pass) -> None:
        done.append(one)
        noted.write_text(json.dumps([each.model_dump() for each in done]))
        print(one.model_dump_json(), file=sys.stderr, flush=True)

    first = world.directory / "first"
    if not done:
        async with FileTrajectoryStorage(first) as storage:
            if not options.alone:
                plan = RolloutPlan(run_id="demonstrations", tasks=world.plan.training, concurrency=4)
                await roll_out(plan, world.parts.demonstrator, storage)
            one = await world.play("none", 0, storage)
        for kind in KINDS:
            shutil.rmtree(world.directory / kind, ignore_errors=True)
            shutil.copytree(first, world.directory / kind)
        note(one.model_copy(update={"kind": "first"}))
    for number in range(1, options.passes + 1):
        for kind in KINDS if number % 2 else KINDS[::-1]:
            if any((each.kind, each.number) == (kind, number) for each in done):
                continue
            async with FileTrajectoryStorage(world.directory / kind) as storage:
                note(await world.play(kind, number, storage))
    return done


@contextmanager
def servers(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The URLs of the shop and of the model server, and their process ids."""
    demo = DemoOptions(run_directory=scratch)
    shop = ["env", "webshop", "--results-per-page", str(demo.results_per_page), "--separator", "newline"]
    serve = ["serve", "--model", str(options.model), "--served-model-name", MODEL, "--max-batch", "16"]
    serve += ["--max-model-len", str(CONTEXT_TOKENS), "--threads", str(options.threads)]
    before = children()
    with ExitStack() as stack:
        at_shop = stack.enter_context(running_command(shop, free_port(), scratch / "shop.log"))
        at_model = stack.enter_context(running_command(serve, free_port(), scratch / "server.log"))
        yield at_shop, at_model, tuple(sorted(children() - before))


def children() -> set[int]:
    """The processes that this one started."""
    return {int(each) for each in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


async def run(options: argparse.Namespace, at_shop: str, at_model: str, processes: tuple[int, ...]) -> list[Pass]:
    """The warm start, then all passes."""
    demo = DemoOptions(
        run_directory=options.run_dir,
        demonstrations=options.demonstrations,
        samples_per_task=options.samples,
        held_out=1,
        base_held_out=1,
        iterations=0,
        concurrency=options.concurrency,
    )
    settings = demo.settings(shop_url=at_shop, model_url=at_model, base_model=MODEL)
    plan = demo.plan(demo.shop(), base_model=MODEL, probe_ids=probe_ids(options.model))
    storage = FileTrajectoryStorage(options.run_dir / "trajectories")
    runner = EnvironmentSessions(settings, storage=storage)
    shop = DemonstratorOptions(results_per_page=demo.results_per_page, separator="\n")
    try:
        async with open_parts(
            settings,
            model=options.model,
            directory=options.run_dir,
            runner=runner,
            shop=shop,
            storage=storage,
            reward=ReturnReward(),
            objective=SuccessReward(),
        ) as parts:
            state = await ClosedLoop(plan, parts).run()
            served = await parts.publisher.served_model(parts.adapters.get(state.adapter or ""))
            chosen = plan.model_copy(update={"training": plan.training[: options.tasks]})
            directory = options.run_dir / ("alone" if options.alone else "demonstrated")
            directory.mkdir(exist_ok=True)
            return await measure(World(chosen, parts, settings, served, directory, processes), options)
    finally:
        await runner.close()
        await storage.close()


def report(passes: Sequence[Pass]) -> str:
    """A line for each way, and how often as many groups had a signal."""
    lines, rates = [], {}
    for kind in KINDS:
        own = [each for each in passes if each.kind == kind]
        if not (rollouts := sum(each.rollouts for each in own)):
            continue
        groups, signal = sum(each.groups for each in own), sum(each.with_signal for each in own)
        hours = sum(each.processor for each in own) / 3600
        rates[kind] = (100 * signal / rollouts, signal / hours)
        lines.append(
            f"{kind:<9} {signal} of {groups} groups with a signal: {rates[kind][0]:.1f} in 100 rollouts, "
            f"{rates[kind][1]:.0f} a processor hour; {sum(each.successes for each in own)} of {rollouts} solved, "
            f"{sum(each.prefixed for each in own)} began with a prefix, {sum(each.differed for each in own)} differed"
        )
    if len(rates) == len(KINDS) and all(rates["none"]):
        more = [adaptive / none for adaptive, none in zip(rates["adaptive"], rates["none"], strict=True)]
        lines.append(f"adaptive / none: {more[0]:.2f} by rollouts, {more[1]:.2f} by processor time")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/prefixes"))
    parser.add_argument("--model", type=Path, help="directory of the base model (default: the demo's)")
    parser.add_argument("--demonstrations", type=int, default=32, help="of other goals, for the fine-tuning")
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=6, help="attempts at a task")
    parser.add_argument("--passes", type=int, default=2, help="of each way, after the first one that they share")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2, help="of the model server")
    parser.add_argument("--alone", action="store_true", help="no demonstrations of the tasks that are measured")
    options = parser.parse_args()
    options.model = options.model or ensure_model()
    options.run_dir.mkdir(parents=True, exist_ok=True)
    with servers(options, options.run_dir) as (shop, model, processes):
        print(report(asyncio.run(run(options, shop, model, processes))))


if __name__ == "__main__":
    main()
