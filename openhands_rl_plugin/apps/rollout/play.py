"""``play``: one episode of a task against an endpoint, graded, with its training sequences."""

from __future__ import annotations

import asyncio
import uuid
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue, ValidationError

from openhands_rl_plugin.apps.rollout.rollout import TIMED_OUT, PlayedRollout
from openhands_rl_plugin.config.build import check_environment_server, make_reward, make_strategy, open_storage
from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.config.rollout import PlayOptions
from openhands_rl_plugin.config.success import success_rule
from openhands_rl_plugin.core.errors import ConfigError, TrainingError, problems, unknown_name
from openhands_rl_plugin.core.files import scratch_folder
from openhands_rl_plugin.core.protocols import Reward, TrajectoryStorage
from openhands_rl_plugin.core.redaction import redact_text, redact_trajectory
from openhands_rl_plugin.core.types import (
    EpisodeRequest,
    Failure,
    FailureKind,
    JsonObject,
    PolicyRef,
    Score,
    Task,
    Trajectory,
)
from openhands_rl_plugin.evals.runs.backends import make_backend
from openhands_rl_plugin.evals.runs.evaluate import open_eval_runner
from openhands_rl_plugin.evals.runs.outcome import EvalTask
from openhands_rl_plugin.evals.runs.plan import EvaluatedModel, EvaluationPlan, served_model, stated_bounds
from openhands_rl_plugin.evals.runs.suites import (
    ENDINGS,
    ENVIRONMENT,
    LOCAL,
    TESTS,
    Suite,
    find_suite,
    folder_name,
    indexed_tasks,
    own_suites,
    swe_task,
    swe_tasks,
    tasks_of_rows,
)
from openhands_rl_plugin.evals.swe.dataset import instance_of, read_rows
from openhands_rl_plugin.evals.swe.types import Instance
from openhands_rl_plugin.hosts.shared.sessions import RL_AGENT
from openhands_rl_plugin.models.engines.server_models import check_model_server, listed_models
from openhands_rl_plugin.rollout.scoring import judge, refuse_labels, refuse_without_workspace
from openhands_rl_plugin.training.data.batch import (
    is_cut_short,
    is_interrupted,
    off_policy_sampling,
    samples_of,
    until_secret,
)

_SCRATCH = "rollout"
_RETURN = "return"
GivenTask = str | Path | Task | Mapping[str, JsonValue]
"""An id, a file, a task, or a row of a data set."""

_COLUMNS = ("instance_id", "base_commit")
_ROWS = "rows"
_SPLIT = "test"


async def play(task: GivenTask, options: PlayOptions, *, storage: TrajectoryStorage | None = None) -> PlayedRollout:
    """Play one episode of ``task`` against the endpoint of ``options``, grade it, and store it.

    ``task`` is an id (``"webshop-3"``, of ``swe-local`` or ``repair-1``, or the number of a task of ``[rl] env_name``),
    a file of rows, one row (SWE-bench's columns, or what the environment's ``reset`` takes), or a ``Task``. Without a
    ``storage`` the episode is kept in that of ``[rl]``.

    A failed episode is returned with its ``failure``. Raises ``ConfigError`` where no episode can be rolled out,
    ``InfrastructureError`` where nothing answers at the endpoint, and ``StorageError``.
    """
    found = find_task(task, options, options.settings())
    settings, reward = await asyncio.to_thread(_checked, found, options)
    async with AsyncExitStack() as opened:
        folder = opened.enter_context(scratch_folder(_SCRATCH))
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
            opened.push_async_callback(backend.close)
            await backend.check()
        plan = _plan(found, settings, options, folder)
        runner = await opened.enter_async_context(open_eval_runner(plan, settings, storage, backend, folder))
        ended = await runner.run(_request(found, settings, options, plan), found.entry)
    trajectory = ended.trajectory
    outcome = trajectory.failure or unusable(trajectory, options.timeout) or await judge(reward, trajectory)
    if isinstance(outcome, Score) and outcome.reward is None:
        outcome = Failure(
            kind=FailureKind.GRADER, message=f"{outcome.reward_version} gave no reward", boundary="rollout.reward"
        )
    if isinstance(outcome, Failure):
        why = ended.verdict.reason if ended.verdict is not None and trajectory.failure is None else ""
        message = f"{outcome.message}: {why}" if why and why not in outcome.message else outcome.message
        outcome = outcome.model_copy(update={"message": message})
    return to_result(trajectory, settings, outcome, token_ids=options.token_ids)


