"""``openhands-rl env``: serve an environment over HTTP (/reset and /step).

examples:
  openhands-rl env webshop
  openhands-rl env webshop --port 0 --products 200 --seed 7
  OPENHANDS_RL_API_KEY=... openhands-rl env webshop --host 0.0.0.0
"""

from __future__ import annotations

import argparse

from openhands_rl_plugin.cli.options import natural, positive
from openhands_rl_plugin.cli.terminal import wait_until_stopped
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.servers import API_KEY, required_key

SEPARATORS = {"sep": " [SEP] ", "newline": "\n"}
PATIENCE = 8.0
"""Seconds: requests under way have five of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The environment's name, its address, and the size of its world."""
    parser.add_argument("environment", choices=["webshop"], help="the environment")
    host = "address to listen on; any but loopback needs a key"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=host)
    parser.add_argument("--port", type=natural, default=8000, metavar="PORT", help="port; 0 takes a free one")
    key = "environment variable with the key that clients must send; unset: no key is required"
    parser.add_argument("--api-key-env", default=API_KEY, metavar="VARIABLE", help=key)
    parser.add_argument("--products", type=positive, default=1000, metavar="PRODUCTS", help="size of the catalogue")
    parser.add_argument("--seed", type=int, default=0, metavar="SEED", help="seed of catalogue and goals")
    parser.add_argument("--results-per-page", type=positive, default=10, metavar="RESULTS", help="results on a page")
    text = "separator of a page's texts: WebShop's ' [SEP] ', or a newline, which costs fewer tokens"
    parser.add_argument("--separator", choices=sorted(SEPARATORS), default="sep", help=text)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ``RLError`` when the world or the port is impossible."""
    from openhands_rl_plugin.contrib.webshop import WebShop, running_webshop

    required_key(args.host, args.api_key_env, protects="its sessions")
    try:
        page, separator = args.results_per_page, SEPARATORS[args.separator]
        world = WebShop(args.products, args.seed, results_per_page=page, separator=separator)
    except ValueError as error:
        raise ConfigError(f"no such shop: {error}") from error
    with running_webshop(world, host=args.host, port=args.port, api_key_env=args.api_key_env) as url:
        print(f"webshop at {url}: {args.products} products, {len(world.goals)} goals; Ctrl-C stops it", flush=True)
        wait_until_stopped()
    return 0
