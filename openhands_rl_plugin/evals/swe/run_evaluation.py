"""Grades many predictions: concurrent, resumable, with the files of the official tools."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from openhands_rl_plugin.core.concurrency import Backoff
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.evals.swe.dataset import PatchPrediction
from openhands_rl_plugin.evals.swe.logs import InstanceLogs, run_report
from openhands_rl_plugin.evals.swe.types import Instance, InstanceBackend, PatchVerdict, VerdictKind

_BACKOFF = Backoff(first=1.0, longest=10.0)

OnVerdict = Callable[[PatchPrediction, PatchVerdict], None]


class GradedPredictions(NamedTuple):
    """All verdicts by model and instance, and the report files (one for each model)."""

    verdicts: dict[tuple[str, str], PatchVerdict]
    reports: tuple[Path, ...]


async def grade_all(
    backend: InstanceBackend,
    instances: Sequence[Instance],
    predictions: Sequence[PatchPrediction],
    out: Path,
    *,
    run_id: str = "run",
    workers: int = 1,
    timeout: float = 1800.0,
    retries: int = 1,
    on_verdict: OnVerdict = lambda prediction, verdict: None,
) -> GradedPredictions:
    """Grade what is not graded yet and write the reports, also on cancellation: finished verdicts are kept.

    ``timeout``: seconds for one instance's tests. ``retries``: after infrastructure failures.
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
                verdict = await grade_with_retries(backend, rows[name], patch, logs, timeout=timeout, retries=retries)
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
    return GradedPredictions(verdicts, tuple(reports))


async def grade_with_retries(
    backend: InstanceBackend, instance: Instance, patch: str, logs: InstanceLogs, *, timeout: float, retries: int
) -> PatchVerdict:
    """Grade one patch, again after infrastructure failures, at most ``retries`` times.

    The last failure is a verdict of kind ``INFRASTRUCTURE``.
    """
    attempt = 0
    while True:
        verdict = await backend.grade(instance, patch, logs=logs.folder, timeout=timeout)
        attempt += 1
        if verdict.kind is not VerdictKind.INFRASTRUCTURE or attempt > retries:
            return verdict
        await _BACKOFF.wait(attempt)


def summary(verdicts: Mapping[tuple[str, str], PatchVerdict]) -> str:
    """``7 resolved, 2 unresolved, 1 timed out``."""
    counts = Counter(verdict.kind for verdict in verdicts.values())
    parts = [f"{counts[kind]} {kind.value.replace('_', ' ')}" for kind in VerdictKind if counts[kind]]
    flagged = sum(1 for verdict in verdicts.values() if verdict.flagged)
    return ", ".join(parts) + (f"; {flagged} flagged" if flagged else "") if parts else "nothing graded"


def commonest(reasons: Iterable[tuple[str, str]]) -> str:
    """`` (40 times: ...)`` or ``: ...``: the commonest of the reasons of (instance id, reason), or nothing."""
    counts = Counter(reason.removeprefix(f"{name}: ") for name, reason in reasons if reason)
    if not counts:
        return ""
    ((reason, times),) = counts.most_common(1)
    return f": {reason}" if len(counts) == 1 else f"; commonest reason ({times} times): {reason}"
