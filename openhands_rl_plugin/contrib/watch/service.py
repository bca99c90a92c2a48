"""The service: from where the journal stands, one step after the other, each of which may be repeated.

A candidate passes two gates: the canary (servers reproduce the trainer's logprobs) and the held-out suite, which is
frozen at first use.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from openhands_rl_plugin.apps.loop.run import LoopJob, open_player
from openhands_rl_plugin.apps.loop.tasks import LoopTasks, TaskSource, measured_tasks
from openhands_rl_plugin.config.build import make_reward, success_rule
from openhands_rl_plugin.config.rl import RewardSettings, RLSettings, TrainingSettings
from openhands_rl_plugin.contrib.watch import gathering
from openhands_rl_plugin.contrib.watch.journal import Entry, Journal, Round, State, WatchStep
from openhands_rl_plugin.contrib.watch.settings import watch_settings
from openhands_rl_plugin.core.errors import (
    CaughtFailure,
    ConfigError,
    InfrastructureError,
    PublishError,
    RLError,
    TrainingError,
    boundary,
)
from openhands_rl_plugin.core.machine import forget_unused
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.statistics import paired_difference
from openhands_rl_plugin.core.types import Adapter, FailureKind, JsonObject
from openhands_rl_plugin.evals.runs.suites import TESTS, own_suite
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.rollout.many import RolloutPlan, roll_out
from openhands_rl_plugin.rollout.scoring import rescore, stored_rewards
from openhands_rl_plugin.training.data.dataset import TrainingDataset, nothing_learnt
from openhands_rl_plugin.training.learn import TrainingJob, train_policy

log = redacting_logger(__name__)

ROUND = "watch_round"
"""The metric of a version that says which round made it."""
_KEPT = 10
"""Versions made by the watch that are kept: the newest, and the last in use."""
LEAST_MEASURED = 0.9
"""Share of the suite's tasks that must have a valid episode; else the model server or the sandbox was away."""
_CERTAIN = 1 - 1e-9
_LEAST_MARGIN = 0.02
"""Smaller ones ask for as many tasks as this one."""


def held_out_gate(
    after: Mapping[str, float], against: Mapping[str, Mapping[str, float]], margin: float
) -> tuple[bool, str]:
    """Passed unless the interval of a paired difference includes a loss of more than ``margin``; and the figures.

    Args:
        after: task -> share of the candidate's attempts that succeeded.
        against: name -> the same of what it is compared with. Beside the version in use that is the best one so far,
            so that losses within the margin do not add up from version to version.
        margin: of the mean success, in [0, 1).
    """
    # With fewer tasks a loss of ``margin`` goes unseen too often: the interval of tied tasks has no width, however few
    # they are. With n of them no loss is seen with a chance of ``(1 - margin) ** n``, here at most 0.14.
    found, passed, least = list[str](), True, math.ceil(2 / max(margin, _LEAST_MARGIN))
    for name, before in against.items():
        shared = sorted(before.keys() & after.keys())
        change = paired_difference([before[task] for task in shared], [after[task] for task in shared])
        passed = passed and change.low is not None and change.n >= least and change.low >= -margin
        interval = (
            f"{change.mean:+.3f} (95% interval {change.low:+.3f} to {change.high:+.3f})" if change.n else "unknown"
        )
        found.append(f"{interval} in success against {name}, {change.n} tasks of {least} that the margin needs")
    return passed, f"held-out suite: {'; '.join(found)}; a loss of {margin:g} is allowed"


def suite_tasks(settings: RLSettings) -> LoopTasks:
    """The tasks of ``[rl.watch]``. Raises ``ConfigError``."""
    watch = watch_settings(settings)
    if not watch.suite:
        raise ConfigError(
            '[rl.watch] suite: there is nothing to measure candidates on: name a suite, such as "environment" or '
            '"swe-local", or a file of rows with what the agent could do before'
        )
    tasks = measured_tasks(TaskSource(suite=watch.suite, count=watch.tasks), settings, watch.tasks)
    if not tasks.held_out:
        raise ConfigError(f"[rl.watch] suite: {watch.suite} has no tasks")
    return tasks


def digest_of(tasks: LoopTasks) -> str:
    """Identifies the tasks, with all that they ask; others would make two measurements incomparable."""
    parts = [entry.task.model_dump_json() for entry in tasks.held_out]
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


