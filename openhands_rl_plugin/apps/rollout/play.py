"""``play``: one episode against an endpoint, graded, with its training sequences."""

from __future__ import annotations

import asyncio
import uuid
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.apps.rollout.played import failure_of, told, unusable
from openhands_rl_plugin.apps.rollout.tasks import FoundTask, GivenTask, find_task
from openhands_rl_plugin.config.build import check_environment_server, make_reward, open_storage
from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RewardSettings, RLSettings, ServingSettings
from openhands_rl_plugin.config.rollout import PlayOptions
from openhands_rl_plugin.config.success import success_rule
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Failure,
    FailureKind,
    PolicyRef,
    Score,
    Trajectory,
)
from openhands_rl_plugin.environments.workspace.copies import scratch_folder
from openhands_rl_plugin.evals.runs.backends import make_backend
from openhands_rl_plugin.evals.runs.episodes import GradedEpisode
from openhands_rl_plugin.evals.runs.evaluate import open_eval_runner
from openhands_rl_plugin.evals.runs.llm import EvaluatedModel
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, served_model, stated_bounds
from openhands_rl_plugin.evals.runs.suites import ENVIRONMENT, graded_by
from openhands_rl_plugin.evals.swe.protocols import InstanceBackend
from openhands_rl_plugin.hosts.shared.options import RL_AGENT
from openhands_rl_plugin.models.engines.preflight import check_answers, check_model_server
from openhands_rl_plugin.models.engines.server_models import listed_models
from openhands_rl_plugin.rollout.scoring import judge, refuse_labels, refuse_without_workspace
from openhands_rl_plugin.trajectories.exchange.trainers.rollout import PlayedRollout

_SCRATCH = "openhands-rl-rollout-"
_RETURN = "return"
_SECONDS = 10.0


async def play(task: GivenTask, options: PlayOptions, *, storage: TrajectoryStorage | None = None) -> PlayedRollout:
    """Play one episode of ``task`` against the endpoint of ``options``, grade it, and store it.

    ``task`` is an id (``"webshop-3"``, of ``swe-local`` or ``repair-1``, or the number of a task of ``[rl] env_name``),
    a file of rows, one row (SWE-bench's columns, or what the environment's ``reset`` takes), or a ``Task``. Without a
    ``storage`` the episode is kept in that of ``[rl]``.

    A failed episode is returned with its ``failure``. Raises ``ConfigError`` for what no episode can be played with,
    ``InfrastructureError`` where nothing answers at the endpoint, and ``StorageError``.
    """
    job = await asyncio.to_thread(_prepared, find_task(task, options, options.settings()), options)
    own = storage or open_storage(job.settings)
    try:
        return await _played(job, own)
    finally:
        if storage is None:
            await own.close()


class _Job(NamedTuple):
    """``found`` with the base model in its settings; ``policy`` is what the endpoint calls the weights."""

    found: FoundTask
    options: PlayOptions
    policy: str

    @property
    def settings(self) -> RLSettings:
        return self.found.settings

    @property
    def reward(self) -> Reward:
        """``[rl.reward]``. The return of a repository task is what its grading says, as in a loop."""
        own = self.settings.reward
        return make_reward(self.graded if self.found.suite.software and own.name == _RETURN else own)

    @property
    def graded(self) -> RewardSettings:
        """The reward that a repository task is graded by."""
        return graded_by((self.found.entry,), self.settings.reward)


def _prepared(found: FoundTask, options: PlayOptions) -> _Job:
    """Raises for what every episode would fail of: the host, the reward, the endpoint, the environment's server."""
    settings, serving = found.settings, found.settings.serving
    host_of(settings)
    if options.token_ids:
        check_model_server(serving.base_url, serving.model, serving.api_key())
    else:  # it would record the question for an unlisted model, too
        check_answers(serving.base_url)
    if found.suite.name == ENVIRONMENT:
        check_environment_server(settings)
    base = serving.model_copy(update={"model": options.base_model or base_of(serving)})
    job = _Job(found._replace(settings=settings.model_copy(update={"serving": base})), options, serving.model)
    refuse_labels(job.reward, "nobody labels while a trainer waits")
    if not found.suite.software:
        refuse_without_workspace(job.reward, f"{found.entry.task.environment} has none")
    return job


