"""One training run over a suite: its parts, the plan from the settings, the loop, and its results."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openhands_rl_plugin.apps.loop.checks import CHECKOUTS, EVALUATION, check_trainable, evaluated_by, run_id_of
from openhands_rl_plugin.apps.loop.reporting import RunReport
from openhands_rl_plugin.apps.loop.tasks import LoopTasks, demonstrator_of
from openhands_rl_plugin.config.build import OF_RETURN, make_environment, make_reward, open_storage, success_rule
from openhands_rl_plugin.config.rl import RewardSettings, RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, boundary
from openhands_rl_plugin.core.files import remove_tree
from openhands_rl_plugin.core.judgements import SuccessRule
from openhands_rl_plugin.core.protocols import EpisodeRunner, TrajectoryStorage
from openhands_rl_plugin.core.types import Adapter, EpisodeRequest, FailureKind, Limits, Task, Trajectory
from openhands_rl_plugin.evals.runs.evaluate import EvalRunner, judging_reward, options_of, process_count
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
from openhands_rl_plugin.evals.runs.suites import TESTS, EvalTask
from openhands_rl_plugin.evals.swe.instances import InstanceBackend
from openhands_rl_plugin.hosts.pool import open_runner
from openhands_rl_plugin.hosts.shared.sessions import RL_AGENT
from openhands_rl_plugin.models.adapters.publisher import publisher_for
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.rollout.scoring import refuse_without_workspace
from openhands_rl_plugin.training.loop.loop import STATE, LoopListener, LoopParts, TrainingLoop
from openhands_rl_plugin.training.loop.plan import LoopPlan, LoopState, RunFacts, StageChange


class GradedRunner:
    """An ``EpisodeRunner`` over an ``EvalRunner``, which knows the rows of the tasks."""

    def __init__(self, runner: EvalRunner, entries: Sequence[EvalTask]) -> None:
        self._runner = runner
        self._entries = {entry.task.id: entry for entry in entries}

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run, store and grade one episode; a failed one is returned."""
        return (await self._runner.run(request, self._entries[request.task.id])).trajectory


RETURN = "return"


@dataclass(frozen=True)
class LoopJob:
    """A run: settings that name all servers, tasks, and the directories of the base model and of the run.

    ``start``: the adapter that a new run starts from. ``warm_start``: by default ``[rl.training]`` with
    ``algorithm = "sft"``. ``command`` and ``title``: for the report. ``backend`` is
    for software tasks. ``processes``: worker processes for OpenHands' controllers; 0: this process. ``limits`` are
    those of an episode; times are in seconds.
    """

    settings: RLSettings
    tasks: LoopTasks
    model: Path
    directory: Path
    run_id: str
    limits: Limits
    backend: InstanceBackend | None = None
    processes: int = 0
    graders: int = 1
    test_timeout: float = 1800.0
    native_tool_calling: bool = True
    start: Adapter | None = None
    warm_start: TrainingSettings | None = None
    command: str = ""
    title: str = ""


def loop_job(
    settings: RLSettings,
    tasks: LoopTasks,
    model: Path,
    directory: Path,
    *,
    kind: str = "loop",
    timeout: float,
    processes: int | None,
    **fields: Any,
) -> LoopJob:
    """The job in ``directory``, with an id that begins with ``kind`` and ``timeout`` seconds for an episode.

    ``processes``: by default as many as the workers need. ``fields``: others of ``LoopJob``.
    """
    fields["limits"] = settings.limits().model_copy(update={"timeout": timeout})
    fields["processes"] = process_count(settings.max_workers) if processes is None else processes
    run_id = run_id_of(directory, kind)
    return LoopJob(settings, tasks, model, directory, run_id, graders=os.cpu_count() or 1, **fields)


@dataclass(frozen=True)
class LoopResult:
    """The finished stages, the changes of the success rate on held-out tasks by SFT and by RL, and the report.

    ``report``: see ``RunReport.path``.
    """

    state: LoopState
    changes: tuple[StageChange, ...]
    report: Path


