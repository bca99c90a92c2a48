"""Which ``[rl]`` an OpenHands process uses, and the warning about it that is not given."""

from __future__ import annotations

import logging

import pytest
from openhands.core.config import AgentConfig, OpenHandsConfig
from openhands.core.config.extended_config import ExtendedConfig
from openhands.core.config.utils import load_openhands_config
from openhands.core.logger import openhands_logger

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.hosts.v0.agent import RLAgent, RLAgentHostConfig
from openhands_rl_plugin.hosts.v0.runtime import host_settings


def config_with(extended: dict) -> OpenHandsConfig:
    return OpenHandsConfig(extended=ExtendedConfig({"rl": extended}))


def test_without_a_file_openhands_own_objects_are_read():
    own = RLAgentHostConfig(rl={"max_turns": 3, "storage": {"path": "/own"}})
    settings = host_settings(own, config_with({"max_turns": 4, "max_obs_length": 7, "storage": {"durable": False}}))
    assert (settings.max_turns, settings.max_obs_length) == (3, 7)
    assert (settings.storage.path, settings.storage.durable) == ("/own", False)


def test_a_plain_agent_config_gives_the_defaults():
    assert host_settings(AgentConfig(), OpenHandsConfig()).max_turns == 10


def test_a_misspelt_key_is_named_with_the_right_one():
    with pytest.raises(ConfigError, match="max_turns"):
        host_settings(RLAgentHostConfig(rl={"max_turn": 3}), OpenHandsConfig())


def test_openhands_hands_over_the_agents_own_table(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "config.toml"
    file.write_text(
        f'[core]\nfile_store = "memory"\ncache_dir = "{tmp_path}"\n'
        '[agent.RLAgent]\nclasspath = "openhands_rl_plugin.hosts.v0.agent.RLAgent"\n[agent.RLAgent.rl]\nmax_turns = 3\n'
    )
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())
    openhands_logger.addHandler(handler)
    config = load_openhands_config(config_file=str(file), set_logging_levels=False)
    openhands_logger.removeHandler(handler)
    own = config.get_agent_config("RLAgent")
    assert isinstance(own, RLAgentHostConfig) and own.rl == {"max_turns": 3}
    assert not [message for message in heard if "RLAgent" in message]
    assert RLAgent.get_cls("RLAgent") is RLAgent