def _checked(found: FoundTask, options: PlayOptions) -> tuple[RLSettings, Reward]:
    """The settings with the base model, and the reward.

    Raises for what every episode would fail of: the host, the reward, the endpoint, the environment's server.
    """
    settings, own = with_base_model(found.settings, options), found.settings.reward
    if found.suite.name == ENVIRONMENT:
        check_environment_server(settings)
    # The return of a repository task is what its grading says, as in a loop.
    reward = make_reward(own.overridden(TESTS) if found.suite.software and own.name == _RETURN else own)
    refuse_labels(reward, "nobody labels while a trainer waits")
    if not found.suite.software:
        refuse_without_workspace(reward, f"{found.entry.task.environment} has none")
    return settings, reward


def with_base_model(settings: RLSettings, options: PlayOptions) -> RLSettings:
    """The settings with the policy's base model. Raises for a host or an endpoint with which every episode fails."""
    host_of(settings)
    serving = settings.serving
    if options.token_ids:
        check_model_server(serving.base_url, serving.model, serving.api_key())
    else:  # it would record the question for an unlisted model, too
        listed_models(serving.base_url, serving.api_key())
    base = serving.model_copy(update={"model": options.base_model or _base_of(serving)})
    return settings.model_copy(update={"serving": base})


def _base_of(serving: ServingSettings) -> str:
    """The model that the policy is an adapter of, as the endpoint lists it; the policy itself where it is none."""
    listed = listed_models(serving.base_url, serving.api_key()) or ()
    parent = next((each.parent for each in listed if each.id == serving.model), None)
    if parent is not None or PolicyRef.from_served_name("", serving.model).adapter is None:
        return parent or serving.model
    bases = [each.id for each in listed if each.parent is None and each.id != serving.model]
    if len(bases) != 1:
        raise ConfigError(f"{serving.model} is a version of an adapter: give its base model's name with --base-model")
    return bases[0]


def _plan(found: FoundTask, settings: RLSettings, options: PlayOptions, folder: Path) -> EvaluationPlan:
    """The plan of ``openhands-rl evaluate`` for this one episode; ``folder`` is gone afterwards."""
    bounds = stated_bounds(settings, found.suite)
    answer = bounds.pop("max_response_length", None)
    model = served_model(settings, native_tool_calling=options.native_tool_calling, token_ids=options.token_ids)
    if answer is None:
        model = model.model_copy(update={"max_output_tokens": EvaluatedModel.model_fields["max_output_tokens"].default})
    own = {
        "suite": found.suite,
        "agent": RL_AGENT,
        "model": model,
        "out": folder,
        "workers": 1,
        "timeout": options.timeout,
        "test_timeout": options.test_timeout,
        "command_timeout": options.command_timeout,
        "success": success_rule(found.entry.task.environment, settings.reward),
    }
    return EvaluationPlan.model_validate({**bounds, **own})


def _request(found: FoundTask, settings: RLSettings, options: PlayOptions, plan: EvaluationPlan) -> EpisodeRequest:
    """A new episode, unless its names are given. Its seed follows from them, so that no two are sampled alike: a
    trainer plays a task again in another group."""
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


