"""``openhands-rl improve``: make a gym of your own git repository, train the model in it, report its gain.

examples:
  openhands-rl improve --repo . --dry-run                 tasks and price, and nothing is trained
  openhands-rl improve --repo . --model ./Qwen3-4B        the embedded server serves the model for the run
  openhands-rl improve --repo . --config config.toml      the server of [rl.serving], and your own settings
  openhands-rl improve --repo . --model ./SmolLM2-135M-Instruct --tasks 8 --held-out 4 --set loop.iterations=1
  openhands-rl improve --repo . --with hypothesis --tests tests/unit --test-timeout 120

The stages: tasks are made (bugs that the tests notice; past commits whose tests fail without their code), checked, and
split: held-out tasks change files that no training task changes, and past commits that are held out are newer than
those of training. Then the price is printed, and the loop of `openhands-rl loop` runs, with an evaluation on the
held-out tasks before and after. Tests and agents run in bubblewrap without a network.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.apps.serving import given_weights, served_policy
from openhands_rl_plugin.cli.options import (
    above_zero,
    add_settings,
    backend_of,
    checked,
    natural,
    positive,
    settings_of,
)
from openhands_rl_plugin.cli.terminal import ENDING, sayable, silence_libraries
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.errors import from_extra
from openhands_rl_plugin.models.generator.threads import prepare_threads

if TYPE_CHECKING:
    from openhands_rl_plugin.contrib.improve.gym import Gym
    from openhands_rl_plugin.evals.tasks.source import Source

_GYM_OPTIONS = ("tasks", "held_out", "seed", "python", "tests", "requirements")
_LENGTHS = frozenset({"max_turns", "max_prompt_length", "max_response_length", "max_obs_length"})
_GRADING = 300.0
"""Seconds that a patch's tests have at least: it may make them slower."""
RESUME = "the same command continues where it stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The repository, the model, the run, and how many tasks of what."""
    parser.add_argument("--repo", type=Path, required=True, metavar="PATH", help="a git repository with tests")
    commit = "commit that bugs are put into, and before which fixes are looked for"
    parser.add_argument("--commit", default="HEAD", metavar="COMMIT", help=commit)
    add_settings(parser)
    weights = "folder of the base model's weights (default: as the server of [rl.serving] says, else SmolLM2-135M)"
    parser.add_argument("--model", type=Path, metavar="DIR", help=weights)
    folder = "folder of the run (default: runs/improve-NAME)"
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help=folder)
    parser.add_argument("--fresh", action="store_true", help="delete tasks and state of an earlier run in the folder")
    dry = "make tasks, print what was found and what the run would cost, train nothing"
    parser.add_argument("--dry-run", action="store_true", help=dry)
    _add_tasks(parser.add_argument_group("tasks"))
    parser.set_defaults(backend="local", mirror=None)
    loop = parser.add_argument_group("loop")
    processes = "processes that play the episodes (0: this one only)"
    loop.add_argument("--processes", type=natural, metavar="PROCESSES", help=processes)
    seconds = "seconds for an episode"
    loop.add_argument("--timeout", type=above_zero, default=1800.0, metavar="SECONDS", help=seconds)
    native = "tool calls by the server's API, or in the text (default: as context and chat template allow)"
    loop.add_argument("--native-tool-calling", action=argparse.BooleanOptionalAction, help=native)


