"""The gate of tasks in Harbor's format: the oracle's solution must pass, and an untouched container must not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from openhands_rl_plugin.core.errors import EpisodeError, RLError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.environments.workspace.copies import remove_tree
from openhands_rl_plugin.evals.harbor.container import HarborContainer
from openhands_rl_plugin.evals.harbor.tasks import HarborTask, read_task
from openhands_rl_plugin.evals.harbor.verification import solve, verify


class HarborCheck(Frozen):
    """``oracle`` and ``untouched`` are rewards, ``None`` where there is none. ``problems``: why it is no good task.
    ``left_out``: it was not run, because it needs what is not here."""

    name: str
    folder: Path
    oracle: float | None = None
    untouched: float | None = None
    problems: tuple[str, ...] = ()
    left_out: bool = False


def read_all(folders: Sequence[Path]) -> list[HarborTask | HarborCheck]:
    """The tasks; a folder that cannot be read is a check with its problem."""
    found: list[HarborTask | HarborCheck] = []
    for folder in folders:
        try:
            found.append(read_task(folder))
        except RLError as error:
            found.append(HarborCheck(name=folder.name, folder=folder, problems=(str(error),)))
    return found


def check_folders(
    folders: Sequence[Path],
    *,
    cache: Path | None = None,
    network: bool = False,
    force: bool = False,
    pass_env: Collection[str] = (),
    on_progress: Callable[[int, int, str], None] | None = None,
) -> list[HarborCheck]:
    """Run the oracle and nothing at all in a fresh container each. Blocks.

    Raises ``ConfigError`` without bubblewrap.
    """
    checks = []
    for task in read_all(folders):
        if isinstance(task, HarborTask):
            task = _checked(task, cache, network, pass_env) if force or not task.missing else _left_out(task)
        checks.append(task)
        if on_progress is not None:
            on_progress(len(checks), len(folders), task.name)
    return checks


def _left_out(task: HarborTask) -> HarborCheck:
    return HarborCheck(name=task.name, folder=task.folder, problems=task.missing, left_out=True)


def _checked(task: HarborTask, cache: Path | None, network: bool, pass_env: Collection[str]) -> HarborCheck:
    problems: list[str] = []
    oracle = untouched = None
    try:
        untouched = _reward(task, cache, network, pass_env, solved=False)
    except EpisodeError as error:
        problems.append(f"untouched: {error}")
    if task.solution is None:
        problems.append("it has no solution/solve.sh")
    else:
        try:
            oracle = _reward(task, cache, network, pass_env, solved=True)
        except EpisodeError as error:
            problems.append(f"oracle: {error}")
    if oracle is not None and oracle < 1:
        problems.append(f"the oracle's solution earns {oracle:g}")
    if untouched is not None and untouched >= 1:
        problems.append(f"an untouched container earns {untouched:g}")
    return HarborCheck(name=task.name, folder=task.folder, oracle=oracle, untouched=untouched, problems=tuple(problems))


def _reward(task: HarborTask, cache: Path | None, network: bool, pass_env: Collection[str], *, solved: bool) -> float:
    place = Path(tempfile.mkdtemp(prefix="rl-harbor-"))
    container = HarborContainer(task, place, network=network, cache=cache, pass_env=pass_env)
    try:
        container.build()
        if solved:
            solve(container)
        return verify(container)[0]
    finally:
        container.close()
        remove_tree(place)
