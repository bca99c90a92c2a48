"""A session of ``openhands.core.main`` that goes on under its name, in one process after the other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from openhands.core.config import OpenHandsConfig
from openhands.core.config.extended_config import ExtendedConfig
from openhands.core.main import run_controller
from openhands.events.action import MessageAction
from scripted_model import call, says, serve

from openhands_rl_plugin import FileTrajectoryStorage, RLSettings, Trajectory
from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.core.types import StopReason
from openhands_rl_plugin.hosts.shared.sessions import HostOptions
from openhands_rl_plugin.hosts.v0.controller_session import controller_config


def config_for(url: str, folder: Path, rl: dict) -> OpenHandsConfig:
    settings = RLSettings(serving=ServingSettings(base_url=url, model="resumed"))
    config = controller_config(settings, HostOptions(environment_mode=False))
    config.file_store, config.file_store_path = "local", str(folder / "sessions")
    rl = {**rl, "workspace": {"isolation": "none"}}
    config.extended = ExtendedConfig({"rl": {**rl, "storage": {"path": str(folder / "store")}}})
    return config


def say(config: OpenHandsConfig, text: str) -> None:
    said = MessageAction(content=text)
    asyncio.run(
        run_controller(
            config=config, initial_user_action=said, sid="one-session", fake_user_response_fn=lambda state: "/exit"
        )
    )


async def stored(folder: Path) -> list[Trajectory]:
    async with FileTrajectoryStorage(folder) as storage:
        return sorted([each async for each, _ in storage.find()], key=lambda each: each.times.started)


@pytest.mark.shows("resumed conversations")
def test_a_named_session_goes_on_in_a_new_episode_with_what_was_said_before(tmp_path: Path) -> None:
    with serve() as server:
        server.script("resumed", [says("Which one?"), says(None, call("finish", {"message": "Done."}))])
        say(config_for(server.url, tmp_path, {}), "Do it.")
        say(config_for(server.url, tmp_path, {"rollout_strategy": "BestOfN", "strategy": {"n": 1}}), "That one.")
    one, two = asyncio.run(stored(tmp_path / "store"))
    assert [one.stop, two.stop] == [StopReason.NO_ACTION, StopReason.TERMINATED]
    assert one.group_id == two.group_id and two.strategy.name == "BestOfN"
    said = [(message.role, message.content or "") for message in two.messages()]
    assert ("assistant", "Which one?") in said and any(role == "user" and "That one." in text for role, text in said)
    assert [node.sampled for node in two.nodes] == [False] * (len(two.nodes) - 1) + [True]
