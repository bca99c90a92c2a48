"""One training run over a suite: the plan from the settings, the open parts, the loop, and its results."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from openhands_rl_plugin.apps.loop.claim import CHECKOUTS, EVALUATION
from openhands_rl_plugin.apps.loop.graded import GradedRunner
from openhands_rl_plugin.apps.loop.parts import STATE, open_parts, probe_ids
from openhands_rl_plugin.apps.loop.tasks import LoopTasks
from openhands_rl_plugin.apps.studio.reports.listener import RunReport
from openhands_rl_plugin.config.build import make_environment, make_reward, make_strategy, open_storage
from openhands_rl_plugin.config.rl import IN_PROCESS, LoopSettings, RewardSettings, RLSettings
from openhands_rl_plugin.config.success import SuccessRule, judged_by_return, success_rule
from openhands_rl_plugin.config.training import TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, boundary
from openhands_rl_plugin.core.memory import free_memory
from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, altering_parameters
from openhands_rl_plugin.core.protocols import EpisodeRunner, TrajectoryStorage
from openhands_rl_plugin.core.types import Adapter, EpisodeRequest, FailureKind, Limits, Task, Trajectory
from openhands_rl_plugin.environments.webshop.demonstrator import DemonstratorOptions
from openhands_rl_plugin.environments.workspace.copies import remove_tree
from openhands_rl_plugin.evals.runs.episodes import EvalTask
from openhands_rl_plugin.evals.runs.evaluate import open_swe_runner, options_of
from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, served_model
from openhands_rl_plugin.evals.swe.protocols import InstanceBackend
from openhands_rl_plugin.evals.tasks.repair.oracle import ORACLE, RepairOracle
from openhands_rl_plugin.evals.tasks.repair.oracle_server import serve_oracle
from openhands_rl_plugin.hosts.open import open_runner
from openhands_rl_plugin.hosts.shared.options import RL_AGENT
from openhands_rl_plugin.models.adapters.servers import EmbeddedServer
from openhands_rl_plugin.rollout.scoring import refuse_labels, refuse_without_workspace
from openhands_rl_plugin.training.algorithms import algorithm_of
from openhands_rl_plugin.training.loop.asynchronous import make_loop
from openhands_rl_plugin.training.loop.facts import RunFacts, StageChange
from openhands_rl_plugin.training.loop.plan import LoopPlan, LoopState
from openhands_rl_plugin.training.loop.router import rollout_settings
from openhands_rl_plugin.training.loop.stages import LoopListener, LoopParts
from openhands_rl_plugin.training.trainer.memory_estimate import check_fits

RETURN, TESTS = "return", "tests"


@dataclass(frozen=True)
class LoopJob:
    """A run: settings that name all servers, tasks, and the directories of the base model and of the run.

    ``start``: the adapter that a new run starts from. ``command`` and ``title``: for the report. ``backend`` is
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
    command_timeout: int = 300
    native_tool_calling: bool = True
    start: Adapter | None = None
    command: str = ""
    title: str = ""


@dataclass(frozen=True)
class LoopResult:
    """The finished stages, the changes of the success rate on held-out tasks by SFT and by RL, and the report."""

    state: LoopState
    changes: tuple[StageChange, ...]
    report: Path


