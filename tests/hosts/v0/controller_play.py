"""Episodes of OpenHands' real controller over a scripted model server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scripted_model import ScriptedModel, call, reply

from openhands_rl_plugin import FileTrajectoryStorage
from openhands_rl_plugin.config.rl import RLSettings, ServingSettings
from openhands_rl_plugin.core.types import EpisodeRequest, Limits, Task, Trajectory
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v0.controller_session import ControllerRunner

FINISH = reply(None, call("finish", {"message": "done"}))


def bash(command: str, id: str = "call-1") -> dict[str, Any]:
    return reply(None, call("execute_bash", {"command": command}, id))


def settings_for(server: ScriptedModel, model: str, **settings: Any) -> RLSettings:
    serving = ServingSettings(base_url=server.url, model=model, request_timeout=20.0)
    return RLSettings.model_validate({"serving": serving.model_dump(), **settings})


async def play(
    server: ScriptedModel,
    model: str,
    *,
    limits: Limits | None = None,
    options: dict[str, Any] | None = None,
    storage: FileTrajectoryStorage | None = None,
    place: TaskWorkspace | None = None,
    request: dict[str, Any] | None = None,
    **settings: Any,
) -> Trajectory:
    """One episode in a workspace. ``options`` are of ``HostOptions``, ``settings`` of ``[rl]``."""
    given = HostOptions(**{"environment_mode": False, **(options or {})})
    runner = ControllerRunner(settings_for(server, model, **settings), given, storage=storage)
    task = Task(id="t", environment="workspace", instruction="Write it.", limits=limits)
    asked = EpisodeRequest(task=task, **{"run_id": "r", "group_id": "g", "seed": 11, **(request or {})})
    try:
        return await runner.run(asked, place)
    finally:
        await runner.close()


async def stored(folder: Path) -> list[Trajectory]:
    """The finished episodes of a store, oldest first."""
    async with FileTrajectoryStorage(folder) as storage:
        return sorted([each async for each, _ in storage.find()], key=lambda each: each.times.started)