def _add_tasks(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tasks", type=positive, default=32, metavar="TASKS", help="training tasks wanted")
    group.add_argument("--held-out", type=positive, default=16, metavar="TASKS", help="held-out tasks wanted")
    tests = "pytest's arguments (default: the folders of tests that are found); may be repeated"
    group.add_argument("--tests", action="append", default=[], metavar="PATH", help=tests)
    also = "also install this for the tests; may be repeated"
    group.add_argument("--with", dest="requirements", action="append", default=[], metavar="REQ", help=also)
    group.add_argument("--python", metavar="VERSION", help="Python version of the tests (default: the running one)")
    group.add_argument(
        "--test-timeout", type=above_zero, default=60.0, metavar="SECONDS", help="for a run of the tests"
    )
    seed = "seed of the choice of bugs and of the split"
    group.add_argument("--seed", type=int, default=1, metavar="SEED", help=seed)
    text = "folder for Python environments (default: in the user's cache folder)"
    group.add_argument("--cache", type=Path, metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    """Make tasks, print the price, train. Raises ``RLError`` when the repository, the model or the disk is unusable."""
    silence_libraries()
    prepare_threads()
    with from_extra("openhands"):
        from openhands_rl_plugin.apps.loop.run import check_trainable
        from openhands_rl_plugin.evals.runs.run_files import held
    from openhands_rl_plugin.evals.swe.backends import default_cache
    from openhands_rl_plugin.evals.tasks.source import find_source

    source = find_source(str(args.repo), args.commit, args.cache or default_cache())
    directory = (args.run_dir or Path("runs") / f"improve-{source.name}").absolute()
    settings = _settings(args, source, directory)
    check_trainable(settings)
    with held(directory):
        return _improve(args, settings, source, directory)


def _settings(args: argparse.Namespace, source: Source, directory: Path) -> RLSettings:
    """The settings of ``--config`` and ``--set``.

    Without a file everything is in the run's folder, and the adapter has the repository's name.
    """
    own = {
        "max_workers": 4,
        "storage.path": str(directory / "trajectories"),
        "serving.adapter": re.sub(r"[^a-z0-9-]+", "-", source.name.lower()).strip("-") or "policy",
        "serving.adapters_path": str(directory / "adapters"),
        # On a slow machine an answer takes minutes, and asked for again it begins anew.
        "serving.request_timeout": max(args.timeout, ServingSettings().request_timeout),
    }
    # A config may be for other runs, too: nobody has scripted episodes of the user's own repository.
    return settings_of(
        args, *(f"{key}={json.dumps(value)}" for key, value in own.items()), last=["loop.demonstrations=0"]
    )


def _improve(args: argparse.Namespace, settings: RLSettings, source: Source, directory: Path) -> int:
    from openhands_rl_plugin.apps.loop.checks import forget
    from openhands_rl_plugin.contrib.improve.gym import gym_lines
    from openhands_rl_plugin.contrib.improve.price import price_lines, price_of
    from openhands_rl_plugin.core.machine import machine

    if args.fresh:
        forget(directory)  # episodes and adapters stay
        shutil.rmtree(directory / "tasks", ignore_errors=True)
    model, settings, native = _fitted(args, settings)
    gym, loop = _gym(args, source, directory), settings.loop
    sizes = {"held_out": gym.counts[1], "tasks_per_iteration": min(loop.tasks_per_iteration, gym.counts[0])}
    settings = settings.model_copy(update={"loop": loop.model_copy(update=sizes)})
    calls = "by the API" if native else "in the text"
    about = f"model: {model}; prompt: {settings.workspace.prompt}; tool calls {calls}"
    price = price_of(settings, gym, model)
    costs = ["the run costs at most (episodes that end earlier cost less)", *price_lines(price, gym.grading, machine())]
    _print(*gym_lines(gym), about, *costs)
    if args.dry_run:
        return 0
    with served_policy(settings, model, directory) as (served, weights):
        return _train(args, settings, served, weights, native, gym, directory)


def _fitted(args: argparse.Namespace, settings: RLSettings) -> tuple[Path, RLSettings, bool]:
    """The weights, the settings with a prompt and lengths that fit the model's context, and where tool calls are."""
    from openhands_rl_plugin.apps.demo_model import ensure_model
    from openhands_rl_plugin.contrib.improve.price import context_of, fitted, native_calls
    from openhands_rl_plugin.models.engines.client import listed_models

    served, serving = None, settings.serving
    if serving.base_url:
        with served_policy(settings, args.model, Path()) as (there, model):
            cards = listed_models(serving.base_url, serving.api_key(), serving.request_timeout) or ()
            served = next((card.max_model_len for card in cards if card.id == there.serving.model), None)
    else:
        model = given_weights(args.model) if args.model is not None else ensure_model()
    context = context_of(model, served)
    chosen = args.config is not None or not _LENGTHS.isdisjoint(settings.model_fields_set)
    native = native_calls(model, context) if args.native_tool_calling is None else args.native_tool_calling
    return model, fitted(settings, context, chosen=chosen), native


def _gym(args: argparse.Namespace, source: Source, directory: Path) -> Gym:
    """The tasks, made or found. A run keeps the commit that it began with."""
    from openhands_rl_plugin.contrib.improve.gym import WantedTasks, make_gym
    from openhands_rl_plugin.evals.swe.backends import default_cache
    from openhands_rl_plugin.trajectories.view import progress_bar

    given = {name: value for name in _GYM_OPTIONS if (value := getattr(args, name)) is not None}
    names = {"timeout": "--test-timeout", "requirements": "--with"}
    wanted = checked(WantedTasks, {**given, "timeout": args.test_timeout}, names)
    with progress_bar("reading") as bar:
        of, gym = make_gym(source, wanted, directory / "tasks", args.cache or default_cache(), bar)
    newer = f"; {source.commit[:12]} is there by now: --fresh makes tasks of that" if of.commit != source.commit else ""
    _print(f"{of.name}: commit {of.commit[:12]} of {of.git}{newer}")
    return gym


def _train(
    args: argparse.Namespace,
    settings: RLSettings,
    served: RLSettings,
    model: Path,
    native: bool,
    gym: Gym,
    directory: Path,
) -> int:
    """The loop, and what it earned. ``settings``: as they were before the server's address was known."""
    from openhands_rl_plugin.apps.loop.checks import claim, identity_of
    from openhands_rl_plugin.apps.loop.reporting import ProgressListener
    from openhands_rl_plugin.apps.loop.run import loop_job, run_loop
    from openhands_rl_plugin.apps.loop.tasks import TaskSource, loop_tasks
    from openhands_rl_plugin.contrib.improve.gym import use_lines

    folder = directory / "tasks"
    source = TaskSource(suite=str(folder / gym.rows))
    claim(directory, identity_of(settings, source.model_dump(mode="json"), model=model, timeout=args.timeout))
    tasks, seconds = loop_tasks(source, served), max(_GRADING, 2 * args.test_timeout)
    given = {"timeout": args.timeout, "processes": args.processes, "command": args.typed, "test_timeout": seconds}
    backend = backend_of(args, [entry.instance for entry in tasks.entries])
    job = loop_job(served, tasks, model, directory, backend=backend, native_tool_calling=native, **given)
    adapters = settings.serving.adapters_directory.resolve()
    with ProgressListener(settings.loop.stages) as listener:
        result = ENDING.run(run_loop(job, listener))
    used = use_lines(result, model, adapters, server=settings.serving.base_url)
    listener.ended(result.state, result.changes, f"report: {result.report}", *used)
    return 0


def _print(*lines: str) -> None:
    print(sayable("\n".join(lines)), flush=True)
