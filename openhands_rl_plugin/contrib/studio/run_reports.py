"""What other commands use of the studio: reports of runs and evaluations, and a studio that runs beside a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from openhands_rl_plugin.contrib.studio.config import StudioConfig
from openhands_rl_plugin.contrib.studio.reports.evaluation import write_evaluation_report as write_evaluation_report
from openhands_rl_plugin.contrib.studio.reports.run import write_run_report as write_run_report
from openhands_rl_plugin.contrib.studio.server import running_studio
from openhands_rl_plugin.contrib.studio.sources import StudioSources
from openhands_rl_plugin.core.protocols import TrajectoryStorage

_ENDS_IN = 1
"""Seconds that requests under way have when the run ends or is interrupted."""


@contextmanager
def studio_of_run(
    name: str, directory: Path, storage: Callable[[], TrajectoryStorage], adapters: Path, tokenizer: str, author: str
) -> Iterator[str]:
    """The link to a studio of the run in ``directory``, which is served from a thread until the block ends."""
    config = StudioConfig(port=0, author=author, tokenizer=tokenizer)
    sources = StudioSources({name: storage()}, runs={name: directory}, adapters={name: adapters})
    with running_studio(config, sources, ends_in=_ENDS_IN) as studio:
        yield studio.link
