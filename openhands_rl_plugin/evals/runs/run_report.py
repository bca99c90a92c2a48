"""What the official tools expect beside ``output.jsonl``: predictions, and the run report of SWE-bench."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.evals.report.run_records import outcome_of_row
from openhands_rl_plugin.evals.runs.outcome import Outcome, OutcomeKind
from openhands_rl_plugin.evals.runs.output_rows import prediction_of
from openhands_rl_plugin.evals.runs.run_files import OUTPUT, PREDICTIONS, read_rows
from openhands_rl_plugin.evals.swe.logs import run_report
from openhands_rl_plugin.evals.swe.types import Flag, PatchVerdict, VerdictKind


def write_run_report(directory: Path, model: str, instance_ids: Sequence[str]) -> None:
    """Write ``predictions.jsonl`` and ``<model>.<run>.json`` for what the run has finished. Raises ``StorageError``."""
    predictions: list[str] = []
    outcomes: list[Outcome] = []
    for row in read_rows(directory / OUTPUT):
        outcomes.append(outcome_of_row(row))
        if (prediction := prediction_of(row, model)) is not None:
            predictions.append(json.dumps(prediction) + "\n")
    write_file(directory / PREDICTIONS, "".join(predictions), PRIVATE)
    verdicts = {each.instance_id: _verdict(each) for each in outcomes if each.kind is not OutcomeKind.UNGRADED}
    report = run_report(verdicts, list(instance_ids), [outcome.instance_id for outcome in outcomes])
    name = f"{model.replace('/', '__')}.{directory.name}.json"
    write_file(directory / name, json.dumps(report, indent=4), PRIVATE)


def _verdict(outcome: Outcome) -> PatchVerdict:
    """What the report needs of an attempt. An episode that failed is an error there, as with the official harness."""
    kind = VerdictKind.INFRASTRUCTURE if outcome.kind is OutcomeKind.FAILED else VerdictKind(outcome.kind.value)
    flags = tuple(Flag(rule=rule, where="") for rule in outcome.flags)
    return PatchVerdict(instance_id=outcome.instance_id, kind=kind, reason=outcome.reason, flags=flags)