def base_of(serving: ServingSettings) -> str:
    """The model that the policy is an adapter of, as the endpoint lists it; the policy itself where it is none."""
    listed = listed_models(serving.base_url, serving.api_key(), _SECONDS) or ()
    parent = next((each.parent for each in listed if each.id == serving.model), None)
    if parent is not None or PolicyRef.from_served_name("", serving.model).adapter is None:
        return parent or serving.model
    bases = [each.id for each in listed if each.parent is None and each.id != serving.model]
    if len(bases) != 1:
        raise ConfigError(f"{serving.model} is a version of an adapter: give its base model's name with --base-model")
    return bases[0]


async def _played(job: _Job, storage: TrajectoryStorage) -> PlayedRollout:
    found, options = job.found, job.options
    with scratch_folder(_SCRATCH) as folder:
        plan = _plan(job, folder)
        async with (
            _backend(found, options) as backend,
            open_eval_runner(plan, found.suite, job.settings, storage, backend, job.graded, True, folder, 0) as runner,
        ):
            graded = await runner.run(_request(job, plan), found.entry)
    return await _rollout(job, graded)


@asynccontextmanager
async def _backend(found: FoundTask, options: PlayOptions) -> AsyncIterator[InstanceBackend | None]:
    if not found.suite.software:
        yield None
        return
    backend = make_backend(options.backend, mirror=options.mirror, cache=options.cache, network=options.network)
    try:
        await backend.check()
        yield backend
    finally:
        await backend.close()


def _plan(job: _Job, folder: Path) -> EvaluationPlan:
    """The plan of ``openhands-rl evaluate`` for this one episode; ``folder`` is gone afterwards."""
    settings, options, suite = job.settings, job.options, job.found.suite
    bounds = stated_bounds(settings, software=suite.software)
    answer = bounds.pop("max_response_length", None)
    model = served_model(settings, native_tool_calling=options.native_tool_calling, token_ids=options.token_ids)
    if answer is None:
        model = model.model_copy(update={"max_output_tokens": EvaluatedModel.model_fields["max_output_tokens"].default})
    own = {
        "suite": suite.name,
        "dataset": suite.dataset,
        "split": suite.split,
        "agent": RL_AGENT,
        "model": model,
        "out": folder,
        "workers": 1,
        "timeout": options.timeout,
        "test_timeout": options.test_timeout,
        "command_timeout": options.command_timeout,
        "success": success_rule(job.found.entry.task.environment, settings.reward),
    }
    return EvaluationPlan.model_validate({**bounds, **own})


def _request(job: _Job, plan: EvaluationPlan) -> EpisodeRequest:
    """A new episode, unless its names are given. Its seed follows from them, so that no two are sampled alike: a
    trainer plays a task again in another group."""
    options, task = job.options, job.found.entry.task
    run_id = options.run_id or f"rollout-{uuid.uuid4().hex}"
    seed = (run_id if options.seed is None else str(options.seed), options.group_id, task.id, str(options.sample))
    return EpisodeRequest(
        task=task.model_copy(update={"limits": task.limits or plan.limits()}),
        run_id=run_id,
        group_id=options.group_id or f"{run_id}/{task.id}",
        sample=options.sample,
        seed=zlib.crc32("\0".join(seed).encode()) % 2**31,
        served_model=None if job.policy == job.settings.serving.model else job.policy,
    )


async def _rollout(job: _Job, graded: GradedEpisode) -> PlayedRollout:
    """What was played, judged. Of a failed episode only why."""
    trajectory = graded.trajectory
    outcome = _unusable(job, trajectory) or await judge(job.reward, trajectory)
    if isinstance(outcome, Score) and outcome.reward is None:
        outcome = failure_of(FailureKind.GRADER, "rollout.reward", f"{outcome.reward_version} gave no reward")
    if isinstance(outcome, Failure):
        why = graded.verdict.reason if graded.verdict is not None and trajectory.failure is None else ""
        message = f"{outcome.message}: {why}" if why and why not in outcome.message else outcome.message
        outcome = outcome.model_copy(update={"message": message})
    return told(trajectory, job.settings, outcome, token_ids=job.options.token_ids)


def _unusable(job: _Job, trajectory: Trajectory) -> Failure | None:
    """Why the episode is no sample of the policy, where grading it would not say so."""
    return trajectory.failure or unusable(trajectory, job.options.timeout)
