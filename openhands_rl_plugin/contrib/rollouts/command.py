"""``openhands-rl rollouts``: serve rollouts over HTTP: tasks in, rewards and token ids out.

examples:
  openhands-rl rollouts serve --base-url http://127.0.0.1:8100/v1 --model policy --store ./rollouts
  RAY_ADDRESS=10.0.0.2:6379 openhands-rl rollouts serve --config config.toml --workers 32 --store env:MONGODB_URI

  curl http://127.0.0.1:8500/rollout/task/submit --json \\
      '{"task_id": "a", "num_samples": 4, "agent": {"model_name": "policy"}, "metadata": {"task": "webshop-3"}}'
  curl http://127.0.0.1:8500/rollout/task/a              # its status, with the results that are there

Routes and fields are Polar's, so that its bridges to Slime and Miles can be pointed here. Episodes run in Ray actors,
of the cluster of RAY_ADDRESS or of this machine, and lie in --store; tasks and results are kept in memory.
"""

from __future__ import annotations

import argparse

from openhands_rl_plugin.apps.stores import is_folder
from openhands_rl_plugin.cli.options import STORE_HELP, add_fields, read_fields
from openhands_rl_plugin.cli.terminal import sayable, wait_until_stopped
from openhands_rl_plugin.config.rollout import OF_EPISODE
from openhands_rl_plugin.contrib.rollouts.requests import ServiceOptions

RESUME = "episodes that ended are in --store; submit the other tasks again"
PATIENCE = 30.0
"""Seconds: episodes that are under way are ended."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, the store, and one option for each field of ``ServiceOptions``."""
    parser.add_argument("action", choices=["serve"], help="what to do")
    parser.add_argument("--store", default="rollouts", metavar="STORE", help=f"{STORE_HELP} (default: rollouts)")
    add_fields(parser, ServiceOptions, without=OF_EPISODE)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ``RLError`` when the options, the port or the cluster cannot be used."""
    from pathlib import Path

    from openhands_rl_plugin.contrib.rollouts.service import running_service

    service = read_fields(args, ServiceOptions)
    settings = service.options().settings()
    store = str(Path(args.store).expanduser().resolve()) if is_folder(args.store) else args.store
    with running_service(service, store) as url:
        endpoint = f"{settings.serving.model} at {settings.serving.base_url}"
        print(sayable(f"rollouts of {endpoint}, recorded in {store}"), flush=True)
        print(f"submit tasks to {url}/rollout/task/submit; Ctrl-C stops it", flush=True)
        wait_until_stopped()
    return 0
