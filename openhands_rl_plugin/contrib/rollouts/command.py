"""``openhands-rl rollouts``: serve rollouts over HTTP: tasks in, rewards and token ids out."""

from __future__ import annotations

import argparse
from pathlib import Path

from openhands_rl_plugin.cli.options.fields import add_fields, read_fields
from openhands_rl_plugin.cli.options.foreground import (
    add_access_log,
    log_accesses_if_asked,
    sayable,
    wait_until_stopped,
)
from openhands_rl_plugin.contrib.rollouts.settings import ServiceOptions

EPILOG = """examples:
  openhands-rl rollouts serve --base-url http://127.0.0.1:8100/v1 --model policy --store ./rollouts
  openhands-rl rollouts serve --config config.toml --workers 4 --playing 8
  openhands-rl rollouts serve --base-urls http://10.0.0.5:8000/v1,http://10.0.0.6:8000/v1 --model policy
  RAY_ADDRESS=10.0.0.2:6379 openhands-rl rollouts serve --config config.toml --executor ray --workers 32
  OPENHANDS_RL_API_KEY=... openhands-rl rollouts serve --config config.toml --listen 0.0.0.0

  curl http://127.0.0.1:8500/rollout/task/submit --json \\
      '{"task_id": "a", "num_samples": 4, "agent": {"model_name": "policy"}, "metadata": {"task": "webshop-3"}}'
  curl http://127.0.0.1:8500/rollout/task/a              # its status, with the results that are there
  curl -X DELETE http://127.0.0.1:8500/rollout/task/a
  curl -N http://127.0.0.1:8500/events

Routes and fields are Polar's, so that its bridges to Slime and Miles can be pointed here. Queue, results and episodes
lie in --store: after a crash the same command goes on, no task is lost, and none is played twice to its end.
"""
RESUME = "the queue is on the disk, and the same command goes on"
PATIENCE = 30.0
"""Seconds: workers give back what they play."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, the store, and one option for each field of ``ServiceOptions``."""
    parser.add_argument("action", choices=["serve"], help="what to do")
    parser.add_argument(
        "--store", type=Path, default=Path("rollouts"), metavar="DIR", help="folder of the queue and of the episodes"
    )
    add_fields(parser, ServiceOptions, lists="commas")
    add_access_log(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ``RLError`` when the options, the port, the store or the cluster cannot be used."""
    from openhands_rl_plugin.contrib.rollouts.server import running_service

    service = read_fields(args, ServiceOptions)
    settings = service.settled.options().settings()
    log_accesses_if_asked(args)
    folder = args.store.expanduser().resolve()
    with running_service(service, folder) as url:
        endpoint = f"{settings.serving.model} at {', '.join(service.base_urls) or settings.serving.base_url}"
        print(sayable(f"rollouts of {endpoint}, recorded in {folder}"), flush=True)
        print(f"submit tasks to {url}/rollout/task/submit; Ctrl-C stops it", flush=True)
        wait_until_stopped()
    return 0
