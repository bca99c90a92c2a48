"""The only module that names hosts: their runners in this process, and one task in a folder.

Importing it does not import OpenHands.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import read_document, starting_config, toml_of
from openhands_rl_plugin.config.work import NO_KEY, OwnWork, WorkOptions, work_of
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import scratch_folder
from openhands_rl_plugin.core.machine import without_collection
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import EpisodeRequest, Score, Trajectory
from openhands_rl_plugin.environments.workspace.copies import ForkLimits, copy_tree
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.options import RL_AGENT, HostOptions
from openhands_rl_plugin.hosts.shared.session_runner import EnvironmentSessions
from openhands_rl_plugin.rollout.journal import EpisodeSink

_WORKSPACE_RUNTIME = "openhands_rl_plugin.hosts.v0.runtime.WorkspaceRuntime"
_INTERRUPTED = 130
_MAIN = "import runpy, openhands_rl_plugin.hosts.shared.litellm_calls\n"
_MAIN += "runpy.run_module('openhands.core.main', run_name='__main__', alter_sys=True)"

# No price list from the network, no banner; read when OpenHands is imported.
_QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}


class HostRunner(Protocol):
    """An ``EpisodeRunner`` over OpenHands, which can also be given the workspace of an episode."""

    async def run(self, request: EpisodeRequest, workspace: TaskWorkspace | None = None) -> Trajectory:
        """Run one episode. A failed one is returned with ``failure`` set; errors that must stop a run are raised."""
        ...

    async def close(self) -> None:
        """Release sessions, threads and workers."""
        ...


def local_runner(
    settings: RLSettings, options: HostOptions | None = None, *, storage: EpisodeSink | None = None
) -> HostRunner:
    """A runner whose sessions run in this process, of the host that ``[rl] host`` says.

    OpenHands has no part in episodes of an environment. Raises ``ConfigError`` for settings that the host cannot use.
    """
    options = options or HostOptions()
    if settings.workspace.is_compact and not options.environment_mode and options.agent != RL_AGENT:
        raise ConfigError(
            f"[rl.workspace] prompt: \"compact\" is RLAgent's, and {options.agent} has OpenHands' own instructions; "
            "choose RLAgent (evaluate: --agent RLAgent), or remove the line"
        )
    if options.environment_mode:
        return EnvironmentSessions(settings, options, storage=storage)
    os.environ.update({**_QUIET, **os.environ})
    with without_collection():
        if host_of(settings) == "v0":
            from openhands_rl_plugin.hosts.v0.controller_session import ControllerRunner as Runner
        else:
            from openhands_rl_plugin.hosts.v1.runs import ConversationRunner as Runner
    return Runner(settings, options, storage=storage)


def run_task(
    task: str, workspace: Path, options: WorkOptions, show: Callable[[str], None], *, attempts: int = 1
) -> int:
    """Roll out one task in a folder, and print what was recorded. ``show`` prints a line.

    Several attempts are a group: each has a copy of the folder, ``FOLDER-attempt-1`` and so on beside it. Returns 0,
    1 where an attempt failed or was not recorded, 130 after Ctrl-C. Raises ``RLError`` before the host starts for
    settings that cannot be used, a model server that is away or does not serve the model, and a strategy that cannot
    search here.
    """
    work = work_of(options)
    host = host_of(work.settings)
    os.environ.update({**_QUIET, **({"LOG_LEVEL": "WARNING"} if host == "v1" else {}), **os.environ})
    from openhands_rl_plugin.hosts.shared.run_checks import check_model, check_workspace_strategy
    from openhands_rl_plugin.hosts.shared.sessions import RUN_VARIABLE, OwnRun, group_summary, run_summary

    check_model(work.settings, work.llm)
    check_workspace_strategy(work.settings)
    workspace = workspace.resolve()
    folders = [workspace] if attempts == 1 else _copies(workspace, work.settings, attempts)
    run, codes = OwnRun(run_id=f"run-{uuid.uuid4().hex}", workspace=str(workspace)), list[int]()
    for sample, folder in enumerate(folders):
        if attempts > 1:
            show(f"attempt {sample + 1} of {attempts}, in {folder}")
        os.environ[RUN_VARIABLE] = run.model_copy(update={"sample": sample}).model_dump_json()
        if host == "v0":
            codes.append(_run_main(task, folder, work))
        else:
            from openhands_rl_plugin.hosts.v1.runs import run_task as run_in_sdk

            codes.append(run_in_sdk(task, folder, work, show))
        if codes[-1] == _INTERRUPTED:
            break
    os.environ.pop(RUN_VARIABLE, None)
    recorded = background().wait_for(_recorded(work.settings, run.run_id))
    for trajectory, scores in recorded if host == "v1" else ():
        show(run_summary(trajectory, scores, work.settings))
    if attempts > 1:
        show(group_summary(recorded, work.settings))
    if _INTERRUPTED in codes:
        return _INTERRUPTED
    if (lost := len(recorded) < attempts) and not any(codes):
        show("not recorded: the log of the host says why")
    return int(lost or any(codes) or any(trajectory.failure is not None for trajectory, _ in recorded))


def _copies(workspace: Path, settings: RLSettings, attempts: int) -> list[Path]:
    """A new copy of the folder for each attempt, without a store that lies in it."""
    free = (workspace.with_name(f"{workspace.name}-attempt-{number}") for number in itertools.count(1))
    made = list(itertools.islice((folder for folder in free if not folder.exists()), attempts))
    store = settings.storage.directory.resolve() if settings.storage_backend == "file" else workspace
    own = frozenset({store.relative_to(workspace).parts[0]}) if workspace in store.parents else frozenset[str]()
    limits = ForkLimits(size=sys.maxsize, files=sys.maxsize, seconds=600.0)
    for folder in made:
        copy_tree(workspace, folder, limits=limits, leave_out=own)
    return made


async def _recorded(settings: RLSettings, group: str) -> list[tuple[Trajectory, tuple[Score, ...]]]:
    storage = open_storage(settings)
    try:
        return [each async for each in storage.find(TrajectoryFilter(group_id=group, finished=None))]
    finally:
        await storage.close()


def _run_main(task: str, workspace: Path, work: OwnWork) -> int:
    """``python -m openhands.core.main``, in a process of its own, without the working folder on the path."""
    # OpenHands takes the value of such a variable out of all that it logs: the word for no key is none.
    given = {name: str(work.llm.get(name) or NO_KEY) for name in ("model", "base_url", "api_key")}
    environ = {f"LLM_{name.upper()}": value for name, value in given.items() if value != NO_KEY}
    with scratch_folder("run") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(toml_of(_main_document(work, workspace)), encoding="utf-8")
        command = [sys.executable, "-P", "-c", _MAIN, "--config-file", str(file), "-c", "RLAgent", "-t", task]
        process = subprocess.Popen(command, env={**os.environ, **environ})
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal sent it to both, and that one stores what it has.
            process.wait()
            return _INTERRUPTED


def _main_document(work: OwnWork, workspace: Path) -> dict[str, Any]:
    """The file of ``work``, or a new one, with its ``[rl]`` in one place, and no key."""
    example = starting_config(model="", base_url="", workspace=str(workspace))
    document: Any = read_document(work.file) if work.file else tomllib.loads(example)
    document.get("extended", {}).pop("rl", None)
    document.get("agent", {}).get("RLAgent", {}).pop("rl", None)
    llm = {**document.get("llm", {}), "api_key": NO_KEY if work.llm.get("api_key") == NO_KEY else None}
    core = {"runtime": _WORKSPACE_RUNTIME, **document.get("core", {}), "workspace_base": str(workspace)}
    return {**document, "core": core, "llm": llm, "rl": work.rl}
