"""The two demos as runs of ``openhands-rl loop``: a shop, and functions with a bug."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from openhands_rl_plugin.apps.demo_model import NAME, ensure_model
from openhands_rl_plugin.apps.loop.checks import claim
from openhands_rl_plugin.apps.loop.run import LoopJob, LoopResult, run_loop
from openhands_rl_plugin.apps.loop.tasks import LoopTasks, TaskSource, loop_tasks
from openhands_rl_plugin.cli.jobs import free_port, running_command
from openhands_rl_plugin.cli.terminal import ENDING
from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.demo.options import (
    CONTEXT_TOKENS,
    OTHER_SIZES,
    REPAIR_CONTEXT,
    DemoOptions,
    RepairOptions,
)
from openhands_rl_plugin.contrib.repair.rows import REPAIR
from openhands_rl_plugin.contrib.repair.suites import RepairBackend
from openhands_rl_plugin.training.loop.loop import LoopListener

CACHE_BYTES = 128 * 1024**2
PREFILL_TOKENS = 1024
"""Prompt tokens a step: nobody waits for a first token here, and a prompt costs a tenth less than with 256 a step."""
REPAIR_CACHE_BYTES = {1: 256 * 1024**2, 2: 512 * 1024**2, 3: 512 * 1024**2}
"""By level. 23 kB a token: twelve episodes of 900 tokens, or 1,900, with what begins alike counted once."""


def shop_tasks(options: DemoOptions) -> LoopTasks:
    """The goals of the shop for a run: disjoint demonstrations, training tasks and held-out tasks."""
    return loop_tasks(TaskSource(suite="webshop"), options.settings())


def run_demo(options: DemoOptions, listener: LoopListener | None = None, command: str = "") -> LoopResult:
    """Run the demo, or resume the one in ``options.run_directory``. ``command``: for its report.

    Raises ``ConfigError`` when the directory holds a run with other options, and any ``RLError`` of the parts.
    """
    places = {"run_directory": True, "model_directory": True}
    claim(options.run_directory, options.model_dump(mode="json", exclude={**places, "loop": OTHER_SIZES}))
    model, settings = ensure_model(options.model_directory), options.settings()
    shop = ["env", "webshop", "--results-per-page", str(options.results_per_page), "--separator", "newline"]
    sizes = {"max-batch": options.concurrency, "max-model-len": CONTEXT_TOKENS, "cache-bytes": CACHE_BYTES}
    with (
        running_command(shop, free_port(), options.run_directory / "logs" / "webshop.log") as url,
        _served(settings, options.run_directory, model, {**sizes, "prefill-tokens": PREFILL_TOKENS}) as served,
    ):
        job = LoopJob(
            settings=served.model_copy(update={"env_server_base": url}),
            tasks=shop_tasks(options),
            model=model,
            directory=options.run_directory,
            run_id=f"demo-{options.seed}",
            limits=settings.limits(),
            processes=1,
            warm_start=options.warm_start(),
            command=command,
            title="A small model learns to shop",
        )
        return ENDING.run(run_loop(job, listener))


@contextlib.contextmanager
def _served(settings: RLSettings, directory: Path, model: Path, sizes: dict[str, int]) -> Iterator[RLSettings]:
    """The settings with the address of a server of the model, which runs until the block ends."""
    words = ["serve", "--model", str(model), "--served-model-name", NAME, "--preload=false"]
    words += [f"--adapters={directory / 'adapters'}", *(f"--{name}={size}" for name, size in sizes.items())]
    with running_command(words, free_port(), directory / "logs" / "serve.log") as url:
        yield settings.model_copy(update={"serving": settings.serving.model_copy(update={"base_url": f"{url}/v1"})})


def repair_tasks(options: RepairOptions) -> LoopTasks:
    """The tasks of the suite for a run; held out are functions of packages that it does not train on."""
    return loop_tasks(TaskSource(suite=f"{REPAIR}-{options.level}"), options.settings())


def run_repair_demo(options: RepairOptions, listener: LoopListener, command: str) -> LoopResult:
    """Run the demo, or resume the one in ``options.run_directory``. ``command``: for its report.

    It runs in V0 where that is installed, else in V1. Raises ``ConfigError`` when the directory holds a run with
    other options or of the other host, and any ``RLError`` of the parts.
    """
    settings = options.settings()
    places = {"run_directory": True, "model_directory": True, "processes": True}
    # A policy learns the names of one host's tools.
    host = {"host": host_of(settings)}
    known = {**options.model_dump(mode="json", exclude={**places, "loop": OTHER_SIZES}), **host}
    claim(options.run_directory, known)
    ENDING.run(RepairBackend().check())
    model = ensure_model(options.model_directory)
    sizes = {
        "max-batch": options.concurrency * (2 if options.level == 1 else 1),
        "max-model-len": REPAIR_CONTEXT[options.level],
        "cache-bytes": REPAIR_CACHE_BYTES[options.level],
    }
    with _served(settings, options.run_directory, model, sizes) as served:
        job = LoopJob(
            settings=served,
            tasks=repair_tasks(options),
            model=model,
            directory=options.run_directory,
            run_id=f"repair-{options.seed}",
            limits=settings.limits(),
            backend=RepairBackend(),
            processes=options.processes,
            graders=2,
            native_tool_calling=False,
            command=command,
            title="A small model is trained to repair code",
        )
        return ENDING.run(run_loop(job, listener))
