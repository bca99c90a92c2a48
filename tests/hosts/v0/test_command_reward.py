"""The reward's command runs once in the workspace that OpenHands' controller left, and its result is evidence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openhands.core.config import OpenHandsConfig
from openhands.core.config.extended_config import ExtendedConfig
from openhands.core.setup import create_agent
from openhands.llm.llm_registry import LLMRegistry
from scripted_model import ScriptedModel, call, says, serve

from openhands_rl_plugin.apps.rl_agent import RLAgent
from openhands_rl_plugin.config.build import make_reward
from openhands_rl_plugin.config.rl import RewardSettings, RLSettings, ServingSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import WorkspaceCommand
from openhands_rl_plugin.core.types import EpisodeRequest, Failure, JsonObject, Task, Trajectory
from openhands_rl_plugin.environments.workspace.sandbox import BubblewrapSandbox, SandboxLimits, SubprocessSandbox
from openhands_rl_plugin.environments.workspace.shell import MOST_OUTPUT, check_workspace
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v0.controller_session import ControllerRunner
from openhands_rl_plugin.rollout.scoring import judge

FINISH = says(None, call("finish", {"message": "done"}))


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedModel]:
    with serve() as model:
        yield model


def options(command: str, **more: object) -> dict[str, Any]:
    return {"name": "command", "options": {"command": command, **more}}


async def play(server: ScriptedModel, model: str, reward: dict[str, Any], *commands: str) -> Trajectory:
    server.script(model, [*(says(None, call("execute_bash", {"command": each})) for each in commands), FINISH])
    serving = ServingSettings(base_url=server.url, model=model, request_timeout=20.0)
    settings = RLSettings.model_validate({"serving": serving.model_dump(), "reward": reward})
    runner = ControllerRunner(settings, HostOptions(environment_mode=False))
    task = Task(id="t", environment="workspace", instruction="Write it.")
    try:
        return await runner.run(EpisodeRequest(task=task, run_id="r", group_id="g"))
    finally:
        await runner.close()


@pytest.mark.shows("rewards by a command")
async def test_the_command_judges_what_the_session_left(server: ScriptedModel) -> None:
    """Neither an alias, a variable nor a file outside of the workspace has a say, and it is no part of the patch."""
    reward = options("touch by-product; grep -c right answer.txt", result="last-line")
    trajectory = await play(
        server, "right", reward, "echo right > answer.txt; grep() { echo 99; }; export -f grep; alias grep='echo 99'"
    )
    evidence = trajectory.evidence
    ran = evidence["command"]
    assert isinstance(ran, dict) and (ran["exit_code"], ran["output"]) == (0, "1\n")
    assert evidence["changed_files"] == {"answer.txt": "added"}
    score = await judge(make_reward(RewardSettings.model_validate(reward)), trajectory)
    assert not isinstance(score, Failure) and score.reward == 1.0
    assert trajectory.known_return is None, "a workspace pays nothing itself"


@pytest.fixture(params=["bubblewrap", "subprocess"])
def checked(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    root = tmp_path / "workspace"
    root.mkdir()
    isolated = request.param == "bubblewrap"
    sandbox = BubblewrapSandbox(root) if isolated else SubprocessSandbox(root, tmp_path / "private")

    def check(command: str, timeout: float = 20.0) -> JsonObject:
        asked = WorkspaceCommand(command=command, timeout=timeout)
        return check_workspace(asked, sandbox, {}, SandboxLimits()).model_dump(mode="json")

    return check


def test_it_is_bounded_in_time_and_output(checked: Any) -> None:
    slow = checked("echo begun; sleep 30", 0.5)
    assert slow["timed_out"] and slow["exit_code"] is None and slow["seconds"] < 10 and "begun" in slow["output"]
    long = checked("seq 1 100000; echo 0.5")
    assert len(long["output"]) < 2 * MOST_OUTPUT and long["output"].endswith("0.5\n")
    assert checked("exit 3")["exit_code"] == 3


def test_where_there_is_no_workspace_the_run_does_not_begin(model: Path) -> None:
    reward = options("pytest -q")
    with pytest.raises(ConfigError, match=r"`pytest -q` judges a workspace .* RLAgent plays environments"):
        RLAgent(str(model), config=RLSettings.model_validate({"reward": reward}))
    config = OpenHandsConfig(
        default_agent="RLAgent",
        runtime="openhands_rl_plugin.hosts.v0.runtime.EnvironmentRuntime",
        extended=ExtendedConfig({"rl": {"reward": reward}}),
    )
    with pytest.raises(ConfigError, match="EnvironmentRuntime' cannot run it: set runtime = "):
        create_agent(config, LLMRegistry(config))


def test_its_options_are_checked_when_the_settings_are_read() -> None:
    with pytest.raises(ConfigError, match=r"\[rl.reward.options\] command: is required"):
        RLSettings.model_validate({"reward": {"name": "command"}})
    with pytest.raises(ConfigError, match=r"\[rl.reward.options\] timout: unknown key; did you mean 'timeout'"):
        RLSettings.model_validate({"reward": options("make check", timout=5)})