def check_trainable(settings: RLSettings) -> None:
    """Raise ``ConfigError`` for settings that a loop cannot train with, or whose adapter could not be served."""
    refuse_labels(make_reward(settings.reward), "nobody labels while a loop runs")
    training = settings.training
    if training.method != "full":
        training.check_servable()
        if training.adapt_experts and settings.serving.server == "embedded":
            raise ConfigError(
                '[rl.training] adapt_experts = true: `openhands-rl serve` ([rl.serving] server = "embedded") cannot '
                "load adapters of experts; serve the model with vLLM, or set false"
            )
    elif settings.loop.kind == "async":
        raise ConfigError(
            '[rl.training] method = "full" replaces the served weights, and an asynchronous loop ends episodes on the '
            'former ones: set [rl.loop] kind = "sync", or method = "lora"'
        )
    if algorithm_of(training).kind != "reinforcement":
        raise ConfigError(
            f'[rl.training] algorithm = "{training.algorithm}" is not an RL algorithm: choose '
            '"reinforce++-baseline", "grpo" or another one, or train on stored episodes with `openhands-rl train`'
        )
    if training.sharding == "layers":
        raise ConfigError(
            '[rl.training] sharding = "layers" splits a model among several processes, and a loop trains in one: leave '
            '"auto", or train on stored episodes with torchrun and `openhands-rl train`'
        )
    for where, name, value in _sampled_by(settings):
        if name == "temperature" and value == 0:
            raise ConfigError(f"{where}{name} = 0: greedy answers have no probability to train on; set it above 0")
        if altering_parameters({name: value}):
            neutral = NEUTRAL_PARAMETERS.get(name, 1.0)
            raise ConfigError(
                f"{where}{name} = {value:g}: answers would not be sampled from the policy's own distribution, and the "
                f"gradient would be wrong; set {neutral:g}"
            )
    if _gives_unscaled(settings):
        _refuse_unscaled(settings, EmbeddedServer.NAME)
    if training.tree == "path" and getattr(make_strategy(settings), "selects", False):
        raise ConfigError(
            f'[rl] rollout_strategy = "{settings.rollout_strategy}" chooses among what the policy sampled, so its '
            'episodes are no samples of the policy: set [rl.training] tree = "proposals" (or "branches"), or act '
            "without a search (StandardReAct)"
        )


def _gives_unscaled(settings: RLSettings) -> bool:
    """Whether the rollouts' logprobs are known to be those of temperature 1; other servers are asked."""
    serving = settings.serving
    return settings.engine == IN_PROCESS or serving.server == "embedded" or not serving.publish_urls


def _refuse_unscaled(settings: RLSettings, server: str, remedy: str = "") -> None:
    """Raise ``ConfigError`` where ``server`` reports logprobs of temperature 1 and others are needed."""
    if (needed := _needs_scaled(settings)) is not None:
        what, instead = needed
        raise ConfigError(
            f"{what}: {server} reports logprobs of temperature 1, which were not sampled from; {remedy}set 1.0, or "
            f"{instead}"
        )


def _needs_scaled(settings: RLSettings) -> tuple[str, str] | None:
    """Which settings need the logprobs of another temperature than 1, and what to set where a server has none."""
    training = settings.training
    heated = [each for each in _sampled_by(settings) if each[1] == "temperature" and each[2] != 1]
    if not heated or (training.old_logprobs != "recorded" and training.correction == "none"):
        return None
    recorded = training.old_logprobs == "recorded"
    key = 'old_logprobs = "recorded"' if recorded else f'correction = "{training.correction}"'
    where, name, value = heated[0]
    what = f"{where}{name} = {value:g} with [rl.training] {key}"
    return what, 'old_logprobs = "auto"' if recorded else 'correction = "none"'


def _sampled_by(settings: RLSettings) -> Iterator[tuple[str, str, float]]:
    """Where all parameters that actions are sampled with are set, their names and values: the settings' and the
    strategy's own."""
    options: object = getattr(make_strategy(settings), "options", None)
    asked = {"[rl.strategy] ": options, "[rl.strategy] sampling.": getattr(options, "sampling", None)}
    for where, values in {"[rl.sampling] ": settings.sampling, **asked}.items():
        for name in ("temperature", "top_p", *NEUTRAL_PARAMETERS):
            value: object = getattr(values, name, None)
            if isinstance(value, int | float):
                yield where, name, value


def objective_of(tasks: LoopTasks, settings: RLSettings) -> RewardSettings:
    """The reward that is maximised: ``[rl.reward]``. The return of a software task is the result of its tests."""
    return settings.reward.overridden(TESTS) if _is_verdict(tasks, settings) else settings.reward


