"""``openhands-rl gateway``: record what any agent says to any OpenAI-compatible model server."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any, get_origin

from pydantic import ValidationError

from openhands_rl_plugin.cli.options.stores import STORE_HELP, storage_at
from openhands_rl_plugin.config.build import open_storage
from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.validation import problems
from openhands_rl_plugin.models.gateway.config import GatewayConfig

HELP = "record what an agent says to a model server, with a change of its base_url only"
EPILOG = """examples:
  openhands-rl gateway --upstream http://127.0.0.1:8100/v1 --store ./trajectories
  openhands-rl gateway --config config.toml --adapter policy --pin-sessions
  OPENHANDS_RL_API_KEY=... openhands-rl gateway --upstream http://10.0.0.5:8000/v1 --host 0.0.0.0

The agent's base_url is http://127.0.0.1:8200/v1, or .../session/NAME/v1 to name its session. To end a session:
  curl -X POST http://127.0.0.1:8200/session/NAME/end -d '{"success": true}'
"""

_STORE = "./trajectories"
_SWITCH_SECONDS = 0.0005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option for each field of ``GatewayConfig``, and where to store."""
    for name, field in GatewayConfig.model_fields.items():
        default = field.get_default()
        said = "" if field.is_required() or default in ("", None, (), False) else f" (default: {default})"
        given: dict[str, Any] = {"metavar": "VALUE"}
        if field.annotation is bool:
            given = {"action": "store_true"}
        elif get_origin(field.annotation) is tuple:
            given["action"] = "append"
        text = f"{field.description or ''}{said}".strip().replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, help=text, **given)
    parser.add_argument("--store", metavar="STORE", help=f"{STORE_HELP} (default: {_STORE})")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="take the storage and what [rl.serving] says from it"
    )


def run(args: argparse.Namespace) -> int:
    """Record until stopped. Raises ``RLError`` when the options, the port or the storage cannot be used."""
    settings = load_settings(args.config) if args.config is not None else None
    given = {name: value for name, value in vars(args).items() if name in GatewayConfig.model_fields}
    try:
        config = GatewayConfig.model_validate({**(_served_by(settings.serving) if settings else {}), **given})
    except ValidationError as error:
        lines = (f"--{at[-1].replace('_', '-')}: {what}" if at else what for at, what in problems(error, GatewayConfig))
        raise ConfigError("\n".join(lines)) from error
    if settings is not None and args.store is None:
        storage, where = open_storage(settings), f"the {settings.storage_backend} storage of {args.config}"
    else:
        where = args.store or _STORE
        storage = storage_at(where)
    asyncio.run(_serve(config, storage, where))
    return 0


def _served_by(serving: ServingSettings) -> dict[str, object]:
    found = {
        "upstream": serving.base_url,
        "base_model": serving.model,
        "adapters_path": serving.adapters_directory,
        "upstream_key_env": serving.api_key_env,
    }
    return {name: value for name, value in found.items() if value}


async def _serve(config: GatewayConfig, storage: TrajectoryStorage, where: str) -> None:
    from openhands_rl_plugin.models.gateway.server import running_gateway

    # The storage's thread must not keep the interpreter for long while calls wait.
    sys.setswitchinterval(_SWITCH_SECONDS)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    try:
        async with running_gateway(config, storage) as url:
            print(f"recording {config.upstream} into {where}", flush=True)
            print(f"base_url: {url}/v1 (or {url}/session/NAME/v1); Ctrl-C ends it", flush=True)
            await stopped.wait()
            print("ending the sessions", flush=True)
    finally:
        await storage.close()
