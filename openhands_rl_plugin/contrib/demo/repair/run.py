"""The demo on code: a small pretrained model is trained to repair functions, in OpenHands' sandbox."""

from __future__ import annotations

import asyncio

from openhands_rl_plugin.apps.demo_model import NAME, ensure_model
from openhands_rl_plugin.apps.loop.claim import OPTIONS, claim
from openhands_rl_plugin.apps.loop.run import LoopJob, run_loop
from openhands_rl_plugin.apps.loop.tasks import LoopTasks, TaskSource, loop_tasks
from openhands_rl_plugin.cli.options.running import free_port, running_command
from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.contrib.demo.options import OTHER_SIZES
from openhands_rl_plugin.contrib.demo.repair.options import CONTEXT_TOKENS, RepairOptions
from openhands_rl_plugin.contrib.demo.repair.own_functions import beside_own, own_functions
from openhands_rl_plugin.contrib.demo.story import DemoResult
from openhands_rl_plugin.contrib.repair.backend import RepairBackend
from openhands_rl_plugin.contrib.repair.rows import REPAIR
from openhands_rl_plugin.training.loop.stages import LoopListener

TITLE = "A small model is trained to repair code"
DRAFT_TOKENS = 8  # most of an answer is the form of a call
CACHE_BYTES = {1: 256 * 1024**2, 2: 512 * 1024**2, 3: 512 * 1024**2}
"""By level. 23 kB a token: twelve episodes of 900 tokens, or 1,900, with what begins alike counted once."""


def repair_tasks(options: RepairOptions) -> LoopTasks:
    """The tasks of the suite for a run; held out are functions of packages that it does not train on."""
    return loop_tasks(TaskSource(suite=f"{REPAIR}-{options.level}"), options.settings())


def run_repair_demo(options: RepairOptions, listener: LoopListener | None = None, command: str = "") -> DemoResult:
    """Run the demo, or resume the one in ``options.run_directory``. ``command``: for its report.

    It is played in V0 where that is installed, else in V1. Raises ``ConfigError`` when the directory holds a run with
    other options or of the other host, and any ``RLError`` of the parts.
    """
    listener = listener or LoopListener()
    settings = options.settings()
    places = {"run_directory": True, "model_directory": True, "processes": True}
    # Runs of the suite never named a repository.
    none = {} if options.repository else {"repository": True, "tests": True, "requirements": True}
    known = options.model_dump(mode="json", exclude={**places, **none, "loop": OTHER_SIZES})
    # A policy learns the names of one host's tools. Runs of V0 never named it.
    host = host_of(settings)
    known = known if host == "v0" else {**known, "host": host}
    begun = (options.run_directory / OPTIONS).exists()
    if begun:
        claim(options.run_directory, known)
    asyncio.run(RepairBackend().check())
    tasks, title = repair_tasks(options), TITLE
    if options.repository is not None:
        own = own_functions(options, listener, anew=not begun)
        tasks, title = beside_own(tasks, own, options), f"{TITLE} of {own.name}"
    # Not before: whoever is told what the tests of a repository lack may say it (--with) in the same folder.
    claim(options.run_directory, known)
    model = ensure_model(options.model_directory)
    words = ["serve", "--model", str(model), "--served-model-name", NAME]
    answers = options.concurrency * (2 if options.level == 1 else 1)
    words += [f"--max-batch={answers}", f"--max-model-len={CONTEXT_TOKENS[options.level]}"]
    words += [f"--cache-bytes={CACHE_BYTES[options.level]}", f"--draft-tokens={DRAFT_TOKENS}"]
    with running_command(words, free_port(), options.run_directory / "logs" / "serve.log") as url:
        serving = settings.serving.model_copy(update={"base_url": f"{url}/v1"})
        job = LoopJob(
            settings=settings.model_copy(update={"serving": serving}),
            tasks=tasks,
            model=model,
            directory=options.run_directory,
            run_id=f"repair-{options.seed}",
            limits=settings.limits(),
            backend=RepairBackend(),
            processes=options.processes,
            graders=2,
            native_tool_calling=False,
            command=command,
            title=title,
        )
        result = asyncio.run(run_loop(job, listener))
    compared = tuple(change.sentence() for change in result.changes)
    return DemoResult(state=result.state, comparisons=compared, report=result.report)
