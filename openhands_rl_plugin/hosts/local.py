"""The only module that names hosts: their runners in this process, and one task in a folder.

Importing it does not import OpenHands.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.toml import read_document, starting_config, toml_of
from openhands_rl_plugin.config.work import OwnWork, WorkOptions, work_of
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.options import HostOptions, check_isolation, check_prompt
from openhands_rl_plugin.hosts.shared.session_runner import EnvironmentSessions
from openhands_rl_plugin.rollout.journal import EpisodeSink

_WORKSPACE_RUNTIME = "openhands_rl_plugin.hosts.v0.runtime.WorkspaceRuntime"
_INTERRUPTED = 130

_QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}
"""No price list from the network, no banner; read when OpenHands is imported."""


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

    OpenHands V1 has no part in episodes of an environment: there are no tools in them. Raises ``ConfigError`` for
    settings that the host cannot use.
    """
    options = options or HostOptions()
    check_isolation(settings, options)
    check_prompt(settings, options)
    if host_of(settings) == "v0":
        from openhands_rl_plugin.hosts.v0.driver import ControllerRunner

        return ControllerRunner(settings, options, storage=storage)
    if options.environment_mode:
        return EnvironmentSessions(settings, options, storage=storage)
    from openhands_rl_plugin.hosts.v1.driver import ConversationRunner

    return ConversationRunner(settings, options, storage=storage)


def run_task(task: str, workspace: Path, options: WorkOptions, show: Callable[[str], None]) -> int:
    """Play one task in a folder and say what was recorded; the exit code. ``show`` prints a line.

    Raises ``ConfigError`` for settings that cannot be used and a folder that cannot be made.
    """
    work = work_of(options)
    host = host_of(work.settings)
    try:
        workspace.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workspace: {workspace} cannot be made: {error.strerror}") from error
    if host == "v0":
        return _run_main(task, workspace.resolve(), work)
    for name, value in {**_QUIET, "LOG_LEVEL": "WARNING"}.items():
        os.environ.setdefault(name, value)
    from openhands_rl_plugin.hosts.v1.task import run_task as run_in_sdk

    return run_in_sdk(task, workspace.resolve(), work, show)


def _run_main(task: str, workspace: Path, work: OwnWork) -> int:
    """``python -m openhands.core.main``, in a process of its own."""
    environ = {**_QUIET, **os.environ, "LLM_MODEL": str(work.llm["model"])}
    for name, variable in (("base_url", "LLM_BASE_URL"), ("api_key", "LLM_API_KEY")):
        if work.llm.get(name):
            environ[variable] = str(work.llm[name])
    with tempfile.TemporaryDirectory(prefix="openhands-rl-") as folder:
        file = Path(folder) / "config.toml"
        file.write_text(toml_of(_main_document(work, workspace)), encoding="utf-8")
        command = [sys.executable, "-m", "openhands.core.main", "--config-file", str(file), "-c", "RLAgent", "-t", task]
        process = subprocess.Popen(command, env=environ)
        try:
            return process.wait()
        except KeyboardInterrupt:
            # The terminal sent it to both, and that one stores what it has.
            process.wait()
            return _INTERRUPTED


def _main_document(work: OwnWork, workspace: Path) -> dict[str, object]:
    """The file of ``work``, or a new one, with its ``[rl]`` in one place, and no key."""
    if work.file is not None:
        document = dict(read_document(work.file))
    else:
        document = tomllib.loads(starting_config(model="", base_url="", workspace=str(workspace)))
    core, llm = _table(document, "core"), _table(document, "llm")
    agents, extended = _table(document, "agent"), _table(document, "extended")
    extended.pop("rl", None)
    if own := _table(agents, "RLAgent"):
        own.pop("rl", None)
        agents["RLAgent"] = own
    llm.pop("api_key", None)
    core.setdefault("runtime", _WORKSPACE_RUNTIME)
    core["workspace_base"] = str(workspace)
    return {**document, "core": core, "llm": llm, "agent": agents, "extended": extended, "rl": work.rl}


def _table(document: Mapping[str, object], name: str) -> dict[str, object]:
    found = document.get(name)
    return dict(found) if isinstance(found, Mapping) else {}
