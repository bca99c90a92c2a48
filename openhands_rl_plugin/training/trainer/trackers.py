"""Who hears of the training steps besides the terminal and ``metrics.jsonl``: nobody, trackio or Weights & Biases.

Neither package is needed; the one that is named is imported when training begins. Both read their own environment
variables (``WANDB_MODE=offline``, ``TRACKIO_DIR``, ...), and keep their keys to themselves.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Protocol

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import CaughtFailure, TrainingError, boundary
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import FailureKind

log = redacting_logger(__name__)

PROJECT = "openhands-rl"
"""Where W&B's own variable WANDB_PROJECT names no other."""


class Tracker(Protocol):
    """Hears of one training run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Note what a step measured."""
        ...

    def finish(self, *, failed: bool) -> None:
        """The run has ended."""
        ...


class NoTracker:
    """Nobody."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Nothing happens."""

    def finish(self, *, failed: bool) -> None:
        """Nothing happens."""


class TrackioTracker:
    """trackio: a database on this machine, or the Space or server that its variables name; `trackio show` shows it.

    It has no word for a run that failed. What it prints goes to stderr.
    """

    def __init__(self, name: str, settings: TrainingSettings) -> None:
        import trackio  # pyright: ignore[reportMissingImports]  # an extra

        config = settings.model_dump(mode="json")
        with redirect_stdout(sys.stderr):
            self._run = trackio.init(project=PROJECT, name=name, config=config, resume="allow", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # It has a column of its own for the step.
        self._run.log({name: value for name, value in values.items() if name != "step"}, step=step)

    def finish(self, *, failed: bool) -> None:
        with redirect_stdout(sys.stderr):
            self._run.finish()


class WandbTracker:
    """Weights & Biases. ``directory``: for what it keeps until it is sent; else where the process works."""

    def __init__(self, name: str, settings: TrainingSettings, directory: Path | None) -> None:
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name,
            id=name,
            resume="allow",
            reinit="create_new",
            config=settings.model_dump(mode="json"),
            dir=directory,
            # What is on the terminal and in the working directory is nobody's business.
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class SafeTracker:
    """A tracker that may fail without the training: it is told once, and the tracker is asked no more."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker: Tracker = tracker

    def log(self, step: int, values: Mapping[str, float]) -> None:
        with self._forgiven():
            self._tracker.log(step, values)

    def finish(self, *, failed: bool) -> None:
        with self._forgiven():
            self._tracker.finish(failed=failed)

    @contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "tracker"):
                yield
        except CaughtFailure as caught:
            self._tracker = NoTracker()
            log.warning("the tracker hears no more of this run, the training goes on: %s", caught.failure.message)


@contextmanager
def tracked(settings: TrainingSettings, fingerprint: str, directory: Path | None = None) -> Iterator[Tracker]:
    """The tracker that the settings name, for one run; one of the same ``fingerprint`` and directory is gone on with.

    Raises ``TrainingError`` when the tracker cannot begin.
    """
    title = re.sub(r"[^\w.-]", "-", directory.stem if directory is not None else "training")
    tracker = _begun(settings, f"{title[:50]}-{fingerprint[:12]}", directory)
    failed = True
    try:
        yield tracker
        failed = False
    finally:
        tracker.finish(failed=failed)


def _begun(settings: TrainingSettings, name: str, directory: Path | None) -> Tracker:
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "tracker"):
            match settings.tracker:
                case "none":
                    return NoTracker()
                case "trackio":
                    return SafeTracker(TrackioTracker(name, settings))
                case "wandb":
                    return SafeTracker(WandbTracker(name, settings, directory))
    except CaughtFailure as caught:
        offline = "WANDB_MODE=offline or " if settings.tracker == "wandb" else ""
        raise TrainingError(
            f"{settings.tracker} cannot begin a run ({caught.failure.message}): set {offline}[rl.training] tracker = "
            '"none"'
        ) from caught