def _is_verdict(tasks: LoopTasks, settings: RLSettings) -> bool:
    return tasks.suite.software and settings.reward.name == RETURN


def loop_plan(job: LoopJob, canary: tuple[int, ...]) -> LoopPlan:
    """The plan of the settings. The warm start is ``[rl.training]`` with ``algorithm = "sft"``."""
    settings = job.settings
    loop, training, sampling = settings.loop, settings.training, settings.sampling_params()
    return LoopPlan(
        run_id=job.run_id,
        base_model=settings.serving.model,
        adapter=settings.serving.adapter,
        demonstrations=_bounded(job.tasks.demonstrations, job.limits),
        training=_bounded(job.tasks.training, job.limits),
        held_out=_bounded(job.tasks.held_out, job.limits),
        iterations=loop.iterations,
        tasks_per_iteration=loop.tasks_per_iteration,
        samples_per_task=loop.samples_per_task,
        base_held_out=loop.base_held_out or None,
        warm_start=_warm_start(settings),
        reinforcement=training,
        sampling=sampling,
        evaluation=sampling,
        concurrency=settings.max_workers,
        seed=settings.sampling.seed,
        success_at=loop.success_at,
        success=_criterion(job),
        probe_ids=canary,
        save_total_limit=loop.save_total_limit,
        prefix_sampling=loop.prefix_sampling,
    )


def _warm_start(settings: RLSettings) -> TrainingSettings:
    loop, training = settings.loop, settings.training.as_fine_tuning()
    rate = loop.warm_start_rate or training.learning_rate
    return training.model_copy(update={"num_epochs": loop.warm_start_epochs, "learning_rate": rate})


def _criterion(job: LoopJob) -> SuccessRule | None:
    """The environment's or the reward's criterion, unless ``[rl.loop] success_at`` says another."""
    settings = job.settings
    said = settings.loop.success_at != LoopSettings.model_fields["success_at"].default
    if said or job.tasks.suite.software or not judged_by_return(settings.reward):
        return None
    return success_rule(job.tasks.held_out[0].task.environment, settings.reward)


async def run_loop(job: LoopJob, listener: LoopListener | None = None) -> LoopResult:
    """Run, or resume from the state in ``job.directory``. Raises any ``RLError`` of the parts.

    A store, an environment or an adapter that cannot be used is an error before the first episode.
    """
    check_trainable(job.settings)
    if not job.tasks.suite.software:
        refuse_without_workspace(make_reward(job.settings.reward), f"{job.tasks.suite.name} has none")
        await _greet(job.settings, job.tasks.held_out[0].task)
    plan = loop_plan(job, probe_ids(job.model))
    _note_start(job)
    title, stages = job.title or job.tasks.suite.name, job.settings.loop.stages
    facts = RunFacts.begin(job.directory, plan, title=title, stages=stages, command=job.command)
    reward = make_reward(RewardSettings(name=TESTS if job.tasks.suite.software else RETURN))
    objective = make_reward(objective_of(job.tasks, job.settings))
    storage = open_storage(job.settings)
    try:
        async with (
            _open_runner(job, storage) as runner,
            open_demonstrator(job, storage) as demonstrator,
            open_parts(
                job.settings,
                model=job.model,
                directory=job.directory,
                runner=runner,
                shop=DemonstratorOptions(),
                storage=storage,
                reward=reward,
                objective=objective,
                demonstrator=demonstrator,
            ) as parts,
        ):
            await _require_servers(job, parts)
            reporting = RunReport(
                listener or LoopListener(),
                facts,
                plan,
                directory=job.directory,
                storage=storage,
                adapters=parts.adapters.root,
                model=job.model,
                reward_version=parts.reward.version,
            )
            state = await make_loop(plan, parts, job.settings.loop, reporting).run()
            await reporting.write(state)
            return LoopResult(state, reporting.facts.changes, reporting.path)
    finally:
        await storage.close()


