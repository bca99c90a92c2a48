"""A studio beside a run that goes on in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from openhands_rl_plugin.apps.loop.reporting import report_writer
from openhands_rl_plugin.cli.options.foreground import sayable
from openhands_rl_plugin.cli.options.stored import author
from openhands_rl_plugin.core.errors import InfrastructureError, RLError
from openhands_rl_plugin.core.protocols import TrajectoryStorage


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
    opened: ExitStack, directory: Path, storage: Callable[[], TrajectoryStorage], adapters: Path, tokenizer: Path | None
) -> str:
    known = tokenizer is not None and (tokenizer / "tokenizer.json").is_file()
    name = sayable(directory.name) or "run"
    try:
        if (writer := report_writer()) is None:
            return "no studio is installed here; the run goes on without it"
        link = opened.enter_context(
            writer.studio_of_run(name, directory, storage, adapters, str(tokenizer) if known else "", author())
        )
    except (RLError, InfrastructureError, ImportError, OSError) as error:
        return sayable(f"no studio: {error}; the run goes on without it")
    return f"watch it in the studio: {link} (works once, ends with the run)"
