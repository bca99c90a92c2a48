"""SWE-bench instances: check out the repository, roll out an episode in it, grade the patch."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path

from pydantic import ValidationError

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary
from openhands_rl_plugin.core.files import remove_tree
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.records import trajectory_id
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
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace, WorkspaceMount
from openhands_rl_plugin.evals.runs.outcome import EvalTask, GradedEpisode, stored_with_scores
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.runs.suites import directory_of
from openhands_rl_plugin.evals.swe.logs import InstanceLogs
from openhands_rl_plugin.evals.swe.run_evaluation import grade_with_retries
from openhands_rl_plugin.evals.swe.types import Instance, InstanceBackend, PatchVerdict, VerdictKind
from openhands_rl_plugin.hosts.pool import HostRunner
from openhands_rl_plugin.rollout.scoring import judge
from openhands_rl_plugin.rollout.session import failed_episode

_CHECKOUT = "instance.checkout"


class SweRunner:
    """Rolls out instances with ``host``, which stores episodes, and grades them with ``grader`` (``None``: no grading).
    ``reward`` makes scores of the verdicts.

    The plan's ``workers`` bound checkouts and episodes and its ``graders`` gradings, so that patches are tested while
    other episodes wait for the model. ``scratch`` holds the checkouts in use.
    """

    def __init__(
        self,
        plan: EvaluationPlan,
        host: HostRunner,
        *,
        strategy: StrategySpec,
        storage: TrajectoryStorage,
        checkouts: InstanceBackend,
        grader: InstanceBackend | None,
        scratch: Path,
        reward: Reward,
    ) -> None:
        self._plan = plan
        self._checkouts = checkouts
        self._grader = grader
        self._storage = storage
        self._scratch = scratch
        self._host = host
        self._strategy = strategy
        self._reward = reward
        self._playing = asyncio.Semaphore(plan.workers)
        self._grading = asyncio.Semaphore(plan.graders)

    async def run(self, request: EpisodeRequest, eval_task: EvalTask) -> GradedEpisode:
        """As in ``EvalRunner``."""
        assert eval_task.instance is not None
        stored = await self._stored(trajectory_id(request))
        if stored is None or stored.trajectory.stop is StopReason.UNFINISHED:
            async with self._playing:
                stored = GradedEpisode(await self._roll_out(request, eval_task.instance))
        if stored.verdict is not None or stored.trajectory.failure is not None or self._grader is None:
            return stored
        async with self._grading:
            verdict = await self._grade(stored.trajectory, eval_task.instance, self._grader)
        return await self._scored(with_verdict(stored.trajectory, verdict), verdict)

    async def _stored(self, identity: str) -> GradedEpisode | None:
        """The stored episode of an earlier process, with its verdict if it was graded."""
        found = await stored_with_scores(self._storage, identity, self._strategy)
        if found is None:
            return None
        trajectory, scores = found
        own = [score for score in scores if score.reward_version == self._reward.version]
        verdict = _verdict_of(own[-1]) if own else None
        return (
            GradedEpisode(trajectory)
            if verdict is None
            else GradedEpisode(with_verdict(trajectory, verdict), own[-1], verdict)
        )

    async def _roll_out(self, request: EpisodeRequest, instance: Instance) -> Trajectory:
        root, started = self._scratch / uuid.uuid4().hex, time.time()
        try:
            place = await self._place(instance, root)
            if isinstance(place, Failure):
                return await self._failed(request, place, started)
            return await self._host.run(request, place)
        finally:
            await asyncio.to_thread(remove_tree, root)

    async def _place(self, instance: Instance, root: Path) -> TaskWorkspace | Failure:
        directory = root / directory_of(instance)
        try:
            with boundary(FailureKind.INFRASTRUCTURE, _CHECKOUT):
                root.mkdir(parents=True, mode=0o700)
                checkout = await self._checkouts.checkout(instance, directory)
        except CaughtFailure as caught:
            return caught.failure
        except ConfigError as error:
            # One invalid row must not stop the evaluation.
            return Failure(kind=FailureKind.ENVIRONMENT, message=str(error)[:500], boundary=_CHECKOUT)
        return TaskWorkspace(
            root=root,
            repository=directory.name,
            mounts=tuple(WorkspaceMount(host=mount.host, inside=mount.inside) for mount in checkout.mounts),
            variables=checkout.variables,
        )

    async def _failed(self, request: EpisodeRequest, failure: Failure, started: float) -> Trajectory:
        base_model = self._plan.base_model or self._plan.model.name
        trajectory = failed_episode(request, failure, strategy=self._strategy, base_model=base_model, started=started)
        await self._storage.add(trajectory)
        return trajectory

    async def _grade(self, trajectory: Trajectory, instance: Instance, grader: InstanceBackend) -> PatchVerdict:
        patch = trajectory.evidence.get("git_patch")
        if refused := trajectory.evidence.get("git_patch_refused"):
            return _verdict(instance, VerdictKind.REFUSED, str(refused))
        if not isinstance(patch, str):
            why = str(trajectory.evidence.get("git_patch_missing") or "the episode left no patch")
            return _verdict(instance, VerdictKind.INFRASTRUCTURE, why)
        if trajectory.evidence.get("git_patch_cut"):
            return _verdict(instance, VerdictKind.REFUSED, "the change is larger than a recorded patch may be")
        logs = InstanceLogs(self._plan.out / trajectory.run_id / "eval_logs" / instance.instance_id)
        timeout, retries = self._plan.test_timeout, self._plan.retries
        try:
            return await grade_with_retries(grader, instance, patch, logs, timeout=timeout, retries=retries)
        except ConfigError as error:
            return _verdict(instance, VerdictKind.INFRASTRUCTURE, str(error))

    async def _scored(self, trajectory: Trajectory, verdict: PatchVerdict) -> GradedEpisode:
        score = await judge(self._reward, trajectory)
        if isinstance(score, Failure):
            return GradedEpisode(trajectory, None, verdict)
        await self._storage.add_scores([score])
        return GradedEpisode(trajectory, score, verdict)


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
    return trajectory.model_copy(update={"evidence": {**trajectory.evidence, "test_result": result}})


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


def _verdict(instance: Instance, kind: VerdictKind, reason: str) -> PatchVerdict:
    return PatchVerdict(instance_id=instance.instance_id, kind=kind, reason=reason)


def _verdict_of(score: Score) -> PatchVerdict | None:
    try:
        return PatchVerdict.model_validate(score.detail.get("verdict"))
    except ValidationError:
        return None
