"""``openhands-rl evaluate SUITE``: roll out an agent over a suite, grade it, and leave OpenHands' files."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.stores import STORE_HELP
from openhands_rl_plugin.core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from openhands_rl_plugin.config.rl import RLSettings
    from openhands_rl_plugin.core.protocols import TrajectoryStorage
    from openhands_rl_plugin.evals.runs.evaluation import Evaluation
    from openhands_rl_plugin.evals.runs.judged import Entry
    from openhands_rl_plugin.evals.runs.llm import EvaluatedModel
    from openhands_rl_plugin.evals.runs.outcome import Outcome
    from openhands_rl_plugin.evals.runs.plan import EvaluationPlan, PlayedBy
    from openhands_rl_plugin.evals.runs.suites import Suite
    from openhands_rl_plugin.evals.swe.protocols import InstanceBackend

HELP = "roll out an agent over a suite of tasks, grade it, report it"
RESUME = "what is finished is kept, and the same command goes on"
EPILOG = """suites:
  swe-local             repository tasks that run on a laptop without Docker
  swe-bench-lite, swe-bench-verified, swe-gym, swe-gym-lite
                        from the hub (needs the datasets package), or their rows with --dataset-file
  FILE                  rows in SWE-bench's columns: .jsonl, .json or .parquet
  webshop               the embedded shop, started for the run
  environment           the environment and server that [rl] of --config names: "agentgym/textcraft", "openenv/...",
                        "nemo-gym/..."; task 0 to N-1 (--tasks N), or rows (.jsonl) with --dataset-file

examples:
  openhands-rl evaluate swe-local --llm eval --config config.toml --workers 4
  openhands-rl evaluate swe-bench-verified --model openai/qwen --base-url http://127.0.0.1:8100/v1 --runs 4 --workers 16
  openhands-rl evaluate rows.jsonl --llm eval --config config.toml --agent RLAgent --strategy BestOfN \\
      --strategy-option n=4 --include 'pytest-dev__*' --limit 20 --dry-run
  openhands-rl evaluate webshop --agent RLAgent --model policy-v000007 --base-model SmolLM2-135M-Instruct \\
      --base-url http://127.0.0.1:8100/v1 --limit 50

