"""An evaluation put together: settings, runner, back end and store of a plan."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from openhands_rl_plugin.config.build import make_strategy
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import StrategySpec
from openhands_rl_plugin.evals.runs.environment_runner import EnvironmentRunner, shop_for
from openhands_rl_plugin.evals.runs.episodes import EvalRunner, EvalTask
from openhands_rl_plugin.evals.runs.evaluation import Evaluation
from openhands_rl_plugin.evals.runs.outcome import Outcome
from openhands_rl_plugin.evals.runs.plan import AgentStrategy, EvaluationPlan
from openhands_rl_plugin.evals.runs.prompts import REPLIES
from openhands_rl_plugin.evals.runs.suites import WEBSHOP, Suite
from openhands_rl_plugin.evals.runs.swe_runner import SweRunner
from openhands_rl_plugin.evals.swe.protocols import InstanceBackend
from openhands_rl_plugin.hosts.local import HostRunner
from openhands_rl_plugin.hosts.open import open_runner
from openhands_rl_plugin.hosts.shared.options import RL_AGENT, HostOptions

STORE = "trajectories"
"""The folder of the store, below that of the evaluation, where no other is named."""

_MOST_PROCESSES = 8


async def evaluate(
    plan: EvaluationPlan,
    suite: Suite,
    eval_tasks: Sequence[EvalTask],
    *,
    settings: RLSettings,
    storage: TrajectoryStorage,
    backend: InstanceBackend | None = None,
    grade: bool = True,
    retry_failed: bool = False,
    processes: int = 0,
    started: Callable[[Evaluation], Callable[[Outcome], None] | None] | None = None,
) -> None:
    """Do what is left of a plan. ``started`` is told of it and gives the listener of its outcomes.

    ``processes``: worker processes that OpenHands' controllers are spread over; 0 plays in this one.

    Raises ``ConfigError`` and ``StorageError``; an interruption keeps what was finished.
    """
    if suite.software and backend is None:
        raise ConfigError(f"{suite.name} needs a back end for its instances")
    if backend is not None:
        await backend.check()
    evaluation = Evaluation(plan, eval_tasks, by=agent_strategy(plan, settings), retry_failed=retry_failed)
    try:
        listener = started(evaluation) if started else None
        async with _open_eval_runner(
            plan, suite, settings, storage, backend, grade, evaluation.scratch, processes
        ) as runner:
            await evaluation.run(runner, listener)
    finally:
        evaluation.close()


@asynccontextmanager
async def _open_eval_runner(
    plan: EvaluationPlan,
    suite: Suite,
    settings: RLSettings,
    storage: TrajectoryStorage,
    backend: InstanceBackend | None,
    grade: bool,
    scratch: Path,
    processes: int,
) -> AsyncIterator[EvalRunner]:
    options = options_of(plan, suite, processes)
    with ExitStack() as opened:
        if suite.name == WEBSHOP:
            settings = opened.enter_context(shop_for(settings))
        async with open_runner(settings, options, storage=storage, workers=processes) as host:
            strategy = options.strategy_spec(settings)
            if backend is None:
                yield EnvironmentRunner(plan, host, strategy=strategy, storage=storage)
            else:
                yield open_swe_runner(plan, host, strategy, storage, backend, scratch, grade=grade)


def open_swe_runner(
    plan: EvaluationPlan,
    host: HostRunner,
    strategy: StrategySpec,
    storage: TrajectoryStorage,
    backend: InstanceBackend,
    scratch: Path,
    *,
    grade: bool = True,
) -> SweRunner:
    """Who plays software tasks in checkouts of ``backend``, which grades them too."""
    grader = backend if grade else None
    return SweRunner(plan, host, strategy=strategy, storage=storage, checkouts=backend, grader=grader, scratch=scratch)


def options_of(plan: EvaluationPlan, suite: Suite, processes: int) -> HostOptions:
    """How OpenHands' controller plays the plan. Raises ``ConfigError`` for an agent that cannot play the suite."""
    if plan.agent != RL_AGENT and not suite.software:
        raise ConfigError(f"{suite.name} is an environment, which only {RL_AGENT} can play, not {plan.agent}")
    return HostOptions(
        environment_mode=not suite.software,
        isolation="required",
        sessions=-(-plan.workers // max(1, processes)),
        command_timeout=plan.command_timeout,
        native_tool_calling=plan.model.native_tool_calling,
        agent=plan.agent,
        token_ids=plan.model.token_ids,
        stuck_detection=suite.software,
        llm_retries=plan.model.num_retries,
        replies=REPLIES if suite.software else None,
    )


def settings_of(plan: EvaluationPlan, config: Path | None) -> RLSettings:
    """``[rl]`` of the configuration file, with what the plan says about model, strategy and bounds.

    Raises ``ConfigError``, also for a strategy that the plan's agent would not ask.
    """
    if plan.agent != RL_AGENT and (plan.strategy or plan.strategy_options):
        option = "--strategy" if plan.strategy else "--strategy-option"
        raise ConfigError(f"{option}: only {RL_AGENT} has a strategy, not {plan.agent}; give --agent {RL_AGENT} too")
    settings = load_settings(config) if config is not None else RLSettings()
    serving = ServingSettings(
        base_url=plan.model.base_url,
        model=plan.base_model or plan.model.name,
        api_key_env=plan.model.api_key_env,
        request_timeout=plan.model.timeout,
    )
    strategy = plan.strategy or settings.rollout_strategy
    options = {**(settings.strategy if strategy == settings.rollout_strategy else {}), **plan.strategy_options}
    temperature = 0.0 if plan.model.temperature is None else plan.model.temperature
    chosen = settings.model_copy(
        update={
            "serving": serving,
            "rollout_strategy": strategy,
            "strategy": options,
            "max_workers": plan.workers,
            "max_response_length": plan.model.max_output_tokens,
            "sampling": settings.sampling.model_copy(update={"temperature": temperature, "seed": plan.seed}),
        }
    )
    if plan.agent == RL_AGENT:
        make_strategy(chosen)  # a wrong one is refused before anything is played
    return chosen


def agent_strategy(plan: EvaluationPlan, settings: RLSettings) -> AgentStrategy | None:
    """The strategy of ``settings`` that plays the plan; ``None`` for an agent that has none."""
    if plan.agent != RL_AGENT:
        return None
    own: object = getattr(getattr(make_strategy(settings), "options", None), "temperature", None)
    return AgentStrategy(
        strategy=settings.rollout_strategy,
        options=settings.strategy,
        temperature=own if isinstance(own, float) else None,
    )


def process_count(workers: int) -> int:
    """Worker processes for so many episodes at a time: no more than processors, which one process cannot fill."""
    return max(1, min(workers, os.cpu_count() or 1, _MOST_PROCESSES))
