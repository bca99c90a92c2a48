"""``play``: one episode of a task against an endpoint, graded, with its training sequences."""

from __future__ import annotations

import asyncio
import re
import uuid
import zlib
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue, ValidationError

from openhands_rl_plugin.apps.rollout.rollout import TIMED_OUT, PlayedRollout
from openhands_rl_plugin.config.build import make_reward, make_strategy, open_storage, success_rule
from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.rollout import PlayOptions
from openhands_rl_plugin.core.errors import ConfigError, TrainingError, describe
from openhands_rl_plugin.core.files import scratch_folder
from openhands_rl_plugin.core.judgements import resolved
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.redaction import redact_text, redact_trajectory
from openhands_rl_plugin.core.types import EpisodeRequest, Failure, FailureKind, Score, Task, Trajectory
from openhands_rl_plugin.evals.runs.evaluate import open_eval_runner
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, bounded
from openhands_rl_plugin.evals.runs.suites import (
    ENDINGS,
    ENVIRONMENT,
    LOCAL,
    TESTS,
    EvalTask,
    Suite,
    find_suite,
    folder_name,
    indexed_tasks,
    make_backend,
    own_suite,
    swe_task,
    swe_tasks,
)
from openhands_rl_plugin.evals.swe.instances import instance_of, read_rows
from openhands_rl_plugin.hosts.shared.sessions import RL_AGENT
from openhands_rl_plugin.models.engines.client import listed_models
from openhands_rl_plugin.rollout.scoring import judge
from openhands_rl_plugin.training.algorithms import off_policy_sampling, samples_of
from openhands_rl_plugin.training.data.dataset import is_cut_short, is_interrupted, until_secret

GivenTask = str | Task | Mapping[str, JsonValue]
"""An id, a task, or a row of a data set."""

_COLUMNS = ("instance_id", "base_commit")
_SPLIT = "test"


async def play(task: GivenTask, options: PlayOptions, *, storage: TrajectoryStorage | None = None) -> PlayedRollout:
    """Roll out one episode of ``task`` against the endpoint of ``options``, grade it, and store it.

    ``task``: see ``find_task``. Without a ``storage`` the episode is kept in that of ``[rl]``.

    A failed episode is returned with its ``failure``. Raises ``ConfigError`` where no episode can be rolled out,
    ``InfrastructureError`` where nothing answers at the endpoint, and ``StorageError``.
    """
    found = find_task(task, options.suite, options.settings())
    settings, reward = await asyncio.to_thread(_checked, found, options)
    async with AsyncExitStack() as opened:
        folder = opened.enter_context(scratch_folder("rollout"))
        if storage is None:
            storage = open_storage(settings)
            opened.push_async_callback(storage.close)
        backend = None
        if found.suite.software:
            backend = make_backend(
                options.backend,
                mirror=options.mirror,
                cache=options.cache,
                network=options.network,
                instances=[found.entry.instance] if found.entry.instance is not None else (),
            )
            await backend.check()
        plan = _plan(found, settings, options, folder)
        runner = await opened.enter_async_context(open_eval_runner(plan, storage, backend, folder))
        ended = await runner.run(_request(found, settings, options, plan), found.entry)
    trajectory = ended.trajectory
    outcome = trajectory.failure or _unusable(trajectory, options.timeout) or await judge(reward, trajectory)
    if isinstance(outcome, Score) and outcome.reward is None:
        why = f"{outcome.reward_version} gave no reward"
        outcome = Failure(kind=FailureKind.GRADER, message=why, boundary="rollout.reward")
    if isinstance(outcome, Failure) and trajectory.failure is None and ended.verdict is not None:
        reason = f": {ended.verdict.reason}" if ended.verdict.reason else ""
        outcome = outcome.model_copy(update={"message": f"{outcome.message}{reason}"})
    return _result(trajectory, settings, outcome, token_ids=options.token_ids)


