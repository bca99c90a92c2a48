"""Experiment trackers: accelerate's back ends (``accelerate.tracking``), whose errors never end a training run.

No tracker package is required; the configured one is imported when training starts. Each reads its own environment
variables (``WANDB_MODE=offline``, ``TRACKIO_DIR``, ...) and API keys.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import CaughtFailure, TrainingError, boundary
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.core.types import FailureKind

log = redacting_logger(__name__)

PROJECT = "openhands-rl"
"""The project of a run, unless W&B's own variable WANDB_PROJECT names another."""


class Tracker(Protocol):
    """Records one training run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def finish(self, *, failed: bool) -> None:
        """End the run."""
        ...


class NoTracker:
    """Records nothing."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def finish(self, *, failed: bool) -> None:
        """Do nothing."""


class SafeTracker:
    """A back end of accelerate whose errors do not end the training: the first is logged, then it is not used again.

    Output of the back end is redirected to stderr.
    """

    def __init__(self, tracker: GeneralTracker) -> None:
        self._tracker: Any = tracker

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step; ``step`` becomes ``global_step``, a reserved name in some back ends."""
        renamed = {"global_step" if name == "step" else name: value for name, value in values.items()}
        with self._errors_logged() as tracker:
            if tracker is not None:
                tracker.log(renamed, step=step)

    def finish(self, *, failed: bool) -> None:
        """End the run; W&B alone can mark it as failed."""
        with self._errors_logged() as tracker, redirect_stdout(sys.stderr):
            if tracker is not None and failed and tracker.name == "wandb":
                tracker.tracker.finish(exit_code=1)
            elif tracker is not None:
                tracker.finish()

    @contextmanager
    def _errors_logged(self) -> Iterator[Any]:
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "tracker"):
                yield self._tracker
        except CaughtFailure as caught:
            self._tracker = None
            log.warning("tracking stops, the training continues: %s", caught.failure.message)


@contextmanager
def tracked(settings: TrainingSettings, fingerprint: str, directory: Path | None = None) -> Iterator[Tracker]:
    """The tracker that the settings name, for one run; a run of the same ``fingerprint`` and directory is resumed.

    Raises ``TrainingError`` when the tracker cannot start.
    """
    title = re.sub(r"[^\w.-]", "-", directory.stem if directory is not None else "training")
    tracker = _started(settings, f"{title[:50]}-{fingerprint[:12]}", directory)
    failed = True
    try:
        yield tracker
        failed = False
    finally:
        tracker.finish(failed=failed)


def _started(settings: TrainingSettings, name: str, directory: Path | None) -> Tracker:
    if settings.tracker == "none":
        return NoTracker()
    try:
        with boundary(FailureKind.INFRASTRUCTURE, "tracker"), redirect_stdout(sys.stderr):
            PartialState()  # accelerate's loggers need it
            kind = LOGGER_TYPE_TO_CLASS[settings.tracker]
            project = os.environ.get("WANDB_PROJECT", PROJECT) if settings.tracker == "wandb" else PROJECT
            config = settings.model_dump(mode="json")
            options = _options(settings.tracker, name, config, directory)
            place = (str(directory or "."),) if kind.requires_logging_directory else ()
            tracker = kind(project, *place, **options)
            tracker.start()
            if "config" not in options:
                tracker.store_init_configuration({key: str(value) for key, value in config.items()})
            return SafeTracker(tracker)
    except CaughtFailure as caught:
        offline = "WANDB_MODE=offline or " if settings.tracker == "wandb" else ""
        raise TrainingError(
            f"{settings.tracker} cannot begin a run ({caught.failure.message}): set {offline}[rl.training] tracker = "
            '"none"'
        ) from caught


def _options(tracker: str, name: str, config: dict[str, Any], directory: Path | None) -> dict[str, Any]:
    """A back end's arguments besides the project: the run's name, and those for resuming it."""
    if tracker == "trackio":
        return {"name": name, "config": config, "resume": "allow", "embed": False}
    if tracker == "mlflow":
        return {"run_name": name}
    if tracker != "wandb":
        return {}
    import wandb  # pyright: ignore[reportMissingImports]  # an extra

    return {
        **{"name": name, "id": name, "resume": "allow", "reinit": "create_new", "config": config, "dir": directory},
        # The terminal's content and the working directory stay private.
        "settings": wandb.Settings(console="off", disable_git=True, disable_code=True),
    }
