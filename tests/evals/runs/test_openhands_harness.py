"""What OpenHands' own evaluation harness does to get an agent: by its name, without reading config.toml."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
from scripted_model import serve

CODE = """
import sys

import openhands.agenthub
from openhands.controller.agent import Agent
from openhands.core.config import AgentConfig, LLMConfig, OpenHandsConfig
from openhands.core.setup import create_agent
from openhands.llm.llm_registry import LLMRegistry

llm = LLMConfig(model="openai/m", base_url=sys.argv[1])
config = OpenHandsConfig(default_agent="RLAgent", llms={"llm": llm})
config.set_agent_config(AgentConfig(enable_jupyter=False, enable_browsing=False, enable_llm_editor=False))
agent = create_agent(config, LLMRegistry(config))
print(Agent.get_cls("RLAgent").__module__, type(agent).__name__)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("openhands.agenthub") is None, reason="OpenHands V0 is not installed")
def test_rl_agent_is_selected_by_name_with_a_plain_configuration():
    environ = {"PATH": "/usr/bin:/bin", "LOG_LEVEL": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": "/tmp"}
    with serve() as server:
        command = [sys.executable, "-c", CODE, server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environ)
    assert done.stdout.split() == ["openhands_rl_plugin.hosts.v0.agent", "RLAgent"], done.stderr[-2000:]
