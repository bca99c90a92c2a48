"""``openhands-rl agent``: a policy and its tools behind an OpenAI-compatible endpoint.

examples:
  openhands-rl agent --base-url http://127.0.0.1:8100/v1 --model policy-v000007 --tools think final my_tools:Search
  openhands-rl agent --base-url http://127.0.0.1:8100/v1 --model tiny --record ./trajectories --port 8300
  OPENHANDS_RL_API_KEY=... openhands-rl agent --base-url http://10.0.0.5:8000/v1 --model m --host 0.0.0.0

  curl http://127.0.0.1:8300/v1/chat/completions --json '{"messages": [{"role": "user", "content": "hi"}]}'
"""

from __future__ import annotations

import argparse

from openhands_rl_plugin.cli.options import add_fields, read_fields
from openhands_rl_plugin.cli.terminal import (
    add_access_log,
    log_accesses_if_asked,
    sayable,
    wait_until_stopped,
)

PATIENCE = 8.0
"""Seconds: requests under way have five of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``AgentConfig``."""
    from openhands_rl_plugin.apps.chat_endpoint import AgentConfig

    add_fields(parser, AgentConfig, lists="words")
    add_access_log(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ``RLError`` when the options, the port or the store cannot be used."""
    from openhands_rl_plugin.apps.chat_endpoint import AgentConfig, running_agent

    config = read_fields(args, AgentConfig)
    log_accesses_if_asked(args)
    with running_agent(config) as url:
        print(sayable(f"{config.model} of {config.base_url} with {', '.join(config.tools) or 'no tools'}"), flush=True)
        print(f"base_url: {url}/v1; Ctrl-C stops it", flush=True)
        wait_until_stopped()
    return 0
