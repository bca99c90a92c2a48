"""``openhands-rl config check FILE``: the effective settings of a configuration file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from openhands_rl_plugin.config.toml import load_settings

EPILOG = """examples:
  openhands-rl config check config.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``check FILE``."""
    parser.add_argument("action", choices=["check"], help="what to do")
    parser.add_argument("file", type=Path, help="a config.toml, with [rl], [extended.rl] or [agent.RLAgent.rl]")


def run(args: argparse.Namespace) -> int:
    """Print the effective settings as TOML. Raises ``ConfigError``."""
    print("\n".join(_toml("rl", load_settings(args.file).model_dump(mode="json"))))
    return 0


def _toml(section: str, table: Mapping[str, object]) -> Iterator[str]:
    # JSON and TOML have the same notation of strings, numbers, booleans and lists of strings.
    yield f"[{section}]"
    yield from (f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, Mapping))
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield ""
            yield from _toml(f"{section}.{key}", value)
