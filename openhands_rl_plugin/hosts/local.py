"""The only module that names hosts: their runners in this process, and one task in a folder.

Importing it does not import OpenHands.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Protocol

from openhands_rl_plugin.config.host import host_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.config.work import OwnWork
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.machine import without_collection
from openhands_rl_plugin.core.types import EpisodeRequest, Trajectory
from openhands_rl_plugin.environments.workspace.copies import ForkLimits, copy_tree
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.session_runner import (
    RL_AGENT,
    EnvironmentSessions,
    HostOptions,
    check_engine_setting,
)
from openhands_rl_plugin.rollout.journal import EpisodeSink

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


def task_attempts(
    task: str, workspace: Path, work: OwnWork, run_id: str, count: int
) -> tuple[RLSettings, list[tuple[EpisodeRequest, HostOptions]]]:
    """The attempts at one task in a folder, for ``local_runner`` with these settings, which name the model.

    Several are a group: each has a copy of the folder, ``FOLDER-attempt-1`` and so on beside it. Raises ``RLError`` for
    settings that cannot be used, a model server that is away or does not serve the model, and a strategy that cannot
    search here.
    """
    os.environ.update({"LOG_LEVEL": "WARNING", **_QUIET, **os.environ})
    from openhands_rl_plugin.hosts.shared import litellm_calls, sessions

    named = work.settings.serving.model or litellm_calls.split_provider(str(work.llm["model"]))[1]
    serving = work.settings.serving.model_copy(update={"model": named})
    settings, workspace = work.settings.model_copy(update={"serving": serving}), workspace.resolve()
    if host_of(settings) == "v0":
        check_engine_setting(settings)
    server = litellm_calls.check_model(settings, work.llm)
    litellm_calls.check_workspace_strategy(settings)
    served = litellm_calls.adapter_in_use(serving, *server) if server is not None else None
    asked, attempts = sessions.workspace_task(task, str(workspace)), list[tuple[EpisodeRequest, HostOptions]]()
    for sample, folder in enumerate([workspace] if count == 1 else _copies(workspace, settings, count)):
        request = sessions.own_request(settings, asked, run_id, run_id, sample=sample, served_model=served)
        attempts.append((request, HostOptions(environment_mode=False, llm=work.llm, folder=folder)))
    return settings, attempts


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
