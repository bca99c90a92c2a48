"""What a loop is started with, whichever command starts it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.foreground import typed
from openhands_rl_plugin.config.rl import RLSettings

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.loop.run import LoopJob
    from openhands_rl_plugin.apps.loop.tasks import LoopTasks


def loop_job(args: argparse.Namespace, settings: RLSettings, model: Path, tasks: LoopTasks, directory: Path) -> LoopJob:
    """The job with the options that all such commands have: ``--timeout`` and ``--processes``."""
    from openhands_rl_plugin.apps.loop.claim import run_id_of
    from openhands_rl_plugin.apps.loop.run import LoopJob
    from openhands_rl_plugin.evals.runs.evaluate import process_count

    return LoopJob(
        settings=settings,
        tasks=tasks,
        model=model,
        directory=directory,
        run_id=run_id_of(directory),
        limits=settings.limits().model_copy(update={"timeout": args.timeout}),
        processes=process_count(settings.max_workers) if args.processes is None else args.processes,
        command=typed(args),
    )
