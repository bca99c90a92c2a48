"""Runs an evaluation plan: ``evaluate`` runs every task in every run, ``EvalRunner`` rolls out and grades one episode.

An episode is of an instance, whose patch is tested, or of an environment, which returns the rewards itself.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from pydantic import ValidationError

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import RewardSettings
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary
from openhands_rl_plugin.core.files import remove_tree
from openhands_rl_plugin.core.judgements import SuccessRule
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter, trajectory_id
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Failure,
    FailureKind,
    JsonObject,
    Score,
    StopReason,
    StrategySpec,
    Trajectory,
)
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.runs.run_files import GradedEpisode, Outcome, RunFolder
from openhands_rl_plugin.evals.runs.suites import REPLIES, TESTS, EvalTask, directory_of, own_suite
from openhands_rl_plugin.evals.swe.instances import Instance, InstanceBackend, PatchVerdict, VerdictKind
from openhands_rl_plugin.hosts.pool import HostRunner, open_runner
from openhands_rl_plugin.hosts.shared.sessions import RL_AGENT, HostOptions
from openhands_rl_plugin.rollout.episode import failed_episode
from openhands_rl_plugin.rollout.scoring import judge

SCRATCH = ".work"
"""The folder of checkouts below that of the evaluation; leftovers of a killed process are removed."""
STORE = "trajectories"
"""The default folder of the store, below that of the evaluation."""

_MOST_PROCESSES = 8


async def evaluate(
    plan: EvaluationPlan,
    eval_tasks: Sequence[EvalTask],
    *,
    storage: TrajectoryStorage,
    backend: InstanceBackend | None = None,
    grade: bool = True,
    retry_failed: bool = False,
    processes: int = 0,
    started: Callable[[int], Callable[[Outcome], object] | None] | None = None,
) -> None:
    """Run the unfinished attempts of a plan, then write predictions and run reports. One process at a time.

    ``started`` gets the number of attempts that are not done and returns the callback for outcomes, which are stored
    by then. ``retry_failed`` repeats attempts that ended with an infrastructure failure. ``processes``: worker
    processes for OpenHands' controllers; 0 runs them in this one.

    Raises ``ConfigError``, also for runs that were made with other settings, and ``StorageError``; an interruption
    keeps finished attempts.
    """
    if backend is not None:
        await backend.check()
    scratch = plan.out / SCRATCH
    with ExitStack() as opened:
        folders = [
            opened.enter_context(closing(RunFolder(plan, run, retry_failed=retry_failed))) for run in plan.each_run()
        ]
        remove_tree(scratch)
        opened.callback(remove_tree, scratch)
        left = [(folder, each) for folder in folders for each in eval_tasks if each.task.id not in folder.done]
        on_outcome = started(len(left)) if started else None
        async with open_eval_runner(plan, storage, backend, scratch, processes, grade=grade) as runner:

            async def attempt(folder: RunFolder, eval_task: EvalTask) -> None:
                graded = await _attempt(runner, folder, eval_task)
                outcome = await asyncio.to_thread(folder.write, graded, eval_task)
                if on_outcome is not None:
                    on_outcome(outcome)

            for folder in folders:
                folder.begin()
            try:
                async with asyncio.TaskGroup() as group:
                    for each in left:
                        group.create_task(attempt(*each))
            except ExceptionGroup as errors:
                # What stops an evaluation (a full disk, say) stops every attempt in the same way: one error is enough.
                raise errors.exceptions[0] from errors
        for folder in folders:
            folder.write_report([each.task.id for each in eval_tasks])


async def _attempt(runner: EvalRunner, folder: RunFolder, eval_task: EvalTask) -> GradedEpisode:
    """One attempt; those of an earlier process that ended with an infrastructure failure are skipped."""
    task = eval_task.task.model_copy(update={"limits": eval_task.task.limits or folder.plan.limits()})
    started, number = time.time(), 0
    while True:
        graded = await runner.run(folder.plan.request(folder.run, task, number), eval_task)
        failure = graded.trajectory.failure
        again = failure is not None and failure.kind is FailureKind.INFRASTRUCTURE
        if not again or graded.trajectory.times.finished >= started:
            return graded
        number += 1


@asynccontextmanager
async def open_eval_runner(
    plan: EvaluationPlan,
    storage: TrajectoryStorage,
    backend: InstanceBackend | None,
    scratch: Path,
    processes: int = 0,
    *,
    grade: bool = True,
) -> AsyncIterator[EvalRunner]:
    """The runner of a plan, with its own shop where that is the suite. ``scratch`` holds checkouts in use."""
    options, settings = options_of(plan, processes), plan.settings
    with ExitStack() as opened:
        if (own := own_suite(plan.suite.name)) is not None:
            settings = opened.enter_context(own.serving(settings))
        async with open_runner(settings, options, storage=storage, workers=processes) as host:
            yield EvalRunner(
                plan,
                host,
                strategy=options.strategy_spec(settings),
                storage=storage,
                scratch=scratch,
                backend=backend,
                reward=settings.reward,
                grade=grade,
            )


def options_of(plan: EvaluationPlan, processes: int) -> HostOptions:
    """The host options of a plan. Raises ``ConfigError`` for an agent that does not support the suite."""
    software = plan.suite.software
    if plan.agent != RL_AGENT and not software:
        raise ConfigError(f"{plan.suite.name} is an environment, which only {RL_AGENT} supports, not {plan.agent}")
    return HostOptions(
        environment_mode=not software,
        sessions=-(-plan.settings.max_workers // max(1, processes)),
        command_timeout=plan.command_timeout,
        native_tool_calling=plan.native_tool_calling,
        agent=plan.agent,
        token_ids=plan.agent == RL_AGENT if plan.token_ids is None else plan.token_ids,
        stuck_detection=software,
        llm_retries=plan.llm_retries,
        replies=REPLIES if software else (),
    )


def process_count(workers: int) -> int:
    """The number of worker processes for ``workers`` concurrent episodes: at most one for each CPU."""
    return max(1, min(workers, os.cpu_count() or 1, _MOST_PROCESSES))


_CHECKOUT = "instance.checkout"
_AS_RETURNED = "return-1"


def judging_reward(reward: RewardSettings, success: SuccessRule, *, software: bool) -> Reward:
    """The reward that says whether a task is resolved: its tests, the return against a bound, or the return alone."""
    if software:
        return make_reward(reward.overridden(TESTS))
    if success.at is None:
        return registry.build("rewards", "return")
    return registry.build("rewards", "success", {"threshold": success.at})


@dataclass
class EvalRunner:
    """Rolls out episodes with ``host``, which stores them, then grades and scores them.

    ``backend`` gives the checkouts of instances and, with ``grade``, tests their patches; ``reward`` scores the
    verdicts. An episode of an environment resolves its task by the plan's ``success``.

    ``max_workers`` bound checkouts and episodes, and the plan's ``graders`` gradings, so that patches are tested while
    other episodes wait for the model. ``scratch`` holds the checkouts in use.
    """

    plan: EvaluationPlan
    host: HostRunner
    _: KW_ONLY
    strategy: StrategySpec
    storage: TrajectoryStorage
    scratch: Path
    backend: InstanceBackend | None = None
    reward: RewardSettings = field(default_factory=RewardSettings)
    grade: bool = True

    def __post_init__(self) -> None:
        self._reward = judging_reward(self.reward, self.plan.success, software=self.backend is not None)
        self._rolling_out = asyncio.Semaphore(self.plan.settings.max_workers)
        self._grading = asyncio.Semaphore(self.plan.graders)

    async def run(self, request: EpisodeRequest, eval_task: EvalTask) -> GradedEpisode:
        """Roll out, store, grade and score. A failed episode is returned, not raised; a stored one is reused.

        Raises what must stop an evaluation: ``ConfigError`` and ``StorageError``.
        """
        trajectory, scores = await self._stored(trajectory_id(request))
        if trajectory is None or trajectory.stop is StopReason.UNFINISHED:
            async with self._rolling_out:
                if eval_task.instance is None:
                    trajectory = await self.host.run(request)
                else:
                    trajectory = await self._roll_out(request, eval_task.instance)
        if trajectory.failure is not None:
            return GradedEpisode(trajectory)
        if eval_task.instance is None:
            return await self._returned(trajectory, scores)
        return await self._tested(trajectory, scores, eval_task.instance)

    async def _stored(self, identity: str) -> tuple[Trajectory | None, tuple[Score, ...]]:
        """The episode of an earlier process, finished or not. Raises ``ConfigError`` for another strategy's."""
        where = TrajectoryFilter(ids=(identity,), finished=None)
        found = [found async for found in self.storage.find(where)]
        if not found:
            return None, ()
        trajectory, by = found[0][0], self.strategy
        if trajectory.stop is not StopReason.UNFINISHED and trajectory.strategy != by:
            held = f"{trajectory.task.id} of this run with another {trajectory.strategy.name}, not this {by.name}"
            raise ConfigError(f"the store holds {held}: give another --note or another --store")
        return found[0]

    async def _returned(self, trajectory: Trajectory, scores: tuple[Score, ...]) -> GradedEpisode:
        """The episode with its return and success in ``test_result``, as for instances."""
        score = await judge(self._reward, trajectory)
        # After a timeout the last action has no observation: the task is not resolved, and the reward has no value.
        valid = isinstance(score, Score)
        if valid and score.reward_version not in {each.reward_version for each in scores}:
            await self.storage.add_scores([score])
        if trajectory.evidence.get("unrewarded") is True:
            return GradedEpisode(trajectory)
        total = trajectory.episode_return
        resolved = valid and self.plan.success.holds(total, trajectory.stop)
        result: JsonObject = {"reward": total, "report": {"resolved": resolved}}
        detail: JsonObject = {"resolved": resolved, "valid": valid}
        score = Score(trajectory_id=trajectory.id, reward=total, detail=detail, reward_version=_AS_RETURNED)
        return GradedEpisode(_with_result(trajectory, result), score)

    async def _tested(self, trajectory: Trajectory, scores: tuple[Score, ...], instance: Instance) -> GradedEpisode:
        own = [score for score in scores if score.reward_version == self._reward.version]
        if own and (verdict := _verdict_of(own[-1])) is not None:
            return GradedEpisode(with_verdict(trajectory, verdict), own[-1], verdict)
        if not self.grade:
            return GradedEpisode(trajectory)
        async with self._grading:
            verdict = await self._verdict(trajectory, instance)
        trajectory = with_verdict(trajectory, verdict)
        score = await judge(self._reward, trajectory)
        if isinstance(score, Failure):
            return GradedEpisode(trajectory, None, verdict)
        await self.storage.add_scores([score])
        return GradedEpisode(trajectory, score, verdict)

    async def _roll_out(self, request: EpisodeRequest, instance: Instance) -> Trajectory:
        root, started = self.scratch / uuid.uuid4().hex, time.time()
        try:
            place = await self._place(instance, root)
            if isinstance(place, TaskWorkspace):
                return await self.host.run(request, place)
            base = self.plan.settings.serving.model
            trajectory = failed_episode(request, place, strategy=self.strategy, base_model=base, started=started)
            await self.storage.add(trajectory)
            return trajectory
        finally:
            await asyncio.to_thread(remove_tree, root)

    async def _place(self, instance: Instance, root: Path) -> TaskWorkspace | Failure:
        assert self.backend is not None
        directory = root / directory_of(instance)
        try:
            with boundary(FailureKind.INFRASTRUCTURE, _CHECKOUT):
                root.mkdir(parents=True, mode=0o700)
                return await self.backend.checkout(instance, directory)
        except CaughtFailure as caught:
            return caught.failure
        except ConfigError as error:
            # One invalid row must not stop the evaluation.
            return Failure(kind=FailureKind.ENVIRONMENT, message=str(error)[:500], boundary=_CHECKOUT)

    async def _verdict(self, trajectory: Trajectory, instance: Instance) -> PatchVerdict:
        assert self.backend is not None
        evidence, patch = trajectory.evidence, trajectory.evidence.get("git_patch")
        cut = evidence.get("git_patch_cut") and "the change is larger than a recorded patch may be"
        refused = evidence.get("git_patch_refused") or cut
        if isinstance(patch, str) and not refused:
            logs = self.plan.out / trajectory.run_id / "eval_logs" / instance.instance_id
            return await self.backend.grade(instance, patch, logs=logs, timeout=self.plan.test_timeout)
        why = refused or evidence.get("git_patch_missing") or "the episode left no patch"
        kind = VerdictKind.REFUSED if refused else VerdictKind.INFRASTRUCTURE
        return PatchVerdict(instance_id=instance.instance_id, kind=kind, reason=str(why))