async def _require_servers(job: LoopJob, parts: LoopParts) -> None:
    """All weights go into a server that takes them, fit into memory, and begin as the base model on the server."""
    if _needs_scaled(job.settings) is not None:
        for url in await parts.publisher.unscaled(job.settings.serving.model, probe_ids(job.model)):
            _refuse_unscaled(job.settings, url, "start vLLM with --logprobs-mode processed_logprobs, or ")
    if job.settings.training.method != "full":
        return
    check_fits(job.model, job.settings.training, 0, free_memory())
    fresh = LoopState.load(parts.state_file).adapter is None
    base = (job.settings.serving.model, str(job.model.resolve()))
    await parts.publisher.require_servers(base if fresh else None)


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
async def _open_runner(job: LoopJob, storage: TrajectoryStorage) -> AsyncIterator[EpisodeRunner]:
    from openhands_rl_plugin.models.adapters.store import AdapterStore

    adapters = AdapterStore(job.settings.serving.adapters_directory.resolve())
    if job.backend is not None:
        await job.backend.check()
        remove_tree(job.directory / CHECKOUTS)  # left by a killed process
    with rollout_settings(job.settings, adapters) as sampled:
        async with open_player(job, sampled, storage) as runner:
            yield runner


@asynccontextmanager
async def open_player(job: LoopJob, settings: RLSettings, storage: TrajectoryStorage) -> AsyncIterator[EpisodeRunner]:
    """The runner of the job's tasks, by the model server that ``settings`` name; it grades where tasks have tests."""
    plan = _played(job, settings)
    options = options_of(plan, job.tasks.suite, job.processes)
    async with open_runner(settings, options, storage=storage, workers=job.processes) as runner:
        if job.backend is None:
            yield runner
            return
        strategy, tasks = options.strategy_spec(settings), job.tasks
        player = open_swe_runner(plan, runner, strategy, storage, job.backend, job.directory / CHECKOUTS)
        yield GradedRunner(player, (*tasks.demonstrations, *tasks.training, *tasks.held_out))


@asynccontextmanager
async def open_demonstrator(job: LoopJob, storage: TrajectoryStorage) -> AsyncIterator[EpisodeRunner | None]:
    """The oracle of repair tasks in the same host as the policy; ``None`` where there are no such demonstrations."""
    instances = [entry.instance for entry in job.tasks.demonstrations if entry.instance is not None]
    if not instances:
        yield None
        return
    with serve_oracle(RepairOracle(instances, job.settings.sampling.seed)) as url:
        own = {"base_url": url, "base_urls": (), "model": ORACLE, "api_key_env": "", "server": "auto"}
        settings = job.settings.model_copy(
            update={
                "serving": job.settings.serving.model_copy(update=own),
                "rollout_strategy": RLSettings().rollout_strategy,
                "strategy": {},
            }
        )
        async with open_player(job, settings, storage) as runner:
            yield _Oracle(runner)


class _Oracle:
    """An ``EpisodeRunner`` whose episodes are no policy's."""

    def __init__(self, runner: EpisodeRunner) -> None:
        self._runner = runner

    async def run(self, request: EpisodeRequest) -> Trajectory:
        """Run one episode with the oracle in the place of the policy."""
        return await self._runner.run(request.model_copy(update={"served_model": None}))

    async def close(self) -> None:
        """Does nothing: ``open_demonstrator`` closes what it opened."""


def _played(job: LoopJob, settings: RLSettings) -> EvaluationPlan:
    """The plan of ``openhands-rl evaluate`` for the same tasks."""
    return EvaluationPlan(
        suite=job.tasks.suite.name,
        dataset=job.tasks.suite.dataset,
        split=job.tasks.suite.split,
        agent=RL_AGENT,
        model=served_model(settings, native_tool_calling=job.native_tool_calling),
        out=job.directory / EVALUATION,
        workers=settings.max_workers,
        graders=job.graders,
        test_timeout=job.test_timeout,
        command_timeout=job.command_timeout,
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