async def measure(job: LoopJob, storage: TrajectoryStorage, run_id: str, served_model: str) -> dict[str, float]:
    """Task of the suite -> share of the episodes with the model ``served_model`` that succeed. The same ``run_id``
    resumes. Raises ``InfrastructureError`` where too many episodes failed, and what the environment raises."""
    settings, software = job.settings, job.tasks.suite.software
    tasks = [each.task.model_copy(update={"limits": each.task.limits or job.limits}) for each in job.tasks.held_out]
    plan = RolloutPlan(
        run_id=run_id,
        tasks=tuple(tasks),
        samples_per_task=watch_settings(settings).attempts,
        served_model=served_model,
        sampling=settings.sampling_params(),
        seed=settings.sampling.seed,
        concurrency=settings.max_workers,
    )
    with ExitStack() as opened:
        if (own := own_suite(job.tasks.suite.name)) is not None:
            settings = opened.enter_context(own.serving(settings))
        if job.backend is not None:
            await job.backend.check()
        async with open_player(job, settings, storage) as runner:
            executed = await roll_out(plan, runner, storage)
    reward = make_reward(job.settings.reward.overridden(TESTS) if software else RewardSettings(name="return"))
    await rescore(storage, reward, TrajectoryFilter(run_id=run_id))
    rule = success_rule(tasks[0].environment, job.settings.reward)
    success: dict[str, list[bool]] = defaultdict(list)
    for each, value in zip(executed, await stored_rewards(storage, reward, executed), strict=True):
        if value is not None:
            success[each.task.id].append(value >= _CERTAIN if software else rule.holds(value, each.stop))
    if len(success) < LEAST_MEASURED * len(tasks):
        why = next((f": {each.failure.message:.200}" for each in executed if each.failure is not None), "")
        raise InfrastructureError(f"only {len(success)} of {len(tasks)} held-out tasks have a valid episode{why}")
    return {task: fmean(values) for task, values in success.items()}


