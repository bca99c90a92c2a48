"""One graded episode: of an instance, whose patch is tested, or of an environment, which returns the rewards itself."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
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
from openhands_rl_plugin.evals.runs.outcome import EvalTask, GradedEpisode
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.runs.suites import TESTS, directory_of
from openhands_rl_plugin.evals.swe.logs import InstanceLogs
from openhands_rl_plugin.evals.swe.run_evaluation import grade_with_retries
from openhands_rl_plugin.evals.swe.types import Instance, InstanceBackend, PatchVerdict, VerdictKind
from openhands_rl_plugin.hosts.pool import HostRunner
from openhands_rl_plugin.rollout.scoring import judge
from openhands_rl_plugin.rollout.session import failed_episode

_CHECKOUT = "instance.checkout"
_AS_RETURNED = "return-1"


def judging_reward(reward: RewardSettings, success: SuccessRule, *, software: bool) -> Reward:
    """The reward that says whether a task is resolved: its tests, the return against a bound, or the return alone."""
    if software:
        return make_reward(reward.overridden(TESTS))
    if success.at is None:
        return registry.build("rewards", "return")
    return registry.build("rewards", "success", {"threshold": success.at})


class EvalRunner:
    """Rolls out episodes with ``host``, which stores them, then grades and scores them.

    ``backend`` gives the checkouts of instances and, with ``grade``, tests their patches; ``reward`` scores the
    verdicts. An episode of an environment resolves its task by the plan's ``success``.

    ``max_workers`` bound checkouts and episodes, and the plan's ``graders`` gradings, so that patches are tested while
    other episodes wait for the model. ``scratch`` holds the checkouts in use.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        host: HostRunner,
        *,
        strategy: StrategySpec,
        storage: TrajectoryStorage,
        scratch: Path,
        backend: InstanceBackend | None = None,
        reward: RewardSettings | None = None,
        grade: bool = True,
    ) -> None:
        self._plan = plan
        self._host = host
        self._strategy = strategy
        self._storage = storage
        self._scratch = scratch
        self._backend = backend
        self._grade = grade
        self._reward = judging_reward(reward or RewardSettings(), plan.success, software=backend is not None)
        self._rolling_out = asyncio.Semaphore(plan.settings.max_workers)
        self._grading = asyncio.Semaphore(plan.graders)

    async def run(self, request: EpisodeRequest, eval_task: EvalTask) -> GradedEpisode:
        """Roll out, store, grade and score. A failed episode is returned, not raised; a stored one is reused.

        Raises what must stop an evaluation: ``ConfigError`` and ``StorageError``.
        """
        trajectory, scores = await self._stored(trajectory_id(request))
        if trajectory is None or trajectory.stop is StopReason.UNFINISHED:
            async with self._rolling_out:
                if eval_task.instance is None:
                    trajectory = await self._host.run(request)
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
        found = [found async for found in self._storage.find(where)]
        if not found:
            return None, ()
        trajectory, by = found[0][0], self._strategy
        if trajectory.stop is not StopReason.UNFINISHED and trajectory.strategy != by:
            held = f"{trajectory.task.id} of this run with {_shown(trajectory.strategy)}, not {_shown(by)}"
            raise ConfigError(f"the store holds {held}: give another --note or another --store")
        return found[0]

    async def _returned(self, trajectory: Trajectory, scores: tuple[Score, ...]) -> GradedEpisode:
        """The episode with its return and success in ``test_result``, as for instances."""
        score = await judge(self._reward, trajectory)
        # After a timeout the last action has no observation: the task is not resolved, and the reward has no value.
        valid = isinstance(score, Score)
        if valid and score.reward_version not in {each.reward_version for each in scores}:
            await self._storage.add_scores([score])
        if trajectory.evidence.get("unrewarded") is True:
            return GradedEpisode(trajectory)
        total = trajectory.episode_return
        resolved = valid and self._plan.success.holds(total, trajectory.stop)
        result: JsonObject = {"reward": total, "report": {"resolved": resolved}}
        detail: JsonObject = {"resolved": resolved, "valid": valid}
        score = Score(trajectory_id=trajectory.id, reward=total, detail=detail, reward_version=_AS_RETURNED)
        return GradedEpisode(_with_result(trajectory, result), score)

    async def _tested(self, trajectory: Trajectory, scores: tuple[Score, ...], instance: Instance) -> GradedEpisode:
        own = [score for score in scores if score.reward_version == self._reward.version]
        if own and (verdict := _verdict_of(own[-1])) is not None:
            return GradedEpisode(with_verdict(trajectory, verdict), own[-1], verdict)
        if not self._grade:
            return GradedEpisode(trajectory)
        async with self._grading:
            verdict = await self._verdict(trajectory, instance)
        trajectory = with_verdict(trajectory, verdict)
        score = await judge(self._reward, trajectory)
        if isinstance(score, Failure):
            return GradedEpisode(trajectory, None, verdict)
        await self._storage.add_scores([score])
        return GradedEpisode(trajectory, score, verdict)

    async def _roll_out(self, request: EpisodeRequest, instance: Instance) -> Trajectory:
        root, started = self._scratch / uuid.uuid4().hex, time.time()
        try:
            place = await self._place(instance, root)
            if isinstance(place, TaskWorkspace):
                return await self._host.run(request, place)
            base = self._plan.settings.serving.model
            trajectory = failed_episode(request, place, strategy=self._strategy, base_model=base, started=started)
            await self._storage.add(trajectory)
            return trajectory
        finally:
            await asyncio.to_thread(remove_tree, root)

    async def _place(self, instance: Instance, root: Path) -> TaskWorkspace | Failure:
        assert self._backend is not None
        directory = root / directory_of(instance)
        try:
            with boundary(FailureKind.INFRASTRUCTURE, _CHECKOUT):
                root.mkdir(parents=True, mode=0o700)
                checkout = await self._backend.checkout(instance, directory)
        except CaughtFailure as caught:
            return caught.failure
        except ConfigError as error:
            # One invalid row must not stop the evaluation.
            return Failure(kind=FailureKind.ENVIRONMENT, message=str(error)[:500], boundary=_CHECKOUT)
        return TaskWorkspace(
            root=root,
            repository=directory.name,
            mounts=checkout.mounts,
            variables=checkout.variables,
        )

    async def _verdict(self, trajectory: Trajectory, instance: Instance) -> PatchVerdict:
        assert self._backend is not None
        evidence, refused = trajectory.evidence, VerdictKind.REFUSED
        patch = evidence.get("git_patch")
        if why := evidence.get("git_patch_refused"):
            return PatchVerdict(instance_id=instance.instance_id, kind=refused, reason=str(why))
        if evidence.get("git_patch_cut"):
            why = "the change is larger than a recorded patch may be"
            return PatchVerdict(instance_id=instance.instance_id, kind=refused, reason=why)
        if isinstance(patch, str):
            logs = InstanceLogs(self._plan.out / trajectory.run_id / "eval_logs" / instance.instance_id)
            timeout, retries = self._plan.test_timeout, self._plan.retries
            try:
                return await grade_with_retries(self._backend, instance, patch, logs, timeout=timeout, retries=retries)
            except ConfigError as error:
                why = str(error)
        else:
            why = str(evidence.get("git_patch_missing") or "the episode left no patch")
        return PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.INFRASTRUCTURE, reason=why)


def _shown(strategy: StrategySpec) -> str:
    return f"{strategy.name} {json.dumps(strategy.options)}" if strategy.options else strategy.name


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