def _with_result(trajectory: Trajectory, result: JsonObject) -> Trajectory:
    return trajectory.model_copy(update={"evidence": {**trajectory.evidence, "test_result": result}})


def with_verdict(trajectory: Trajectory, verdict: PatchVerdict) -> Trajectory:
    """The episode with ``test_result`` in its evidence, as in OpenHands' evaluation.

    The stored episode does not change; its score holds the verdict.
    """
    patch = trajectory.evidence.get("git_patch")
    result: JsonObject = {
        "git_patch": patch if isinstance(patch, str) else "",
        "report": report_of(verdict),
        "verdict": verdict.model_dump(mode="json", exclude={"logs"}),
    }
    return _with_result(trajectory, result)


def report_of(verdict: PatchVerdict) -> JsonObject:
    """``test_result.report`` as OpenHands' ``eval_infer`` writes it."""
    kind = verdict.kind
    return {
        "empty_generation": kind is VerdictKind.EMPTY_PATCH,
        "resolved": verdict.resolved,
        "failed_apply_patch": kind in (VerdictKind.UNAPPLIED, VerdictKind.REFUSED),
        "error_eval": kind is VerdictKind.INFRASTRUCTURE,
        "test_timeout": kind is VerdictKind.TIMED_OUT,
    }


def _verdict_of(score: Score) -> PatchVerdict | None:
    try:
        return PatchVerdict.model_validate(score.detail.get("verdict"))
    except ValidationError:
        return None
