"""What a loop is started with, whichever command starts it."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.foreground import typed
from openhands_rl_plugin.cli.options.suites import open_backend
from openhands_rl_plugin.config.rl import RLSettings

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.loop.run import LoopJob
    from openhands_rl_plugin.apps.loop.tasks import LoopTasks


def loop_job(
    args: argparse.Namespace, settings: RLSettings, model: Path, tasks: LoopTasks, directory: Path, kind: str = "loop"
) -> LoopJob:
    """The job with the options that all such commands have: ``--timeout`` and ``--processes``; ``kind``: of its id."""
    from openhands_rl_plugin.apps.loop.checks import run_id_of
    from openhands_rl_plugin.apps.loop.run import LoopJob
    from openhands_rl_plugin.evals.runs.evaluate import process_count

    return LoopJob(
        settings=settings,
        tasks=tasks,
        model=model,
        directory=directory,
        run_id=run_id_of(directory, kind),
        limits=settings.limits().model_copy(update={"timeout": args.timeout}),
        processes=process_count(settings.max_workers) if args.processes is None else args.processes,
        command=typed(args),
    )


def add_native(group: argparse._ActionsContainer) -> None:
    """Where tool calls are."""
    native = "tool calls by the server's API (default); --no-...: calls in the text"
    group.add_argument("--native-tool-calling", action=argparse.BooleanOptionalAction, default=True, help=native)


def graded_job(args: argparse.Namespace, job: LoopJob) -> LoopJob:
    """The job with the options of ``add_bounds`` and ``add_native``."""
    return replace(
        job,
        graders=args.graders or os.cpu_count() or 1,
        test_timeout=args.test_timeout,
        command_timeout=args.command_timeout,
        native_tool_calling=args.native_tool_calling,
    )


@asynccontextmanager
async def with_backend(args: argparse.Namespace, job: LoopJob) -> AsyncIterator[LoopJob]:
    """The job with the back end of its repository tasks, if it has any, until the block ends."""
    if not job.tasks.suite.software:
        yield job
        return
    instances = [entry.instance for entry in job.tasks.entries if entry.instance is not None]
    async with open_backend(args, instances) as backend:
        yield replace(job, backend=backend)