def _checked(found: FoundTask, options: PlayOptions) -> tuple[RLSettings, Reward]:
    """The settings with the policy's base model, and the reward.

    Raises for a host or a reward that there is not, and an endpoint that does not answer.
    """
    host_of(found.settings)
    serving, own = found.settings.serving, found.settings.reward
    listed = listed_models(serving.base_url, serving.api_key()) or ()
    parent = next((each.parent for each in listed if each.id == serving.model), None)
    based = serving.model_copy(update={"model": options.base_model or parent or serving.model})
    settings = found.settings.model_copy(update={"serving": based})
    # The return of a repository task is what its grading says, as in a loop.
    reward = make_reward(own.overridden(TESTS) if found.suite.software and own.name == "return" else own)
    return settings, reward


def _plan(found: FoundTask, settings: RLSettings, options: PlayOptions, folder: Path) -> EvaluationPlan:
    """The plan of ``openhands-rl evaluate`` for this one episode; ``folder`` is gone afterwards."""
    return EvaluationPlan(
        suite=found.suite,
        agent=RL_AGENT,
        settings=bounded(settings, found.suite).model_copy(update={"max_workers": 1}),
        native_tool_calling=options.native_tool_calling,
        token_ids=options.token_ids,
        out=folder,
        timeout=options.timeout,
        test_timeout=options.test_timeout,
        success=success_rule(found.entry.task.environment, settings.reward),
    )


def _request(found: FoundTask, settings: RLSettings, options: PlayOptions, plan: EvaluationPlan) -> EpisodeRequest:
    """A new episode, unless its names are given. Its seed follows from them, so that no two are sampled alike: a
    trainer rolls a task out again in another group."""
    task, policy = found.entry.task, found.settings.serving.model
    run_id = options.run_id or f"rollout-{uuid.uuid4().hex}"
    seed = (run_id if options.seed is None else str(options.seed), options.group_id, task.id, str(options.sample))
    return EpisodeRequest(
        task=task.model_copy(update={"limits": task.limits or plan.limits()}),
        run_id=run_id,
        group_id=options.group_id or f"{run_id}/{task.id}",
        sample=options.sample,
        seed=zlib.crc32("\0".join(seed).encode()) % 2**31,
        served_model=None if policy == settings.serving.model else policy,
    )


def _result(
    trajectory: Trajectory, settings: RLSettings, outcome: Score | Failure, *, token_ids: bool
) -> PlayedRollout:
    """What was rolled out, without secrets: of a failed episode only why. ``token_ids``: those of its sequences, too,
    without which it has failed."""
    clean = redact_trajectory(trajectory)
    kept = until_secret(clean)
    off_policy = off_policy_sampling(trajectory)
    if getattr(make_strategy(settings), "selects", False):
        off_policy = f"{trajectory.strategy.name} chose among what the policy sampled"
    rollout = PlayedRollout(
        trajectory_id=trajectory.id,
        run_id=trajectory.run_id,
        group_id=trajectory.group_id,
        task_id=trajectory.task.id,
        environment=trajectory.task.environment,
        strategy=trajectory.strategy,
        policy=trajectory.policy,
        stop=trajectory.stop,
        cut_short=is_cut_short(trajectory),
        resolved=resolved(trajectory, ()),
        off_policy=off_policy,
        shortened=kept is not clean,
        messages=clean.messages(),
        tools=clean.tools,
        turns=sum(1 for _ in trajectory.sampled()),
        usage=trajectory.usage,
        seconds=max(0.0, trajectory.times.finished - trajectory.times.started),
    )
    if isinstance(outcome, Score):
        try:
            segments = tuple(samples_of(kept)) if token_ids else ()
            if token_ids and not segments:
                raise TrainingError("all that the policy sampled comes after a secret, and is left out")
            scored = {"reward": outcome.reward, "reward_version": outcome.reward_version, "segments": segments}
            return rollout.model_copy(update=scored)
        except TrainingError as error:
            outcome = Failure(kind=FailureKind.MODEL, message=str(error), boundary="rollout.token_ids")
    clear = outcome.model_copy(update={"message": redact_text(outcome.message)})
    return rollout.model_copy(update={"failure": clear})


