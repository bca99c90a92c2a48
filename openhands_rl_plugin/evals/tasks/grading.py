"""The back end that tasks of ours are graded with."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.evals.swe.backends.local import LocalBackend
from openhands_rl_plugin.evals.swe.guard.guard import RewardHackGuard
from openhands_rl_plugin.evals.tasks.sources.task_repositories import TaskRepositories


def local_backend(cache: Path) -> LocalBackend:
    """This machine, in sandboxes, and guarded. Repositories are made from what rows say; all is kept in ``cache``."""
    return LocalBackend(cache=cache, sources=(TaskRepositories(cache),), guard=RewardHackGuard())
