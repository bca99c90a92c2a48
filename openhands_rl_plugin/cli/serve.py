"""``openhands-rl serve``: serve a model and its LoRA adapters, or a policy with tools, over an OpenAI-compatible API.

examples:
  openhands-rl serve --model smollm2-135m --adapters ~/.openhands/rl_adapters
                                         fetched at its first use; with the adapters that are in use
  OPENHANDS_RL_API_KEY=... openhands-rl serve --model ./model --host 0.0.0.0
  openhands-rl serve --base-url http://127.0.0.1:8100/v1 --model policy-v000007 --tools think final my_tools:Search \\
      --record ./trajectories --port 8300

With --base-url the model is that of another server, and every chat request is answered after all tool calls:
  curl http://127.0.0.1:8300/v1/chat/completions --json '{"messages": [{"role": "user", "content": "hi"}]}'
"""

from __future__ import annotations

import argparse

from openhands_rl_plugin.apps.chat_endpoint import PolicyConfig, running_agent
from openhands_rl_plugin.apps.demo_model import SHORT_NAME, named_model
from openhands_rl_plugin.cli.options import add_fields, read_fields
from openhands_rl_plugin.cli.terminal import sayable, wait_until_stopped
from openhands_rl_plugin.core.errors import from_extra
from openhands_rl_plugin.models.generator.config import ServerConfig

PATIENCE = 8.0
"""Seconds: requests under way have five of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``ServerConfig`` and ``PolicyConfig``."""
    add_fields(parser, ServerConfig)
    policy = parser.add_argument_group("a served policy with tools")
    add_fields(policy, PolicyConfig, from_file=True, without=("model",))


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ``RLError`` when the options, the model or the port cannot be used."""
    config = read_fields(args, ServerConfig)
    config.access()
    if "base_url" in args or "tools" in args:
        policy = read_fields(args, PolicyConfig)
        with running_agent(config, policy) as url:
            tools = ", ".join(policy.tools) or "no tools"
            print(sayable(f"{policy.model} of {policy.base_url} with {tools} at {url}/v1; Ctrl-C stops it"), flush=True)
            wait_until_stopped()
        return 0
    if config.model == SHORT_NAME:
        served = config.served_model_name or SHORT_NAME
        config = config.model_copy(update={"model": str(named_model(SHORT_NAME)), "served_model_name": served})
    with from_extra("train"):
        from openhands_rl_plugin.models.server.app import running_server
    print(f"loading {config.model}", flush=True)
    with running_server(config) as url:
        print(f"{config.base_name} at {url}/v1; Ctrl-C stops it", flush=True)
        wait_until_stopped()
    return 0
