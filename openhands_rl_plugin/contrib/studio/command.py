"""``openhands-rl studio``: see stored episodes, runs, evaluations and adapters in the browser, and label them.

examples:
  openhands-rl studio ~/.openhands/rl_trajectories
  openhands-rl studio ./demo-run
  openhands-rl studio export ./trajectories --run demo --max-reward 0.5 --out failed.html
  openhands-rl studio ./trajectories mongodb://127.0.0.1/night --tokenizer ./Qwen3-0.6B
  OPENHANDS_RL_API_KEY=... openhands-rl studio ./trajectories --host 0.0.0.0 --allow-host studio.example.org

The printed link opens one browser; another one needs another link, which is printed then, or the key. Everything is
only read, except that labels are added.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from openhands_rl_plugin.cli.options import (
    STORE_HELP,
    add_fields,
    add_filters,
    author,
    filter_of,
    is_folder,
    open_store,
    read_fields,
    storage_at,
)
from openhands_rl_plugin.cli.terminal import (
    ENDING,
    sayable,
    wait_until_stopped,
)
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.records import TrajectoryFilter

if TYPE_CHECKING:
    from openhands_rl_plugin.contrib.studio.sources import StudioSources
    from openhands_rl_plugin.core.protocols import TrajectoryStorage

EXPORT = "export"
PATIENCE = 8.0
"""Seconds: requests under way have five of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to show, and one option for each field of ``StudioConfig``."""
    from openhands_rl_plugin.contrib.studio.access import StudioConfig

    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help=f"{STORE_HELP}; or a folder with runs, evaluations or adapters"
    )
    add_fields(parser, StudioConfig)
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"{EXPORT}: the HTML file to write")
    add_filters(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped, or write a page. Raises ``RLError`` when a source, an option or the port cannot be used."""
    if args.sources[0] == EXPORT:
        return ENDING.run(_export(args))
    if args.out or args.skip_damaged or filter_of(args) != TrajectoryFilter():
        raise ConfigError(
            f"--out and filters are for a page to keep: openhands-rl studio {EXPORT} STORE --out FILE.html"
        )
    from openhands_rl_plugin.contrib.studio.access import StudioConfig
    from openhands_rl_plugin.contrib.studio.server import running_studio

    config = read_fields(args, StudioConfig, {"author": author()})
    sources = sources_at(args.sources)
    for name in sources.waiting():
        print(f"{sayable(name)} is empty: what a loop writes there is shown as soon as it is there")
    with running_studio(config, sources) as studio:
        print(f"the studio is at {studio.link} (works once); Ctrl-C stops it", flush=True)
        wait_until_stopped()
    return 0


async def _export(args: argparse.Namespace) -> int:
    from starlette.exceptions import HTTPException

    from openhands_rl_plugin.contrib.studio.access import StudioConfig
    from openhands_rl_plugin.contrib.studio.reports import MOST_EPISODES, ExportResource
    from openhands_rl_plugin.contrib.studio.sources import TokenText, read_episode

    if len(args.sources) != 2 or args.out is None:
        raise ConfigError(f"give one store and a file: openhands-rl studio {EXPORT} STORE --out FILE.html")
    text = TokenText(read_fields(args, StudioConfig).tokenizer)
    async with open_store(args.sources[1], skip_damaged=args.skip_damaged) as storage:
        chosen = filter_of(args)
        where = chosen.model_copy(update={"finished": chosen.finished and None, "limit": MOST_EPISODES})
        try:
            found = [await read_episode(storage, each.id) async for each in storage.summaries(where)]
            page = await ExportResource.page(found, text)
        except HTTPException as error:
            raise ConfigError(f"{error.detail}: narrow the filters") from error
    write_file(args.out, page, PRIVATE)
    print(f"{args.out}: {len(found)} episodes, {len(page) / 2**20:.1f} MB")
    return 0


def sources_at(places: Sequence[str]) -> StudioSources:
    """What lies there, by names that are short and differ, and what comes there later. Raises ``ConfigError`` where
    there is nothing to show."""
    from openhands_rl_plugin.contrib.studio.sources import Found, Growing, StudioSources, discover, free_name, look

    stores: Growing[TrajectoryStorage] = Growing()
    folders = {kind: Growing[Path]() for kind in ("runs", "evaluations", "adapters")}
    given: dict[Path, set[Path]] = {}
    shown: set[tuple[str, Path]] = set()

    def add(folder: Path, found: Found) -> None:
        for kind, path in ((kind, path) for kind, paths in found.items() for path in paths):
            given[folder].add(path)
            if (kind, path) in shown:
                continue
            short = sayable((Path(folder.name) / path.relative_to(folder)).as_posix()).strip("/") or "root"
            if kind == "stores":
                stores[free_name(short, stores)] = storage_at(str(path))
            else:
                folders[kind][free_name(short, folders[kind])] = path
            shown.add((kind, path))

    for where in places:
        if not is_folder(where):
            stores[sayable(where)] = storage_at(where)
            continue
        folder = Path(where).expanduser().resolve()
        given[folder] = set()
        add(folder, discover(folder))

    def look_again() -> None:
        for folder in given:
            with suppress(ConfigError):
                add(folder, look(folder))

    return StudioSources(
        stores,
        **folders,
        look_again=look_again if given else None,
        waiting=lambda: [folder.name for folder, found in given.items() if not found],
    )