def objective_of(tasks: LoopTasks, settings: RLSettings) -> RewardSettings:
    """The reward that is maximised: ``[rl.reward]``. The return of a software task is what its grading says."""
    verdict = tasks.suite.software and settings.reward.name == RETURN
    return settings.reward.overridden(TESTS) if verdict else settings.reward


def plan_lines(
    settings: RLSettings, tasks: LoopTasks, start: Adapter | None, directory: Path, model: Path | None
) -> list[str]:
    """What a run would do, for a user. ``model``: the weights that the embedded server serves; ``None``: a server."""
    loop, serving, done = settings.loop, settings.serving, len(LoopState.load(directory / STATE).records)
    served = f"{serving.model or 'the base model'} at {serving.base_url}"
    return [
        f"{tasks.suite.name}: {len(tasks.training)} tasks to train on, {len(tasks.held_out)} held out, "
        f"{len(tasks.demonstrations)} for demonstrations",
        f"  stages: {loop.stages}, {done} done; iterations: {loop.iterations} of {loop.tasks_per_iteration} tasks by "
        f"{loop.samples_per_task} episodes, {loop.kind}",
        f"  trained by {settings.training.algorithm} on the reward {objective_of(tasks, settings).name!r}",
        f"  model: {served if model is None else f'{model}, by the embedded server'}, starting from "
        f"{start.name if start is not None else 'the base model'}",
        f"  adapters: {serving.adapter} in {serving.adapters_directory}; run: {directory}",
    ]


def loop_plan(job: LoopJob) -> LoopPlan:
    """The plan of the settings."""
    turns = {"max_turns": job.settings.loop.training_max_turns or job.limits.max_turns}
    return LoopPlan(
        settings=job.settings,
        run_id=job.run_id,
        demonstrations=_bounded(job.tasks.demonstrations, job.limits),
        training=_bounded(job.tasks.training, job.limits.model_copy(update=turns)),
        held_out=_bounded(job.tasks.held_out, job.limits),
        warm_start=job.warm_start or _warm_start(job.settings),
        success=_criterion(job),
    )


def _warm_start(settings: RLSettings) -> TrainingSettings:
    loop, training = settings.loop, settings.training.model_copy(update={"algorithm": "sft"})
    return training.model_copy(
        update={
            "num_epochs": loop.warm_start_epochs,
            "learning_rate": loop.warm_start_rate or training.learning_rate,
            "batch_size": loop.warm_start_batch_size or training.batch_size,
            # It is one call, whose steps are known: the default of an iteration's call would end in noise.
            "schedule": "linear" if training.schedule == "constant" else training.schedule,
        }
    )


def _criterion(job: LoopJob) -> SuccessRule | None:
    """The environment's or the reward's criterion, where the reward is a function of the return."""
    settings = job.settings
    if job.tasks.suite.software or settings.reward.name not in OF_RETURN:
        return None
    return success_rule(job.tasks.held_out[0].task.environment, settings.reward)