@dataclass
class Watch:
    """One adapter's watch. ``job``: the held-out tasks, the model's weights, the servers, and the folder of the state.

    ``say`` is called with every line of the journal.
    """

    job: LoopJob
    storage: TrajectoryStorage
    adapters: AdapterStore
    publisher: AdapterPublisher
    say: Callable[[Entry], None] = lambda entry: None

    def __post_init__(self) -> None:
        self._settings = self.job.settings
        self._watch = watch_settings(self._settings)
        self._name = self._settings.serving.adapter
        self._journal = Journal(self.job.directory)

    def check(self) -> None:
        """Freeze the held-out suite, or raise ``ConfigError`` where it is another than before."""
        digest, state = digest_of(self.job.tasks), self._journal.state()
        if not state.suite:
            count = len(self.job.tasks.held_out)
            sentence = f"the held-out suite is {count} tasks of {self.job.tasks.suite.name} from now on"
            self._note(WatchStep.FROZEN, sentence, figures={"digest": digest, "tasks": count})
        elif state.suite != digest:
            raise ConfigError(
                "[rl.watch] suite: its tasks are others than those that former versions were measured on, so nothing "
                f"could be compared: set it back, or move {self._journal.folder} away to begin anew"
            )

    async def look(self) -> bool:
        """Do all that can be done now; whether nothing went wrong. Raises ``StorageError`` of the journal itself."""
        while True:
            state = self._journal.state()
            try:
                if not await self._advance(state):
                    return True
            except RLError as error:
                number = state.round.number if state.round is not None else 0
                self._note(WatchStep.COULD_NOT, (str(error) or type(error).__name__).splitlines()[0], round=number)
                return False

    async def _advance(self, state: State) -> bool:
        """One step; false where there is nothing to do now."""
        if (current := state.round) is None:
            return await self._begin(state)
        if not current.candidate:
            await self._train(current)
            return True
        candidate, used = self.adapters.get(current.candidate), self._in_use()
        await self.publisher.loaded()  # servers that are away are no reason to refuse a candidate
        try:
            await self.publisher.stage(candidate)
        except PublishError as error:
            await self.publisher.loaded()  # raises where they went away meanwhile
            self._note(WatchStep.HELD, f"canary: {error}", round=current.number, adapter=candidate.name)
            return True
        if unmeasured := [name for name in (used, candidate.name) if name not in state.measured]:
            await self._measure(state, current, unmeasured[0])
        else:
            await self._decide(state, current, candidate)
        return True

    async def _begin(self, state: State) -> bool:
        self._tidy(state)
        lineage = gathering.chain(self.adapters, self._in_use() or None)
        held_out = {(entry.task.environment, entry.task.id) for entry in self.job.tasks.held_out}
        ids = await gathering.candidates(self.storage, self._settings, state, lineage, held_out)
        judged = await gathering.judge(self._settings, self.storage, ids)
        about = {*judged.known, *(name for both in judged.preferred for name in both)}
        new, needed = len(about - state.seen), self._watch.min_episodes
        found, missing = None, f"{new} new ones of {needed} that are needed"
        if new >= needed:
            found, missing = await gathering.material(self.storage, self._settings, judged, lineage)
        count, good = len(judged.known), sum(each.good for each in judged.known.values())
        figures: JsonObject = {"judged": count, "good": good, "new": new, "open": {**judged.open}, "missing": missing}
        if figures != state.judged:
            aside = "".join(f"; {count} wait: {why}" for why, count in judged.open.items())
            sentence = f"{count} episodes are judged, {good} of them successes{aside}; {missing}".removesuffix("; ")
            self._note(WatchStep.JUDGED, sentence, figures=figures)
        if found is not None:
            self._gather(state, found, about)
        return found is not None

    def _tidy(self, state: State) -> None:
        """Remove the last round's checkpoints, and all versions that the watch made but the newest, the one in use and
        the last ones that were admitted, to which a rollback may go."""
        shutil.rmtree(self._checkpoints(state.rounds), ignore_errors=True)
        made = [each.name for each in self.adapters.versions(self._name) if ROUND in each.metrics]
        for name in {*made[:-_KEPT]} - {self._in_use(), *state.admitted[-_KEPT:]}:
            with suppress(RLError):  # it stays
                self.adapters.remove(name)

    def _gather(self, state: State, found: gathering.Material, about: Collection[str]) -> None:
        latest, parent = self.adapters.latest(self._name), self._in_use()
        figures: JsonObject = {
            "algorithm": found.settings.algorithm,
            "parent": parent or None,
            "latest": latest.version if latest is not None else 0,
            "episodes": {**found.episodes},
            "others": [*sorted({*about} - found.episodes.keys())],
        }
        number = state.rounds + 1
        begins = f"round {number} begins from {parent or 'the base model'}: {found.because}"
        self._note(WatchStep.GATHERED, begins, round=number, figures=figures)

    async def _train(self, current: Round) -> None:
        settings = gathering.training_for(self._settings.training, current.algorithm)
        dataset = await gathering.dataset_of(self.storage, self._settings, settings, current.episodes)
        started = time.monotonic()
        try:
            adapter = await asyncio.to_thread(self._candidate, settings, dataset, current)
        except (TrainingError, CaughtFailure) as error:
            self._note(WatchStep.HELD, f"its training failed: {error}", round=current.number)
            return
        sentence = f"{adapter.name} was trained on {dataset.used} episodes by {dataset.algorithm}"
        figures: JsonObject = {**adapter.metrics, "seconds": time.monotonic() - started}
        self._note(WatchStep.TRAINED, sentence, round=current.number, adapter=adapter.name, figures=figures)

    def _candidate(self, settings: TrainingSettings, dataset: TrainingDataset, current: Round) -> Adapter:
        """Train the round's version, from the last checkpoint, or find the one that a killed process has written.

        Raises ``TrainingError``, ``StorageError`` and ``CaughtFailure`` for what a library raises, such as too little
        memory.
        """
        for each in self.adapters.versions(self._name):
            of_round = each.version > current.latest and each.metrics.get(ROUND) == current.number
            if of_round and self.adapters.probe(each) is not None:
                return each
        if not dataset.samples:
            raise TrainingError(nothing_learnt(settings, dataset.excluded))
        parent = self.adapters.get(current.parent) if current.parent is not None else None
        job = TrainingJob(
            settings=self._settings.model_copy(update={"training": settings}),
            model=self.job.model,
            adapters=self.adapters,
            name=self._name,
            base_model=self._settings.serving.model,
            parent=parent,
        )
        with boundary(FailureKind.MODEL, "training"):
            of_round, run = {ROUND: float(current.number)}, self._checkpoints(current.number)
            adapter, _ = train_policy(job, dataset, run=run, measure=lambda _: of_round)
        assert adapter is not None, "a watch is one process"
        forget_unused()
        return adapter

    async def _measure(self, state: State, current: Round, version: str) -> None:
        served = self._settings.serving.model
        if version:
            adapter = self.adapters.get(version)
            await self.publisher.stage(adapter)  # a server may have been started anew since
            served = await self.publisher.served_model(adapter)
        # An episode that failed before is rolled out again.
        run_id = f"{self.job.run_id}/heldout/{version or 'base'}/{state.tries}"
        success = await measure(self.job, self.storage, run_id, served)
        mean = fmean(success.values())
        sentence = f"{version or 'the base model'} succeeds in {mean:.3f} of {len(success)} tasks"
        figures: JsonObject = {"success": {**success}, "mean": mean}
        self._note(WatchStep.MEASURED, sentence, round=current.number, adapter=version, figures=figures)

    async def _decide(self, state: State, current: Round, candidate: Adapter) -> None:
        """The held-out gate: compared with the version in use and the best one so far."""
        used = self._in_use()
        standing = [
            name for name in (used, "", *state.admitted) if name in state.measured and name not in state.dropped
        ]
        best = max([used, *standing], key=lambda name: fmean(state.measured[name].values()))
        against = {name or "the base model": state.measured[name] for name in (used, best)}
        passed, figures = held_out_gate(state.measured[candidate.name], against, self._watch.margin)
        if passed:
            await self.publisher.publish(candidate)
        else:
            with suppress(PublishError):  # one that stays loaded is not in use all the same
                await self.publisher.retire(candidate.name)
        step, what = (WatchStep.ADMITTED, "is in use") if passed else (WatchStep.HELD, "was held back")
        self._note(step, f"{candidate.name} {what}: {figures}", round=current.number, adapter=candidate.name)

    def _note(
        self, step: WatchStep, sentence: str, *, round: int = 0, adapter: str = "", figures: JsonObject | None = None
    ) -> None:
        self.say(self._journal.append(step, sentence, round=round, adapter=adapter, figures=figures))

    def _checkpoints(self, number: int) -> Path:
        return self._journal.folder / "training" / f"round-{number:04d}"

    def _in_use(self) -> str:
        """The version in use; empty for the base model."""
        current = self.adapters.current(self._name)
        return current.name if current is not None else ""
