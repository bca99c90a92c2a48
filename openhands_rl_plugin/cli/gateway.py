"""``openhands-rl gateway``: record what an agent and a model server exchange; only the agent's base_url changes.

examples:
  openhands-rl gateway --upstream http://127.0.0.1:8100/v1 --store ./trajectories
  openhands-rl gateway --config config.toml --adapter policy
  OPENHANDS_RL_API_KEY=... openhands-rl gateway --upstream http://10.0.0.5:8000/v1 --host 0.0.0.0

The agent's base_url is http://127.0.0.1:8200/v1, or .../session/NAME/v1 to name its session; Claude Code's
ANTHROPIC_BASE_URL is http://127.0.0.1:8200, or .../session/NAME. Recorded are /v1/chat/completions (with token ids and
logprobs, if the server reports them), /v1/messages and /v1/responses. To open a session that a strategy decides, and to
end one:
  curl http://127.0.0.1:8200/session --json '{"session": "NAME", "strategy": {"name": "BestOfN"}, "limits": {}}'
  curl http://127.0.0.1:8200/session/NAME/end --json '{"success": true}'
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
from contextlib import suppress

from openhands_rl_plugin.apps.stores import storage_at
from openhands_rl_plugin.cli.options import STORE_HELP, add_fields, add_settings, read_fields, settings_of
from openhands_rl_plugin.cli.terminal import sayable
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.session.client_sessions import GatewayConfig
from openhands_rl_plugin.session.gateway import running_gateway

_STORE = "./trajectories"
PATIENCE = 25.0
"""Seconds: requests under way and the ends of the sessions have ten each."""

_SWITCH_SECONDS = 0.0005
"""A tenth of Python's default: the storage's thread must not hold the interpreter for long while calls wait."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``GatewayConfig``, and where to store."""
    add_fields(parser, GatewayConfig, from_file=True)
    parser.add_argument("--store", metavar="STORE", help=f"{STORE_HELP} (default: {_STORE})")
    add_settings(parser)


async def run(args: argparse.Namespace) -> int:
    """Record until stopped. Raises ``RLError`` when the options, the port or the storage cannot be used."""
    settings = settings_of(args) if args.config or args.set else None
    known = {"upstream": settings.serving.base_url} if settings and settings.serving.base_url else {}
    config = read_fields(args, GatewayConfig, known)
    where = args.store or _STORE
    storage = storage_at(where) if args.store or settings is None else open_storage(settings)
    if not args.store and settings is not None:
        where = f"the {settings.storage_backend} storage of [rl]"
    sys.setswitchinterval(_SWITCH_SECONDS)
    # Nearly all objects of a call are freed without a search for cycles, which would take a tenth of the time.
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)
    try:
        async with running_gateway(config, storage, settings=settings) as url:
            print(sayable(f"recording {config.upstream} into {where}"), flush=True)
            print(f"base_url: {url}/v1 (or {url}/session/NAME/v1); Ctrl-C stops it", flush=True)
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            print("ending the sessions", flush=True)
    finally:
        await storage.close()
    return 0