def to_result(
    trajectory: Trajectory, settings: RLSettings, outcome: Score | Failure | None, *, token_ids: bool
) -> PlayedRollout:
    """What was rolled out, without secrets: of a failed episode only why. ``outcome``: ``None`` where another program
    judges it. ``token_ids``: those of its sequences, too, without which it has failed."""
    clean = redact_trajectory(trajectory)
    kept = until_secret(clean)
    result = trajectory.evidence.get("test_result")
    report = result.get("report") if isinstance(result, dict) else None
    resolved = report.get("resolved") if isinstance(report, dict) else None
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
        resolved=resolved if isinstance(resolved, bool) else None,
        off_policy=off_policy,
        shortened=kept is not clean,
        messages=clean.messages(),
        tools=clean.tools,
        turns=sum(1 for _ in trajectory.sampled()),
        usage=trajectory.usage,
        seconds=max(0.0, trajectory.times.finished - trajectory.times.started),
    )
    if isinstance(outcome, Failure):
        clear = outcome.model_copy(update={"message": redact_text(outcome.message)})
        return rollout.model_copy(update={"failure": clear})
    try:
        segments = tuple(samples_of(kept)) if token_ids else ()
    except TrainingError as error:
        why = Failure(kind=FailureKind.MODEL, message=str(error), boundary="rollout.token_ids")
        return rollout.model_copy(update={"failure": why})
    scored = {} if outcome is None else {"reward": outcome.reward, "reward_version": outcome.reward_version}
    return rollout.model_copy(update={**scored, "segments": segments})


def unusable(trajectory: Trajectory, timeout: float) -> Failure | None:
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


def find_task(source: GivenTask, options: PlayOptions, settings: RLSettings) -> FoundTask:
    """The one task that is meant. Raises ``ConfigError`` for none, and for several."""
    if isinstance(source, Task):
        return _of_task(source, settings)
    if isinstance(source, Mapping):
        return _each(({**source},), settings)[0]
    text = str(source)
    if isinstance(source, Path) or text.endswith(ENDINGS) or Path(text).is_file():
        return _of_rows(tuple(read_rows(Path(source))), options.id, text, settings)
    return _of_id(text, options.suite, settings)


def tasks_of_file(file: Path) -> tuple[EvalTask, ...]:
    """The tasks of a file whose rows name their environment. Raises ``ConfigError``."""
    rows = tuple(read_rows(file))
    for number, row in enumerate(rows, start=1):
        if not all(column in row for column in _COLUMNS) and not {"id", "environment"} <= row.keys():
            raise ConfigError(f"{file}: row {number} has neither {' and '.join(_COLUMNS)} nor id and environment")
    return tuple(each.entry for each in _each(rows, RLSettings()))


def _of_rows(rows: Sequence[JsonObject], wanted: str, file: str, settings: RLSettings) -> FoundTask:
    """The row with the id, or the only one."""
    found = _each(rows, settings)
    ids = [each.entry.task.id for each in found]
    if wanted:
        if ids.count(wanted) != 1:
            raise ConfigError(_shortened(f"{file}: {unknown_name('task', wanted, ids)}"))
        return found[ids.index(wanted)]
    if not found:
        raise ConfigError(f"{file}: no task in it")
    if len(found) > 1:
        raise ConfigError(f"{file} has {len(found)} tasks ({', '.join(ids[:2])}, ...): choose one with --id")
    return found[0]


def _each(rows: Sequence[JsonObject], settings: RLSettings) -> list[FoundTask]:
    """Rows of SWE-bench's columns, tasks as JSON, or rows of the environment of ``[rl]``."""
    name = settings.env_name
    plain = tasks_of_rows(name, rows, _SPLIT)
    found: list[FoundTask] = []
    for number, row in enumerate(rows):
        if all(column in row for column in _COLUMNS):
            suite = Suite(name=_ROWS, dataset=_ROWS, split=_SPLIT)
            found.append(_of_instance(instance_of(row), suite, settings))
        elif {"id", "environment"} <= row.keys() <= Task.model_fields.keys():
            try:
                task = Task.model_validate(row)
            except ValidationError as error:
                at, what = next(iter(problems(error, Task)))
                raise ConfigError(f"the task: {'.'.join(at)}: {what}") from error
            found.append(_of_task(task, settings))
        else:
            found.append(FoundTask(find_suite(ENVIRONMENT).of_environment(name), plain[number], settings))
    return found