A run is OUT/<dataset>-<split>/<agent>/<model>_maxiter_<n>_N_<note>-run_<i>/ with output.jsonl, metadata.json,
llm_completions/, predictions.jsonl and report.json. Run 0 samples at temperature 0 and the others at 0.5 unless
--temperatures or the model's own temperature says otherwise; a search samples at its strategy's own temperature. A run
that was played with another strategy, model, seed or bound is not gone on with: --note tells experiments apart.
"""
_SWE_GYM_TEMPERATURES = (0.0, 0.5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The suite, the agent, the model, what is selected, and the bounds."""
    parser.add_argument("suite", metavar="SUITE", help="the name of a suite, or a file of rows")
    parser.add_argument("--split", help="of the data set (default: the suite's)")
    parser.add_argument("--dataset-file", type=Path, metavar="FILE", help="the suite's rows: .jsonl, .json or .parquet")
    parser.add_argument("--tasks", type=int, metavar="N", help="how many tasks an environment has")
    parser.add_argument("--out", type=Path, default=Path("evaluation_outputs"), metavar="DIR", help="(%(default)s)")
    parser.add_argument("--note", default="v1", metavar="TEXT", help="what tells this experiment apart (%(default)s)")
    parser.add_argument("--store", metavar="STORE", help=f"{STORE_HELP} (default: OUT/trajectories)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    _add_agent(parser.add_argument_group("agent"))
    _add_model(parser.add_argument_group("model"))
    _add_selection(parser.add_argument_group("which instances"))
    _add_bounds(parser.add_argument_group("bounds"))


def run(args: argparse.Namespace) -> int:
    """Evaluate. Raises ``RLError`` when an option, the data, the machine or the disk does not allow it."""
    from openhands_rl_plugin.evals.runs.composing import options_of, played_by, settings_of

    plan, suite = _plan(args)
    settings = settings_of(plan, args.config)
    options_of(plan, suite, 0)  # an agent that cannot play the suite is refused now
    by = played_by(plan, settings)
    _check_temperature(args, by)
    if args.dry_run:
        print("\n".join(_said(plan, suite, settings, by, args)))
        return 0
    # OpenHands logs every step otherwise, and asks for a price list on the network.
    os.environ.setdefault("LOG_LEVEL", "ERROR")
    asyncio.run(_evaluate(args, plan, suite, settings))
    return _report(plan)


def _add_agent(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--agent", default="CodeActAgent", help="CodeActAgent, RLAgent or another one (%(default)s)")
    group.add_argument("--strategy", default="", help="of RLAgent (default: [rl] rollout_strategy)")
    group.add_argument("--strategy-option", action="append", default=[], metavar="NAME=JSON", help="may be repeated")
    group.add_argument("--max-iterations", type=int, default=50, metavar="N", help="turns of an episode (%(default)s)")


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--config", type=Path, metavar="FILE", help="a config.toml with [llm.NAME] and [rl]")
    group.add_argument("--llm", metavar="NAME", help="[llm.NAME] of the config.toml (llm.NAME is understood, too)")
    group.add_argument("--model", metavar="NAME", help="the model's name, as in [llm]")
    group.add_argument(
        "--base-model",
        metavar="NAME",
        help="what --model adapts, where that is a version of an adapter (default: [rl.serving] model)",
    )
    group.add_argument("--base-url", metavar="URL", help="an OpenAI-compatible server")
    group.add_argument("--api-key-env", metavar="VARIABLE", help="the environment variable that holds the key")
    group.add_argument("--temperature", type=float, metavar="T", help="of all runs")
    group.add_argument("--temperatures", metavar="T,T,...", help="of run 0, run 1, ...; the rest take the last")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--max-output-tokens", type=int, metavar="N", help="of one answer")
    group.add_argument("--native-tool-calling", action=argparse.BooleanOptionalAction, help="else calls are text")
    group.add_argument("--token-ids", action=argparse.BooleanOptionalAction, help="record token ids, for training")
    group.add_argument("--input-cost-per-token", type=float, metavar="X")
    group.add_argument("--output-cost-per-token", type=float, metavar="X")


def _add_selection(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--include", nargs="+", default=[], metavar="ID", help="ids or patterns such as 'psf__*'")
    group.add_argument("--exclude", nargs="+", default=[], metavar="ID", help="ids or patterns")
    group.add_argument("--shuffle", type=int, metavar="SEED", help="play in an order of chance")
    group.add_argument("--limit", type=int, metavar="N", help="at most N instances")


def _add_bounds(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--runs", type=int, default=1, metavar="N", help="runs over all instances (%(default)s)")
    group.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    group.add_argument("--workers", type=int, default=1, metavar="N", help="episodes at a time (%(default)s)")
    group.add_argument("--processes", type=int, metavar="N", help="that they are spread over (0: this one)")
    group.add_argument("--graders", type=int, metavar="N", help="patches tested at a time (default: as processors)")
    group.add_argument("--timeout", type=float, default=7200.0, metavar="S", help="of an episode (%(default)s)")
    group.add_argument(
        "--test-timeout", type=float, default=1800.0, metavar="S", help="of a patch's tests (%(default)s)"
    )
    group.add_argument("--command-timeout", type=int, default=300, metavar="S", help="of a command (%(default)s)")
    group.add_argument("--retries", type=int, default=2, metavar="N", help="after failed infrastructure (%(default)s)")
    group.add_argument("--retry-failed", action="store_true", help="play again what failed for want of infrastructure")
    group.add_argument("--backend", choices=["local", "docker"], default="local", help="of instances (%(default)s)")
    group.add_argument("--mirror", type=Path, metavar="DIR", help="git repositories, as owner/name.git; else clones")
    group.add_argument("--cache", type=Path, metavar="DIR", help="environments of the local back end")
    group.add_argument("--network", action="store_true", help="let tests use the network")
    group.add_argument("--no-grade", action="store_true", help="leave the patches to `openhands-rl grade`")
    group.add_argument("--no-completions", action="store_true", help="do not write llm_completions/")


def _plan(args: argparse.Namespace) -> tuple[EvaluationPlan, Suite]:
    from pydantic import ValidationError

    from openhands_rl_plugin.core.validation import problems
    from openhands_rl_plugin.evals.runs.plan import EvaluationPlan
    from openhands_rl_plugin.evals.runs.suites import find_suite

    suite = find_suite(args.suite, args.split)
    model = _model(args)
    try:
        plan = EvaluationPlan(
            suite=suite.name,
            dataset=suite.dataset,
            split=suite.split,
            agent=args.agent,
            model=model,
            base_model=_base_model(args, model),
            out=args.out.absolute(),
            note=args.note,
            strategy=args.strategy,
            strategy_options=dict(_option(each) for each in args.strategy_option),
            max_iterations=args.max_iterations,
            runs=args.runs,
            temperatures=_temperatures(args, model),
            seed=args.seed,
            workers=args.workers,
            graders=args.graders or os.cpu_count() or 1,
            timeout=args.timeout,
            test_timeout=args.test_timeout,
            command_timeout=args.command_timeout,
            retries=args.retries,
            completions=not args.no_completions,
        )
    except ValidationError as error:
        lines = (f"--{at[-1].replace('_', '-')}: {what}" for at, what in problems(error, EvaluationPlan))
        raise ConfigError("\n".join(lines)) from error
    return plan, suite


def _model(args: argparse.Namespace) -> EvaluatedModel:
    from openhands_rl_plugin.evals.runs.llm import EvaluatedModel, evaluated_model

    named = {name: getattr(args, name, None) for name in (*EvaluatedModel.model_fields, "model")}
    return evaluated_model({name: value for name, value in named.items() if value is not None}, args.config, args.llm)


def _base_model(args: argparse.Namespace, model: EvaluatedModel) -> str:
    """What the evaluated version of an adapter adapts; empty when no adapter is evaluated."""
    from openhands_rl_plugin.config.toml import load_settings
    from openhands_rl_plugin.core.types import PolicyRef

    if args.base_model:
        return args.base_model
    if PolicyRef.from_served_name("", model.name).adapter is None:
        return ""
    base, colon, _ = model.name.rpartition(":")  # SGLang's name of an adapter holds the base model's
    known = load_settings(args.config).serving.model if args.config else ""
    if not (found := base if colon else known):
        raise ConfigError(
            f"{model.name} is a version of an adapter: name the model that it adapts, as its server calls it, with "
            "--base-model, or as model in [rl.serving] of --config"
        )
    return found


def _temperatures(args: argparse.Namespace, model: EvaluatedModel) -> tuple[float, ...]:
    if args.temperatures is None:
        return () if model.temperature is not None else _SWE_GYM_TEMPERATURES
    try:
        return tuple(float(each) for each in args.temperatures.split(","))
    except ValueError as error:
        raise ConfigError(f"--temperatures {args.temperatures}: give numbers with commas between them") from error


def _check_temperature(args: argparse.Namespace, by: PlayedBy | None) -> None:
    """Refuse a temperature of the runs where a search samples at its own."""
    if by is None or by.temperature is None:
        return
    for option in ("temperature", "temperatures"):
        if getattr(args, option) is not None:
            raise ConfigError(
                f"--{option}: {by.strategy} samples at a temperature of its own ({by.temperature:g}): set that with "
                "--strategy-option temperature=..."
            )


def _option(text: str) -> tuple[str, JsonValue]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--strategy-option {text}: give NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _entries(args: argparse.Namespace, suite: Suite, settings: RLSettings) -> tuple[Entry, ...]:
    from openhands_rl_plugin.evals.runs.selection import Selection
    from openhands_rl_plugin.evals.runs.suites import environment_entries, software_entries

    if suite.software:
        entries = software_entries(suite, args.dataset_file)
    else:
        entries = environment_entries(suite, settings.env_name, args.tasks, args.dataset_file)
    chosen = Selection(include=tuple(args.include), exclude=tuple(args.exclude), shuffle=args.shuffle, limit=args.limit)
    return chosen.of(entries, lambda entry: entry.task.id)


async def _evaluate(args: argparse.Namespace, plan: EvaluationPlan, suite: Suite, settings: RLSettings) -> None:
    from openhands_rl_plugin.evals.report.progress import EvaluationProgress
    from openhands_rl_plugin.evals.runs.composing import evaluate, process_count

    entries = _entries(args, suite, settings)
    progress: EvaluationProgress | None = None

    def started(evaluation: Evaluation) -> Callable[[Outcome], None]:
        nonlocal progress
        progress = EvaluationProgress(evaluation.left)
        progress.__enter__()
        return progress.finished

    async with _store(args, plan) as storage, _backend(args, suite) as backend:
        try:
            await evaluate(
                plan,
                suite,
                entries,
                settings=settings,
                storage=storage,
                backend=backend,
                grade=not args.no_grade,
                retry_failed=args.retry_failed,
                processes=process_count(args.workers) if args.processes is None else args.processes,
                started=started,
            )
        finally:
            if progress is not None:
                progress.__exit__()


@asynccontextmanager
async def _store(args: argparse.Namespace, plan: EvaluationPlan) -> AsyncIterator[TrajectoryStorage]:
    from openhands_rl_plugin.cli.options.stores import open_store
    from openhands_rl_plugin.evals.runs.composing import STORE

    async with open_store(args.store or str(plan.out / STORE), create=True) as storage:
        yield storage


@asynccontextmanager
async def _backend(args: argparse.Namespace, suite: Suite) -> AsyncIterator[InstanceBackend | None]:
    if not suite.software:
        yield None
        return
    from openhands_rl_plugin.evals.runs.backends import make_backend

    backend = make_backend(args.backend, mirror=args.mirror, cache=args.cache, network=args.network)
    try:
        yield backend
    finally:
        await backend.close()


def _said(
    plan: EvaluationPlan, suite: Suite, settings: RLSettings, by: PlayedBy | None, args: argparse.Namespace
) -> list[str]:
    """What a dry run says. Data sets of the hub are not downloaded for it."""
    from openhands_rl_plugin.evals.runs.run_files import finished_instances
    from openhands_rl_plugin.evals.runs.same_run import check_same_run

    known = None if suite.on_hub and args.dataset_file is None else _entries(args, suite, settings)
    agent = plan.agent if by is None else f"{plan.agent} with {by.strategy}"
    own = None if by is None else by.temperature
    count = (
        f"{len(known)} instances" if known is not None else f"instances of {suite.dataset} ({suite.split}), on the hub"
    )
    adapts = f" on {plan.base_model}" if plan.base_model else ""
    said = [
        f"{suite.name}: {count}, {plan.runs} runs, {plan.workers} at a time",
        f"  agent: {agent}, at most {plan.max_iterations} iterations and {plan.timeout:g} s",
        f"  model: {plan.model.name}{adapts} at {plan.model.base_url}",
    ]
    for run in plan.each_run():
        check_same_run(plan, run, by)
        directory = plan.run_directory(run)
        done = len(finished_instances(directory))
        temperature = run.temperature if own is None else own
        sampled = "the model's" if temperature is None else f"{temperature:g}"
        said.append(f"  run {run.index}: temperature {sampled}, {done} done, {directory}")
    return said


def _report(plan: EvaluationPlan) -> int:
    from openhands_rl_plugin.cli.report import print_report
    from openhands_rl_plugin.evals.report.reading import read_runs

    directories = tuple(plan.run_directory(run) for run in plan.each_run())
    print_report(read_runs(directories))
    print("\n".join(str(directory) for directory in directories))
    return 0
