"""The report of evaluations: the studio's page of them with their instances, patches and verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from openhands_rl_plugin.contrib.studio.reports.answers import MOST_BYTES, Answers, address
from openhands_rl_plugin.contrib.studio.resources.evaluations import details_of, instance_rows, overview, run_figures
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.evals.report.comparison import Comparison
from openhands_rl_plugin.evals.report.run_records import RunRecord
from openhands_rl_plugin.evals.runs.run_files import OUTPUT, read_rows

REPORT = "report.html"
_LONGEST = 64 * 1024
"""Characters of a patch, of an error and of what a grader said."""


def write_evaluation_report(
    folder: Path, runs: Sequence[RunRecord], comparison: Comparison | None = None, *, most: int = MOST_BYTES
) -> Path:
    """Write ``report.html`` into ``folder``, of at most ``most`` bytes. Raises ``StorageError``."""
    answers, named = Answers("Evaluations", "/v", most), dict(_named(runs))
    listed: JsonObject = {
        "evaluations": [{"name": name, "figures": run_figures(run)} for name, run in named.items()],
        **overview(runs, comparison),
    }
    answers.add("the figures", {"evaluations": listed})
    for name, run in named.items():
        body: JsonObject = {"name": name, "figures": run_figures(run), "instances": instance_rows(run.outcomes)}
        answers.add(f"the instances of {name}", {f"evaluations/{name}": body})
    for name, run in named.items():
        _add_details(answers, name, run)
    write_file(folder / REPORT, answers.page(), PRIVATE)
    return folder / REPORT


def _named(runs: Sequence[RunRecord]) -> Iterator[tuple[str, RunRecord]]:
    """Names that differ, also where folders of other agents are named alike."""
    seen: dict[str, int] = {}
    for run in runs:
        name = f"{run.directory.parent.name}/{run.directory.name}".strip("/")
        seen[name] = seen.get(name, 0) + 1
        yield (name if seen[name] == 1 else f"{name}~{seen[name]}"), run


def _add_details(answers: Answers, name: str, run: RunRecord) -> None:
    missing = 0
    try:
        for row in read_rows(run.directory / OUTPUT):
            found = {address(f"evaluations/{name}", str(row["instance_id"])): details_of(row, _LONGEST)}
            missing += not answers.add("", found)
    except (ConfigError, OSError):
        answers.leave_out(f"patches and verdicts of {name}, which cannot be read")
    if missing:
        answers.leave_out(f"patch and verdict of {missing} instances of {name}")
