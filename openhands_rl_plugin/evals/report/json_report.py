"""The report of evaluations as data: ``report.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.report.comparison import Comparison
from openhands_rl_plugin.evals.report.figures import EvaluationFigures

JSON = "report.json"


class EvaluationReport(Frozen):
    """The content of ``report.json``."""

    version: int = 1
    groups: tuple[EvaluationFigures, ...]
    comparison: Comparison | None = None


def write_json_report(folder: Path, groups: Sequence[EvaluationFigures], comparison: Comparison | None = None) -> None:
    """Write it into ``folder``, which is made. Raises ``StorageError``."""
    report = EvaluationReport(groups=tuple(groups), comparison=comparison)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made: {error.strerror}") from error
    write_file(folder / JSON, report.model_dump_json(indent=1) + "\n", PRIVATE)
