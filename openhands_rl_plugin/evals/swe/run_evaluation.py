"""Grades many predictions: concurrent, resumable, with the files of the official tools:
``logs/run_evaluation/<run>/<model>/<instance>/{patch.diff,eval.sh,test_output.txt,report.json,run_instance.log}``.

In addition, ``verdict.json`` has the kind of verdict, which a report lacks. ``report.json`` exists only when the tests
finished, because the official tools count its absence as an error.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.evals.swe.dataset import PatchPrediction
from openhands_rl_plugin.evals.swe.types import Instance, InstanceBackend, PatchVerdict, TestsStatus, VerdictKind

_TESTED = (VerdictKind.RESOLVED, VerdictKind.UNRESOLVED)
_ERRORS = (VerdictKind.UNAPPLIED, VerdictKind.TIMED_OUT, VerdictKind.REFUSED, VerdictKind.INFRASTRUCTURE)


class InstanceLogs:
    """The folder of one instance."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_patch(self, patch: str) -> None:
        """``patch.diff``, byte for byte; files of an earlier attempt are removed."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("report.json", "verdict.json", "test_output.txt", "run_instance.log"):
            (self.folder / name).unlink(missing_ok=True)
        self.write("patch.diff", patch)

    def write(self, name: str, text: str) -> None:
        """Write one of the files."""
        write_file(self.folder / name, text.encode(errors="replace"), PRIVATE)

    def write_verdict(self, verdict: PatchVerdict) -> None:
        """``verdict.json``, and ``report.json`` when the tests finished."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.write("verdict.json", verdict.model_dump_json(indent=1))
        (self.folder / "report.json").unlink(missing_ok=True)
        if verdict.kind in _TESTED:
            self.write("report.json", json.dumps(instance_report(verdict), indent=4))

    def verdict_on(self, patch: str) -> PatchVerdict | None:
        """The verdict of an earlier run on the same patch; ``None`` without one, or after an infrastructure failure."""
        try:
            verdict = PatchVerdict.model_validate_json((self.folder / "verdict.json").read_bytes())
            same = (self.folder / "patch.diff").read_bytes() == patch.encode()
        except (OSError, ValueError):
            return None
        return verdict if same and verdict.kind is not VerdictKind.INFRASTRUCTURE else None


def instance_report(verdict: PatchVerdict) -> JsonObject:
    """``report.json`` of one tested patch."""
    groups = {"FAIL_TO_PASS": verdict.fail_to_pass, "PASS_TO_PASS": verdict.pass_to_pass}
    groups |= dict.fromkeys(("FAIL_TO_FAIL", "PASS_TO_FAIL"), TestsStatus())
    return {
        verdict.instance_id: {
            "patch_is_None": False,
            "patch_exists": True,
            "patch_successfully_applied": True,
            "resolved": verdict.resolved,
            "tests_status": {name: each.model_dump(mode="json") for name, each in groups.items()},
        }
    }


def run_report(verdicts: Mapping[str, PatchVerdict], instances: list[str], submitted: list[str]) -> JsonObject:
    """The report of a run (schema version 2)."""

    def of(*kinds: VerdictKind) -> list[str]:
        return sorted(name for name, each in verdicts.items() if each.kind in kinds)

    ids = {
        "submitted": sorted(submitted),
        "completed": of(*_TESTED),
        "resolved": of(VerdictKind.RESOLVED),
        "unresolved": of(VerdictKind.UNRESOLVED),
        "empty_patch": of(VerdictKind.EMPTY_PATCH),
        "error": of(*_ERRORS),
    }
    return {
        "total_instances": len(instances),
        **{f"{name}_instances": len(each) for name, each in ids.items()},
        **{f"{name}_ids": [*each] for name, each in ids.items()},
        "incomplete_ids": [*sorted({*instances} - {*verdicts})],
        "schema_version": 2,
        "unstopped_instances": 0,
        "unstopped_containers": [],
        "unremoved_images": [],
    }


OnVerdict = Callable[[PatchPrediction, PatchVerdict], None]


async def grade_all(
    backend: InstanceBackend,
    instances: Sequence[Instance],
    predictions: Sequence[PatchPrediction],
    out: Path,
    *,
    run_id: str = "run",
    workers: int = 1,
    timeout: float = 1800.0,
    on_verdict: OnVerdict = lambda prediction, verdict: None,
) -> tuple[dict[tuple[str, str], PatchVerdict], list[Path]]:
    """Grade what is not graded yet and write the reports, also on cancellation: finished verdicts are kept.

    Returns all verdicts by model and instance, and the report files, one for each model.

    ``timeout``: seconds for one instance's tests.
    """
    rows = {instance.instance_id: instance for instance in instances}
    verdicts: dict[tuple[str, str], PatchVerdict] = {}
    places = asyncio.Semaphore(workers)

    async def grade(prediction: PatchPrediction) -> None:
        model, name, patch = prediction.model_name_or_path, prediction.instance_id, prediction.model_patch or ""
        logs = InstanceLogs(out / "logs" / "run_evaluation" / run_id / prediction.folder / name)
        verdict = logs.verdict_on(patch)
        if verdict is None:
            async with places:
                verdict = await backend.grade(rows[name], patch, logs=logs.folder, timeout=timeout)
        verdicts[model, name] = verdict
        on_verdict(prediction, verdict)

    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    reports = []
    try:
        async with asyncio.TaskGroup() as group:
            for prediction in predictions:
                group.create_task(grade(prediction))
    finally:
        for model, folder in {each.model_name_or_path: each.folder for each in predictions}.items():
            submitted = [each.instance_id for each in predictions if each.model_name_or_path == model]
            found = {name: verdicts[model, name] for name in submitted if (model, name) in verdicts}
            reports.append(out / f"{folder}.{run_id}.json")
            write_file(reports[-1], json.dumps(run_report(found, list(rows), submitted), indent=4), PRIVATE)
    return verdicts, reports


def summary(verdicts: Mapping[tuple[str, str], PatchVerdict]) -> str:
    """``7 resolved, 2 unresolved, 1 timed out``."""
    counts = Counter(verdict.kind for verdict in verdicts.values())
    parts = [f"{counts[kind]} {kind.value.replace('_', ' ')}" for kind in VerdictKind if counts[kind]]
    flagged = sum(1 for verdict in verdicts.values() if verdict.flagged)
    return ", ".join(parts) + (f"; {flagged} flagged" if flagged else "") if parts else "nothing graded"