def _of_task(task: Task, settings: RLSettings) -> FoundTask:
    """A task of a suite of repositories is the one of that id; others are given to their environment as they are."""
    if task.environment in _here():
        return _of_id(task.id, task.environment, settings)
    settings = settings.model_copy(
        update={"env_name": task.environment} if task.environment != settings.env_name else {}
    )
    return FoundTask(_suite_of(settings), EvalTask(task, {**task.data}), settings)


def _of_id(wanted: str, suite: str, settings: RLSettings) -> FoundTask:
    if environment := _environment_of(wanted, suite, settings):
        name, index = environment
        if name != settings.env_name:  # whose options are none of another environment
            settings = settings.model_copy(update={"env_name": name, "environment": {}})
        return FoundTask(_suite_of(settings), _indexed(name, index), settings)
    instances = [found for name in ((suite,) if suite else _here()) for found in _instances(name)]
    found = next((each for each in instances if each[1].instance_id == wanted), None)
    if found is None:
        unknown = _shortened(unknown_name("task", wanted, [each.instance_id for _, each in instances]))
        raise ConfigError(f"{unknown}; or give the number of a task of [rl] env_name, or a file of rows")
    return _of_instance(found[1], found[0], settings)


def _environment_of(wanted: str, suite: str, settings: RLSettings) -> tuple[str, int] | None:
    """The environment and the task's number of ``17`` and ``webshop-17``."""
    named, _, number = wanted.rpartition("-")
    if not number.isdecimal() or suite not in ("", ENVIRONMENT, *_served()):
        return None
    if not named:
        return (suite if suite in _served() else settings.env_name, int(number))
    name = next((each for each in (settings.env_name, *_served()) if folder_name(each) == named), None)
    return None if name is None else (name, int(number))


def _indexed(environment: str, index: int) -> EvalTask:
    """The index of the environment's task; of the embedded shop's, with its split."""
    own = next((each for each in own_suites() if each.suite.name == environment), None)
    if own is None:
        return indexed_tasks(environment, (index,), _SPLIT)[0]
    goals = own.tasks("all")
    found = next((each for each in goals if each.task.data["idx"] == index), None)
    if found is None:
        raise ConfigError(f"{environment} has no task {index}; it has 0 to {len(goals) - 1}")
    return found


def _instances(name: str) -> list[tuple[Suite, Instance]]:
    """All instances of a suite of repositories, of all splits where they are here."""
    suite = find_suite(name, "all" if name in _here() else None)
    if not suite.software:
        raise ConfigError(f"--suite {name}: a task of an environment is given by its number, or as a row of a file")
    return [(suite, entry.instance) for entry in swe_tasks(suite) if entry.instance is not None]


def _of_instance(instance: Instance, suite: Suite, settings: RLSettings) -> FoundTask:
    own = str(instance.extra.get("split") or suite.split)
    suite = suite.model_copy(update={"split": own})
    return FoundTask(suite, swe_task(instance, suite), settings)


def _suite_of(settings: RLSettings) -> Suite:
    """The suite of its own that the environment has, unless the settings name a server."""
    served = {"env_port", "env_server_base"} & settings.model_fields_set or "base_url" in settings.environment
    if settings.env_name in _served() and not served:
        return find_suite(settings.env_name)
    return find_suite(ENVIRONMENT).of_environment(settings.env_name)


def _here() -> tuple[str, ...]:
    """Suites with tests whose rows are here."""
    return (LOCAL, *(each.suite.name for each in own_suites() if each.suite.software))


def _served() -> tuple[str, ...]:
    """Suites that bring their environment."""
    return tuple(each.suite.name for each in own_suites() if not each.suite.software)


def _shortened(text: str) -> str:
    return text if len(text) <= 400 else f"{text[:400]}..."
