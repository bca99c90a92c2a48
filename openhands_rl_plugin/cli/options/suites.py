"""Options of the commands that play or grade a suite of tasks: ``evaluate``, ``loop`` and ``grade``."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.numbers import above_zero, natural, positive

if TYPE_CHECKING:
    from openhands_rl_plugin.evals.swe.types import Instance, InstanceBackend


def add_tasks(group: argparse._ActionsContainer) -> None:
    """Which tasks of the suite."""
    group.add_argument("--dataset-file", type=Path, metavar="FILE", help="the suite's rows: .jsonl, .json or .parquet")
    group.add_argument("--tasks", type=positive, metavar="TASKS", help="tasks of an environment, from task 0 on")
    group.add_argument("--include", nargs="+", default=[], metavar="ID", help="only these ids or patterns ('psf__*')")
    group.add_argument("--exclude", nargs="+", default=[], metavar="ID", help="all but these ids or patterns")
    group.add_argument("--limit", type=positive, metavar="TASKS", help="use at most so many tasks")


def add_bounds(group: argparse._ActionsContainer) -> None:
    """Processes and times."""
    played = "processes that play the episodes (0: this one only)"
    group.add_argument("--processes", type=natural, metavar="PROCESSES", help=played)
    group.add_argument(
        "--graders", type=positive, metavar="PATCHES", help="patches tested at a time (default: each CPU)"
    )
    for option, kind, seconds, what in (
        ("--timeout", above_zero, 7200.0, "an episode"),
        ("--test-timeout", above_zero, 1800.0, "a patch's tests"),
        ("--command-timeout", positive, 300, "one command of the agent"),
    ):
        text = f"seconds for {what}"
        group.add_argument(option, type=kind, default=seconds, metavar="SECONDS", help=text)


def add_repositories(group: argparse._ActionsContainer) -> None:
    """Where repository tasks run."""
    where = "local: bubblewrap sandboxes; docker: the tasks' images, by docker or podman; image: by skopeo and umoci"
    group.add_argument("--backend", choices=["local", "docker", "image"], default="local", help=where)
    images = "image: what skopeo reads before an image's name, as oci:DIR: or docker-archive:FILE:"
    group.add_argument("--images", default="docker://", metavar="SOURCE", help=images)
    mirror = "folder of git repositories as owner/name.git (default: clone from the network)"
    group.add_argument("--mirror", type=Path, metavar="DIR", help=mirror)
    group.add_argument("--cache", type=Path, metavar="DIR", help="folder for Python environments and unpacked images")


@asynccontextmanager
async def open_backend(
    args: argparse.Namespace, instances: Iterable[Instance], *, network: bool = False
) -> AsyncIterator[InstanceBackend]:
    """The back end that ``add_repositories`` chose, for these instances, until the block ends; ``network``: tests may
    use it.
    """
    from openhands_rl_plugin.evals.runs.backends import make_backend

    backend = make_backend(
        args.backend, mirror=args.mirror, cache=args.cache, network=network, instances=instances, images=args.images
    )
    try:
        yield backend
    finally:
        await backend.close()
