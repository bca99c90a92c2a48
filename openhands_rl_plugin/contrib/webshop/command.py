"""``openhands-rl env``: serve an environment over HTTP (/reset and /step).

examples:
  openhands-rl env webshop
  openhands-rl env webshop --port 0
  OPENHANDS_RL_API_KEY=... openhands-rl env webshop --host 0.0.0.0
"""

from __future__ import annotations

import argparse

from openhands_rl_plugin.cli.options import natural
from openhands_rl_plugin.cli.terminal import wait_until_stopped
from openhands_rl_plugin.core.servers import API_KEY, required_key

PATIENCE = 8.0
"""Seconds: requests under way have five of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The environment's name and its address."""
    parser.add_argument("environment", choices=["webshop"], help="the environment")
    host = "address to listen on; any but loopback needs a key"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    parser.add_argument("--port", type=natural, default=8000, metavar="PORT", help="port; 0 takes a free one")
    key = "environment variable with the key that clients must send; unset: no key is required"
    parser.add_argument("--api-key-env", default=API_KEY, metavar="VARIABLE", help=key)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ``RLError`` when the port cannot be used."""
    from openhands_rl_plugin.contrib.webshop import WebShop, running_webshop

    required_key(args.host, args.api_key_env, protects="its sessions")
    world = WebShop()
    with running_webshop(world, host=args.host, port=args.port, api_key_env=args.api_key_env) as url:
        size = f"{len(world.products)} products, {len(world.goals)} goals"
        print(f"webshop at {url}: {size}; Ctrl-C stops it", flush=True)
        wait_until_stopped()
    return 0
