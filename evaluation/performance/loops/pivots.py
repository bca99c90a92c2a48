"""Updates on single decisions against whole episodes, in the shop: signal and success for each processor minute.

    python -m evaluation.performance.loops.pivots --run-dir runs/pivots [--model DIR] [--iterations 3] [--pivots 6]

Both ways begin with one policy, fine-tuned on demonstrations of other goals as in the demo. ``episodes`` trains
``--iterations`` times on groups of whole episodes; ``pivots`` does that once, and goes on with ``--updates`` updates on
up to ``--pivots`` decisions of these episodes. Both are evaluated on the same held-out goals. An attempt (an episode,
an answer) has a signal where its group's rewards differ. Processor time is that of the model server, the shop, the
sessions and the training, without evaluations; it does not depend on what else the machine does, as wall time does.
The same command goes on with a run that was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from evaluation.performance.loops.prefixes import MODEL, processor_seconds, servers
from openhands_rl_plugin.apps.loop.parts import STATE, open_parts, probe_ids
from openhands_rl_plugin.contrib.demo.model import ensure_model
from openhands_rl_plugin.contrib.demo.options import DemoOptions
from openhands_rl_plugin.contrib.webshop.demonstrator import DemonstratorOptions
from openhands_rl_plugin.core.statistics import Estimate, paired_difference, wilson
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.hosts.shared.environment_sessions import EnvironmentSessions
from openhands_rl_plugin.rewards.outcome import ReturnReward, SuccessReward
from openhands_rl_plugin.training.loop.facts import HeldOut
from openhands_rl_plugin.training.loop.plan import LoopPlan, LoopState, StageRecord
from openhands_rl_plugin.training.loop.stages import LoopListener
from openhands_rl_plugin.training.loop.sync import ClosedLoop
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

START, EPISODES, PIVOTS = "start", "episodes", "pivots"
FINAL = "evaluate-final"


class Stage(Frozen):
    """A stage that trains. ``processor``: seconds of all processes; ``signal``: attempts in groups with a signal."""

    way: str
    name: str
    attempts: int
    signal: int
    processor: float
    pivots: int = 0
    wordings: int = 0
    outcomes: int = 0


class Meter(LoopListener):
    """Notes each stage that trains, in a file that a later process goes on with."""

    def __init__(self, way: str, file: Path, processes: Sequence[int]) -> None:
        self._way = way
        self._file = file
        self._processes = processes
        self._began = 0.0
        self.stages = [Stage.model_validate(each) for each in json.loads(file.read_text())] if file.exists() else []

    def stage_started(self, name: str) -> None:
        """Look at the clock of the processor."""
        print(f"{self._way}: {name}", file=sys.stderr, flush=True)
        self._began = self._processor()

    def stage_finished(self, record: StageRecord) -> None:
        """Note what the stage cost, once."""
        known = any(stage.name == record.name and stage.way == self._way for stage in self.stages)
        if known or not record.name.startswith(("iteration", "pivots")):
            return
        figures = {name: int(record.metrics.get(name, 0)) for name in ("pivots", "wordings", "outcomes")}
        stage = Stage(
            way=self._way,
            name=record.name,
            attempts=int(record.metrics.get("answers", record.metrics.get("episodes", 0.0))),
            signal=int(record.metrics["episodes_used"]),
            processor=self._processor() - self._began,
            **figures,
        )
        self.stages.append(stage)
        self._file.write_text(json.dumps([each.model_dump() for each in self.stages]))
        print(stage.model_dump_json(), file=sys.stderr, flush=True)

    def _processor(self) -> float:
        return time.process_time() + sum(map(processor_seconds, self._processes))


def plan_of(way: str, base: LoopPlan, options: argparse.Namespace) -> LoopPlan:
    """The warm start alone, or one of the two ways from there."""
    if way == START:
        return base.model_copy(update={"run_id": START, "iterations": 0})
    pivots = {"iterations": 1, "pivots": options.pivots, "pivot_updates": options.updates}
    changes = pivots if way == PIVOTS else {"iterations": options.iterations}
    return base.model_copy(update={"run_id": way, "demonstrations": (), **changes})


async def run(options: argparse.Namespace, at_shop: str, at_model: str, processes: tuple[int, ...]) -> str:
    """The warm start, both ways, and the report."""
    demo = DemoOptions(
        run_directory=options.run_dir,
        demonstrations=options.demonstrations,
        tasks_per_iteration=options.tasks,
        samples_per_task=options.samples,
        held_out=options.held_out,
        base_held_out=1,
        concurrency=options.concurrency,
        seed=options.seed,
    )
    settings = demo.settings(shop_url=at_shop, model_url=at_model, base_model=MODEL)
    base = demo.plan(demo.shop(), base_model=MODEL, probe_ids=probe_ids(options.model))
    storage = FileTrajectoryStorage(options.run_dir / "trajectories")
    runner = EnvironmentSessions(settings, storage=storage)
    shop = DemonstratorOptions(results_per_page=demo.results_per_page, separator="\n")
    states: dict[str, LoopState] = {}
    meter = Meter(START, options.run_dir / "figures.json", processes)
    try:
        for way in (START, EPISODES, PIVOTS):
            directory = options.run_dir / way
            directory.mkdir(exist_ok=True)
            if way != START and not (directory / STATE).exists():
                LoopState(start=states[START].adapter).save(directory / STATE)
            async with open_parts(
                settings,
                model=options.model,
                directory=directory,
                runner=runner,
                shop=shop,
                storage=storage,
                reward=ReturnReward(),
                objective=SuccessReward(),
            ) as parts:
                meter = Meter(way, options.run_dir / "figures.json", processes)
                states[way] = await ClosedLoop(plan_of(way, base, options), parts, meter).run()
        return await report(base, storage, states, meter.stages)
    finally:
        await runner.close()
        await storage.close()


async def report(
    plan: LoopPlan, storage: FileTrajectoryStorage, states: dict[str, LoopState], stages: Sequence[Stage]
) -> str:
    """A line for each way, and the difference between them."""
    solved = {way: await _solved(plan, storage, way) for way in states}
    lines = [f"{'start':<9} {_told(solved[START])} of the held-out goals"]
    for way in (EPISODES, PIVOTS):
        own = [each for each in stages if each.way == way]
        minutes = sum(each.processor for each in own) / 60
        signal, attempts = sum(each.signal for each in own), sum(each.attempts for each in own)
        gain = _difference(solved[way], solved[START])
        lines.append(
            f"{way:<9} {_told(solved[way])} after {minutes:.1f} processor minutes; {gain.mean:+.2f} ({gain.low:+.2f} "
            f"to {gain.high:+.2f}) against the start, {gain.mean / minutes:+.3f} a minute; {signal} of {attempts} "
            f"attempts with a signal, {signal / minutes:.1f} a minute"
        )
    found = [each for each in stages if each.way == PIVOTS and each.pivots]
    if found:
        updates = "; ".join(f"{each.name} {each.processor:.0f} s, {each.signal} with a signal" for each in found)
        wordings, outcomes = sum(each.wordings for each in found), sum(each.outcomes for each in found)
        lines.append(f"pivots: {found[0].pivots} found; {wordings} wordings had {outcomes} outcomes; {updates}")
    change = _difference(solved[PIVOTS], solved[EPISODES])
    lines.append(f"pivots - episodes: {change.mean:+.2f} ({change.low:+.2f} to {change.high:+.2f}) in success")
    return "\n".join(lines)


async def _solved(plan: LoopPlan, storage: FileTrajectoryStorage, way: str) -> dict[str, bool]:
    held_out = HeldOut(plan.model_copy(update={"run_id": way}), storage, ReturnReward.version)
    return {task: episode.success for task, episode in (await held_out.of(FINAL)).items()}


def _told(solved: dict[str, bool]) -> str:
    found = wilson(sum(solved.values()), len(solved))
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f}, {len(solved)} goals)"


def _difference(one: dict[str, bool], other: dict[str, bool]) -> Estimate:
    shared = sorted(one.keys() & other.keys())
    return paired_difference([float(other[task]) for task in shared], [float(one[task]) for task in shared])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/pivots"))
    parser.add_argument("--model", type=Path, help="directory of the base model (default: the demo's)")
    parser.add_argument("--demonstrations", type=int, default=32, help="of other goals, for the fine-tuning")
    parser.add_argument("--iterations", type=int, default=3, help="of whole episodes")
    parser.add_argument("--tasks", type=int, default=8, help="of an iteration")
    parser.add_argument("--samples", type=int, default=6, help="attempts at a task, and answers to a decision")
    parser.add_argument("--pivots", type=int, default=6)
    parser.add_argument("--updates", type=int, default=4, help="on the pivots")
    parser.add_argument("--held-out", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2, help="of the model server")
    options = parser.parse_args()
    options.model = options.model or ensure_model()
    options.run_dir.mkdir(parents=True, exist_ok=True)
    with servers(options, options.run_dir) as (shop, model, processes):
        print(asyncio.run(run(options, shop, model, processes)))


if __name__ == "__main__":
    main()
