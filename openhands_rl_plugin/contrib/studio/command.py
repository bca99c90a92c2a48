"""``openhands-rl studio``: see stored episodes, runs, evaluations and adapters in the browser, and label them.

examples:
  openhands-rl studio ~/.openhands/rl_trajectories
  openhands-rl studio ./demo-run
  openhands-rl studio export ./trajectories --run demo --max-reward 0.5 --out failed.html
  openhands-rl studio ./trajectories mongodb://127.0.0.1/night --tokenizer ./Qwen3-0.6B
  OPENHANDS_RL_API_KEY=... openhands-rl studio ./trajectories --host 0.0.0.0 --allow-host studio.example.org

The printed link opens browsers as long as the studio runs; programs send the key. Everything is only read, except that
labels are added.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from openhands_rl_plugin.apps.stores import open_store
from openhands_rl_plugin.cli.options import STORE_HELP, add_fields, add_filters, author, filter_of, read_fields
from openhands_rl_plugin.cli.terminal import ENDING, sayable, wait_until_stopped
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.records import TrajectoryFilter

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
    from openhands_rl_plugin.contrib.studio.sources import sources_at

    config = read_fields(args, StudioConfig, {"author": author()})
    sources = sources_at(args.sources)
    for name in sources.waiting():
        print(f"{sayable(name)} is empty: what a loop writes there is shown as soon as it is there")
    with running_studio(config, sources) as studio:
        print(f"the studio is at {studio.link} ; Ctrl-C stops it", flush=True)
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
