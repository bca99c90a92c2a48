"""A studio beside a run that goes on in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from openhands_rl_plugin.cli.options.foreground import sayable
from openhands_rl_plugin.cli.options.stored import author
from openhands_rl_plugin.core.errors import InfrastructureError, RLError
from openhands_rl_plugin.core.protocols import TrajectoryStorage

_ENDS_IN = 1
"""Seconds that requests under way have when the run ends or is interrupted."""


def add_studio(parser: argparse.ArgumentParser) -> None:
    """``--no-studio``."""
    about = "serve no studio on loopback while it runs (its link is printed first)"
    parser.add_argument("--no-studio", action="store_true", help=about)


@contextmanager
def studio_beside(
    args: argparse.Namespace,
    directory: Path,
    storage: Callable[[], TrajectoryStorage],
    adapters: Path,
    tokenizer: Path | None = None,
) -> Iterator[None]:
    """Print a link to a studio of the run in ``directory``, and serve it from a thread until the block ends.

    Nothing is opened by itself. Where no studio can be served, one line says why, and the run goes on. ``tokenizer``:
    the folder of the base model.
    """
    with ExitStack() as opened:
        if not args.no_studio:
            print(_begun(opened, directory, storage, adapters, tokenizer), flush=True)
        yield


def _begun(
    opened: ExitStack,
    directory: Path,
    storage: Callable[[], TrajectoryStorage],
    adapters: Path,
    tokenizer: Path | None,
) -> str:
    try:
        from openhands_rl_plugin.contrib.studio.config import StudioConfig
        from openhands_rl_plugin.contrib.studio.server import running_studio
        from openhands_rl_plugin.contrib.studio.sources import StudioSources

        known = tokenizer is not None and (tokenizer / "tokenizer.json").is_file()
        config = StudioConfig(port=0, author=author(), tokenizer=str(tokenizer) if known else "")
        name = sayable(directory.name) or "run"
        sources = StudioSources({name: storage()}, runs={name: directory}, adapters={name: adapters})
        studio = opened.enter_context(running_studio(config, sources, ends_in=_ENDS_IN))
    except (RLError, InfrastructureError, ImportError, OSError) as error:
        return sayable(f"no studio: {error}; the run goes on without it")
    return f"watch it in the studio: {studio.link} (works once, ends with the run)"
