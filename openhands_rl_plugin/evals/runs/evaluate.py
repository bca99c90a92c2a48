"""Runs an evaluation plan: opens settings, host, runner and store."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from openhands_rl_plugin.config.build import make_reward, make_strategy
from openhands_rl_plugin.config.rl import RewardSettings, RLSettings, ServingSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.types import StrategySpec
from openhands_rl_plugin.evals.runs.environment_runner import EnvironmentRunner
from openhands_rl_plugin.evals.runs.episodes import EvalRunner, EvalTask
from openhands_rl_plugin.evals.runs.evaluation import Evaluation
from openhands_rl_plugin.evals.runs.outcome import Outcome
from openhands_rl_plugin.evals.runs.own_suites import own_suite
from openhands_rl_plugin.evals.runs.plan import AgentStrategy, EvaluationPlan, SessionAccess
from openhands_rl_plugin.evals.runs.prompts import REPLIES
from openhands_rl_plugin.evals.runs.suites import TESTS, Suite, graded_by
from openhands_rl_plugin.evals.runs.swe_runner import SweRunner
from openhands_rl_plugin.evals.swe.protocols import InstanceBackend
from openhands_rl_plugin.hosts.local import HostRunner
from openhands_rl_plugin.hosts.open import open_runner
from openhands_rl_plugin.hosts.shared.options import RL_AGENT, HostOptions

STORE = "trajectories"
"""The default folder of the store, below that of the evaluation."""

_MOST_PROCESSES = 8
_ISOLATION = "bubblewrap"
_BY_TESTS = RewardSettings(name=TESTS)


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
    """Run the unfinished attempts of a plan. ``started`` gets the evaluation and returns the callback for outcomes.

    ``processes``: worker processes for OpenHands' controllers; 0 runs them in this one.

    Raises ``ConfigError`` and ``StorageError``; an interruption keeps finished attempts.
    """
    if suite.software and backend is None:
        raise ConfigError(f"{suite.name} needs a back end for its instances")
    if backend is not None:
        await backend.check()
    by, access = agent_strategy(plan, settings), access_of(suite, settings)
    evaluation = Evaluation(plan, eval_tasks, by=by, access=access, retry_failed=retry_failed)
    try:
        listener = started(evaluation) if started else None
        reward = graded_by(eval_tasks, settings.reward)
        async with open_eval_runner(
            plan, suite, settings, storage, backend, reward, grade, evaluation.scratch, processes
        ) as runner:
            await evaluation.run(runner, listener)
    finally:
        evaluation.close()


@asynccontextmanager
async def open_eval_runner(
    plan: EvaluationPlan,
    suite: Suite,
    settings: RLSettings,
    storage: TrajectoryStorage,
    backend: InstanceBackend | None,
    reward: RewardSettings,
    grade: bool,
    scratch: Path,
    processes: int,
) -> AsyncIterator[EvalRunner]:
    """The runner of a plan, with its own shop where that is the suite. ``scratch`` holds checkouts in use."""
    options = options_of(plan, suite, processes)
    with ExitStack() as opened:
        if (own := own_suite(suite.name)) is not None:
            settings = opened.enter_context(own.serving(settings))
        async with open_runner(settings, options, storage=storage, workers=processes) as host:
            strategy = options.strategy_spec(settings)
            if backend is None:
                yield EnvironmentRunner(plan, host, strategy=strategy, storage=storage, success=plan.success)
            else:
                yield open_swe_runner(plan, host, strategy, storage, backend, scratch, reward=reward, grade=grade)


def open_swe_runner(
    plan: EvaluationPlan,
    host: HostRunner,
    strategy: StrategySpec,
    storage: TrajectoryStorage,
    backend: InstanceBackend,
    scratch: Path,
    *,
    reward: RewardSettings = _BY_TESTS,
    grade: bool = True,
) -> SweRunner:
    """A runner for SWE-bench instances. ``backend`` gives the checkouts and grades; ``reward``: see ``graded_by``."""
    return SweRunner(
        plan,
        host,
        strategy=strategy,
        storage=storage,
        checkouts=backend,
        grader=backend if grade else None,
        scratch=scratch,
        reward=make_reward(reward),
    )


def options_of(plan: EvaluationPlan, suite: Suite, processes: int) -> HostOptions:
    """The host options of a plan. Raises ``ConfigError`` for an agent that does not support the suite."""
    if plan.agent != RL_AGENT and not suite.software:
        raise ConfigError(f"{suite.name} is an environment, which only {RL_AGENT} supports, not {plan.agent}")
    return HostOptions(
        environment_mode=not suite.software,
        isolation=_ISOLATION,
        sessions=-(-plan.workers // max(1, processes)),
        command_timeout=plan.command_timeout,
        native_tool_calling=plan.model.native_tool_calling,
        agent=plan.agent,
        token_ids=plan.agent == RL_AGENT if plan.model.token_ids is None else plan.model.token_ids,
        stuck_detection=suite.software,
        llm_retries=plan.model.num_retries,
        replies=REPLIES if suite.software else None,
    )


def settings_of(plan: EvaluationPlan, config: Path | None) -> RLSettings:
    """``[rl]`` of the configuration file, with the plan's model, strategy and limits.

    Raises ``ConfigError``, also for a strategy with an agent that does not use one.
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
            "host": plan.host or settings.host,
            "serving": serving,
            "rollout_strategy": strategy,
            "strategy": options,
            "max_workers": plan.workers,
            "max_turns": plan.max_iterations,
            "max_response_length": plan.model.max_output_tokens,
            **({"max_prompt_length": plan.max_prompt_length} if plan.max_prompt_length else {}),
            **({"max_obs_length": plan.max_obs_length} if plan.max_obs_length else {}),
            "sampling": settings.sampling.model_copy(update={"temperature": temperature, "seed": plan.seed}),
        }
    )
    if plan.agent == RL_AGENT:
        make_strategy(chosen)  # an invalid one is refused before the first episode
    return chosen


def agent_strategy(plan: EvaluationPlan, settings: RLSettings) -> AgentStrategy | None:
    """The agent's strategy; ``None`` for an agent without strategies."""
    if plan.agent != RL_AGENT:
        return None
    own: object = getattr(getattr(make_strategy(settings), "options", None), "temperature", None)
    return AgentStrategy(
        strategy=settings.rollout_strategy,
        options=settings.strategy,
        temperature=own if isinstance(own, float) else None,
    )


def access_of(suite: Suite, settings: RLSettings) -> SessionAccess | None:
    """What commands of a suite may reach; ``None`` where it has none."""
    own = settings.workspace
    if not suite.software:
        return None
    return SessionAccess(
        isolation=_ISOLATION, prompt=own.prompt, network=own.network, visible=own.visible, writable=own.writable
    )


def process_count(workers: int) -> int:
    """The number of worker processes for ``workers`` concurrent episodes: at most one for each CPU."""
    return max(1, min(workers, os.cpu_count() or 1, _MOST_PROCESSES))