async def run_loop(job: LoopJob, listener: LoopListener | None = None) -> LoopResult:
    """Run, or resume from the state in ``job.directory``. Raises any ``RLError`` of the parts.

    A store, an environment or an adapter that cannot be used is an error before the first episode.
    """
    listener = listener or LoopListener()
    check_trainable(job.settings)
    if not job.tasks.suite.software:
        refuse_without_workspace(make_reward(job.settings.reward), f"{job.tasks.suite.name} has none")
        await _greet(job.settings, job.tasks.held_out[0].task)
    plan = loop_plan(job)
    _note_start(job)
    title, stages = job.title or job.tasks.suite.name, job.settings.loop.stages
    facts = RunFacts.begin(job.directory, plan, title=title, stages=stages, command=job.command)
    reward = judging_reward(job.settings.reward, SuccessRule(at=None), software=job.tasks.suite.software)
    serving, script = job.settings.serving, demonstrator_of(job.tasks.suite.name)
    adapters = AdapterStore(serving.adapters_directory.resolve())
    async with AsyncExitStack() as opened:
        publisher = publisher_for(serving, adapters, keep=job.settings.loop.kept_versions)
        opened.push_async_callback(publisher.aclose)
        storage = open_storage(job.settings)
        opened.push_async_callback(storage.close)
        if job.backend is not None:
            await job.backend.check()
            remove_tree(job.directory / CHECKOUTS)  # left by a killed process
        # Some environments are given ``max_turns``, and end an episode at it.
        turns = job.settings.loop.training_max_turns or job.settings.max_turns
        settings, other = job.settings.model_copy(update={"max_turns": turns}), evaluated_by(job.settings)
        runner = await opened.enter_async_context(open_player(job, settings, storage))
        demonstrator = evaluator = None
        # Another strategy of held-out tasks, or an environment that is given another last turn.
        if other is not None or not (job.tasks.suite.software or turns == job.settings.max_turns):
            evaluator = await opened.enter_async_context(open_player(job, other or job.settings, storage))
        if job.tasks.demonstrations and script is not None:
            demonstrator = await opened.enter_async_context(script.open(job, storage))
        parts = LoopParts(
            runner=runner,
            demonstrator=demonstrator,
            storage=storage,
            reward=reward,
            objective=make_reward(objective_of(job.tasks, job.settings)),
            adapters=adapters,
            publisher=publisher,
            model=job.model,
            directory=job.directory,
            lessons=script.lessons(job) if script is not None else None,
            evaluator=evaluator,
        )
        reporting = RunReport(
            facts,
            plan,
            directory=job.directory,
            storage=storage,
            adapters=adapters.root,
            model=job.model,
            reward_version=reward.version,
            noted=listener.noted,
        )
        state = await TrainingLoop(plan, parts, listener, reporting.write).run()
        await reporting.write(state)
        return LoopResult(state, reporting.facts.changes, reporting.path)


def _note_start(job: LoopJob) -> None:
    """Save the adapter that a new run starts from; a resumed run has it saved."""
    file = job.directory / STATE
    if job.start is None or file.exists():
        return
    if job.start.base_model != job.settings.serving.model:
        raise ConfigError(
            f"--from: {job.start.name} was trained on {job.start.base_model!r}, and {job.settings.serving.model!r} is "
            "served: serve its base model, or choose another version"
        )
    LoopState(start=job.start.name).save(file)


@asynccontextmanager
async def open_player(job: LoopJob, settings: RLSettings, storage: TrajectoryStorage) -> AsyncIterator[EpisodeRunner]:
    """The runner of the job's tasks, by the model server that ``settings`` name; it grades where tasks have tests."""
    plan = _evaluation_plan(job, settings)
    options = options_of(plan, job.processes)
    async with open_runner(settings, options, storage=storage, workers=job.processes) as runner:
        if job.backend is None:
            yield runner
            return
        graded = EvalRunner(
            plan,
            runner,
            strategy=options.strategy_spec(settings),
            storage=storage,
            scratch=job.directory / CHECKOUTS,
            backend=job.backend,
            reward=settings.reward,
        )
        yield GradedRunner(graded, job.tasks.entries)


def _evaluation_plan(job: LoopJob, settings: RLSettings) -> EvaluationPlan:
    """The plan of ``openhands-rl evaluate`` for the same tasks."""
    return EvaluationPlan(
        suite=job.tasks.suite,
        agent=RL_AGENT,
        settings=settings,
        native_tool_calling=job.native_tool_calling,
        token_ids=True,
        out=job.directory / EVALUATION,
        graders=job.graders,
        test_timeout=job.test_timeout,
    )


async def _greet(settings: RLSettings, task: Task) -> None:
    """Open and close an episode, so that an unreachable environment is an error before the run begins."""
    environment = make_environment(settings)
    try:
        with boundary(FailureKind.ENVIRONMENT, f"{settings.env_name} at {settings.environment_url}"):
            await environment.reset(task)
    finally:
        with boundary(FailureKind.ENVIRONMENT, "environment.close"):
            await environment.close()


def _bounded(entries: Sequence[EvalTask], limits: Limits) -> tuple[Task, ...]:
    return tuple(entry.task.model_copy(update={"limits": entry.task.limits or limits}) for entry in entries)