def _unusable(trajectory: Trajectory, timeout: float) -> Failure | None:
    """Why an episode, bounded by ``timeout`` seconds, is no sample of the policy, if its failure does not say it."""
    if is_interrupted(trajectory):
        why = f"the episode was not over after {timeout:g} s: raise --timeout"
        return Failure(kind=FailureKind.ENVIRONMENT, message=why, boundary=TIMED_OUT)
    if not any(trajectory.sampled()):
        why = f"nothing was sampled ({trajectory.stop.value}): the first prompt is longer than max_prompt_length allows"
        return Failure(kind=FailureKind.ENVIRONMENT, message=why, boundary="rollout.prompt")
    return None


class FoundTask(NamedTuple):
    """The task, its suite, and the settings that name its environment."""

    suite: Suite
    entry: EvalTask
    settings: RLSettings


def find_task(source: GivenTask, suite: str, settings: RLSettings) -> FoundTask:
    """The task that is meant: a ``Task``, a row of SWE-bench's columns or of a ``Task``'s fields, or an id.

    An id is one of ``suite``, a name or a file of such rows. Without a suite it is N or NAME-N, the number of a task of
    ``[rl] env_name``, or else one of ``swe-local``. Raises ``ConfigError``.
    """
    if not isinstance(source, str):
        return _of_row(source, settings)
    number = re.fullmatch(rf"({re.escape(folder_name(settings.env_name))}-)?\d+", source)
    name = suite or (ENVIRONMENT if number else LOCAL)
    if name.endswith(ENDINGS):
        rows = (_of_row(row, settings) for row in read_rows(Path(name)))
        found = (each for each in rows if each.entry.task.id == source)
    elif (known := find_suite(name)).software:
        every = known.model_copy(update={"split": "all"}) if name == LOCAL or own_suite(name) else known
        found = (FoundTask(known, each, settings) for each in swe_tasks(every) if each.task.id == source)
    else:
        environment, last = known.environment(settings), source.rpartition("-")[2]
        indices = [int(last)] if last.isdecimal() else []
        own = own_suite(environment)
        entries = own.tasks("all") if own is not None else indexed_tasks(environment, indices, _SPLIT)
        found = (_of_environment(each, settings) for each in entries if each.row["idx"] in indices)
    if (first := next(found, None)) is None:
        raise ConfigError(f"{name} has no task {source:.200}: give another --suite, or a file of rows as --suite")
    return first


def _of_row(row: Task | Mapping[str, JsonValue], settings: RLSettings) -> FoundTask:
    if not isinstance(row, Task) and all(column in row for column in _COLUMNS):
        suite = Suite(name="rows", dataset="rows", split=_SPLIT)
        return FoundTask(suite, swe_task(instance_of({**row}), suite), settings)
    try:
        task = Task.model_validate(row)
    except ValidationError as error:
        raise ConfigError(f"a task has {' and '.join(_COLUMNS)}, or id and environment: {describe(error)}") from error
    own = own_suite(task.environment)
    if task.environment == LOCAL or (own is not None and own.suite.software):
        return find_task(task.id, task.environment, settings)
    return _of_environment(EvalTask(task, {**task.data}), settings)


def _of_environment(entry: EvalTask, settings: RLSettings) -> FoundTask:
    """The task in the suite that its environment has of its own, unless the settings name a server."""
    name, own = entry.task.environment, own_suite(entry.task.environment)
    if name != settings.env_name:  # whose options are none of another environment
        settings = settings.model_copy(update={"env_name": name, "environment": {}})
    served = {"env_port", "env_server_base"} & settings.model_fields_set or "base_url" in settings.environment
    suite = find_suite(ENVIRONMENT).of_environment(name) if own is None or served else own.suite
    return FoundTask(suite, entry, settings)
