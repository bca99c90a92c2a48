"""``openhands-rl studio``: stored episodes, runs, evaluations and adapters in the browser."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options.fields import add_fields, read_fields
from openhands_rl_plugin.cli.options.foreground import (
    add_access_log,
    log_accesses_if_asked,
    sayable,
    wait_until_stopped,
)
from openhands_rl_plugin.cli.options.stored import author
from openhands_rl_plugin.cli.options.stores import STORE_HELP, is_folder, storage_at

if TYPE_CHECKING:
    from openhands_rl_plugin.apps.studio.sources import StudioSources
    from openhands_rl_plugin.core.protocols import TrajectoryStorage

EPILOG = """examples:
  openhands-rl studio ~/.openhands/rl_trajectories
  openhands-rl studio ./demo-run
  openhands-rl studio ./trajectories mongodb://127.0.0.1/night --tokenizer ./Qwen3-0.6B
  OPENHANDS_RL_API_KEY=... openhands-rl studio ./trajectories --host 0.0.0.0 --allow-host studio.example.org

The printed link opens one browser; another one needs another link, which is printed then, or the key. Everything is
only read, except that labels are added.
"""
PATIENCE = 8.0
"""Seconds: requests under way have five of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to show, and one option for each field of ``StudioConfig``."""
    from openhands_rl_plugin.apps.studio.config import StudioConfig

    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help=f"{STORE_HELP}; or a folder with runs, evaluations or adapters"
    )
    add_fields(parser, StudioConfig, lists="commas")
    add_access_log(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped. Raises ``RLError`` when a source, an option or the port cannot be used."""
    from openhands_rl_plugin.apps.studio.config import StudioConfig
    from openhands_rl_plugin.apps.studio.server import running_studio

    config = read_fields(args, StudioConfig, {"author": author()})
    sources = sources_at(args.sources)
    log_accesses_if_asked(args)
    with running_studio(config, sources) as studio:
        print(f"the studio is at {studio.link} (works once); Ctrl-C stops it", flush=True)
        wait_until_stopped()
    return 0


def sources_at(places: Sequence[str]) -> StudioSources:
    """What lies there, by names that are short and differ. Raises ``ConfigError`` where there is nothing to show."""
    from openhands_rl_plugin.apps.studio.discovery import discover
    from openhands_rl_plugin.apps.studio.sources import StudioSources

    stores: dict[str, TrajectoryStorage] = {}
    folders: dict[str, dict[str, Path]] = {"runs": {}, "evaluations": {}, "adapters": {}}
    for where in places:
        if not is_folder(where):
            stores[sayable(where)] = storage_at(where)
            continue
        folder = Path(where).expanduser().resolve()
        found = discover(folder)
        for path in found.stores:
            stores[_name(path, folder, stores)] = storage_at(str(path))
        for kind, known in folders.items():
            for path in getattr(found, kind):
                known[_name(path, folder, known)] = path
    return StudioSources(stores, **folders)


def _name(path: Path, folder: Path, known: Collection[str]) -> str:
    """A short name for a folder below a given one, which stands in addresses."""
    short = sayable((Path(folder.name) / path.relative_to(folder)).as_posix()).strip("/") or "root"
    names = itertools.chain([short], (f"{short}~{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in known)
