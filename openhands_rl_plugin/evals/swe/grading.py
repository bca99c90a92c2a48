"""Grades one patch on one instance: check, apply, run tests, parse the log, compare. Every back end offers a ``Box``.

The log's markers cannot be forged by what runs between them. Bash traces its commands (``set -x``) behind a random
word that it reads from stdin before the script begins; that word is in no file, argument or variable that a test
could see, and it is removed from the stored log. A marker without it was printed by other code.

``grade_all`` grades many predictions: concurrent, resumable, with the files of the official tools:
``logs/run_evaluation/<run>/<model>/<instance>/{patch.diff,eval.sh,test_output.txt,report.json,run_instance.log}``.
In addition, ``verdict.json`` has the kind of verdict, which a report lacks. ``report.json`` exists only when the tests
finished, because the official tools count its absence as an error.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from openhands_rl_plugin.core.errors import InfrastructureError, RLError, boundary
from openhands_rl_plugin.core.files import PRIVATE, write_file
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.core.types import FailureKind, JsonObject
from openhands_rl_plugin.environments.workspace.processes import Ended
from openhands_rl_plugin.evals.swe.instances import (
    Box,
    Flag,
    Instance,
    InstanceBackend,
    PatchPrediction,
    PatchVerdict,
    Severity,
    TestsStatus,
    VerdictKind,
)
from openhands_rl_plugin.evals.swe.patches import Applied, apply_patch, refusal
from openhands_rl_plugin.evals.swe.recipes import END, START, Recipe, Statuses, parser_of

if TYPE_CHECKING:
    from openhands_rl_plugin.evals.swe.guard import RewardHackGuard

# The script is in no file: tests could read there what they are expected to do.
_START = 'IFS= read -r PS4; script=$(cat); exec </dev/null; eval "set -x\n$script"'
_SPACE_TIME = 120.0
_FULL = "No space left on device"
_SPOILED = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
_GOOD, _BAD = ("PASSED", "XFAIL"), ("FAILED", "ERROR")


_TESTED = (VerdictKind.RESOLVED, VerdictKind.UNRESOLVED)
_FINISHED = (*_TESTED, VerdictKind.EMPTY_PATCH)


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


def run_report(found: Mapping[str, VerdictKind], instances: list[str], submitted: list[str]) -> JsonObject:
    """The report of a run (schema version 2)."""

    def of(*kinds: VerdictKind) -> list[str]:
        return sorted(name for name, each in found.items() if each in kinds)

    ids = {
        "submitted": sorted(submitted),
        "completed": of(*_TESTED),
        "resolved": of(VerdictKind.RESOLVED),
        "unresolved": of(VerdictKind.UNRESOLVED),
        "empty_patch": of(VerdictKind.EMPTY_PATCH),
        "error": of(*(kind for kind in VerdictKind if kind not in _FINISHED)),
    }
    return {
        "total_instances": len(instances),
        **{f"{name}_instances": len(each) for name, each in ids.items()},
        **{f"{name}_ids": [*each] for name, each in ids.items()},
        "incomplete_ids": [*sorted({*instances} - {*found})],
        "schema_version": 2,
        "unstopped_instances": 0,
        "unstopped_containers": [],
        "unremoved_images": [],
    }


class Grading(NamedTuple):
    """A patch and where it is graded, every run in a fresh box; ``timeout``: seconds of one run of the tests."""

    open_box: Callable[[], AbstractAsyncContextManager[Box]]
    instance: Instance
    recipe: Recipe
    patch: str
    timeout: float


class RunLog(NamedTuple):
    """A run's log without the random word; ``tests`` is the part between the markers, ``None`` where not both were
    reached. ``forged``: lines that look like markers and are not. ``traced``: the script's own commands.
    """

    text: str = ""
    tests: str | None = None
    forged: tuple[str, ...] = ()
    traced: tuple[str, ...] = ()


class TestRun(NamedTuple):
    """A run of the tests; without ``ended`` where the patch was not applied. ``cut``: why there is no
    outcome, if there is none.
    """

    __test__ = False  # no test class for pytest

    applied: Applied
    log: RunLog
    statuses: Statuses
    ended: Ended | None = None
    cut: str = ""


class Resolution(NamedTuple):
    """The passed and failed tests of both groups."""

    fail_to_pass: TestsStatus
    pass_to_pass: TestsStatus

    @property
    def resolved(self) -> bool:
        """Whether at least one test of the row passed, and none failed."""
        return any(group.success for group in self) and not any(group.failure for group in self)


def resolution_of(instance: Instance, recipe: Recipe, statuses: Statuses) -> Resolution:
    """The resolution of a run, as ``swebench`` decides it. A skipped FAIL_TO_PASS test counts as failed; a skipped
    PASS_TO_PASS test is ignored.
    """
    only_failures = recipe.eval_type == "fail_only"

    def status(names: Iterable[str], bad: Sequence[str]) -> TestsStatus:
        outcomes = [(name, statuses.get(name, "PASSED" if only_failures else "FAILED")) for name in names]
        failed = tuple(name for name, outcome in outcomes if outcome in (["FAILED"] if only_failures else bad))
        good = [name for name, outcome in outcomes if outcome in _GOOD or (only_failures and outcome != "FAILED")]
        return TestsStatus(success=tuple(good), failure=failed)

    return Resolution(status(instance.fail_to_pass, (*_BAD, "SKIPPED")), status(instance.pass_to_pass, _BAD))


def why_unresolved(instance: Instance, resolution: Resolution, run: TestRun) -> str:
    """For example ``1 of 1 F2P failed; 5 of 59 P2P failed``."""
    named = {"F2P": instance.fail_to_pass, "P2P": instance.pass_to_pass}
    failed = [len(each.failure) for each in resolution]
    parts = [f"{n} of {len(named[name])} {name} failed" for name, n in zip(named, failed, strict=True) if n]
    return run.cut or ("; ".join(parts) if run.statuses else "no test in the log") or "no test of the row ran"


async def evaluate(grading: Grading, logs: InstanceLogs, guard: RewardHackGuard | None) -> PatchVerdict:
    """Apply the patch in a fresh box and run the tests. Raises ``InfrastructureError``; ``ConfigError`` for a recipe
    with an unknown parser.
    """
    instance, recipe = grading.instance, grading.recipe
    run = await run_tests(grading, grading.patch, guard.script(grading) if guard else recipe.evaluation_script)
    logs.write("run_instance.log", redact_text(f"apply:\n{run.applied.output}"))
    if run.ended is None:
        kind = run.applied.kind or VerdictKind.UNAPPLIED
        return PatchVerdict(instance_id=instance.instance_id, kind=kind, reason=run.applied.reason)
    short = "\n\nThe output was cut here." if run.ended.truncated else ""
    late = f"\n\nTimeout error: {grading.timeout:g} seconds exceeded." if run.ended.timed_out else ""
    logs.write("test_output.txt", run.log.text + short + late)
    resolution = resolution_of(instance, recipe, run.statuses)
    flags = [Flag(rule="log_marker", where="test output", detail=line[:200]) for line in run.log.forged]
    passed = resolution.resolved and not run.cut
    if guard and not late:
        flags += await guard.flags(grading, run, passed=passed and not flags)
    deciding = sorted({flag.rule for flag in flags if flag.severity is Severity.DECIDES})
    reason = f"flagged: {', '.join(deciding)}" if deciding else ""
    kind = VerdictKind.RESOLVED if passed and not deciding else VerdictKind.UNRESOLVED
    return PatchVerdict(
        instance_id=instance.instance_id,
        kind=VerdictKind.TIMED_OUT if late else kind,
        reason=reason if passed else why_unresolved(instance, resolution, run),
        flags=tuple(flags),
        test_seconds=run.ended.seconds,
        fail_to_pass=TestsStatus() if late else resolution.fail_to_pass,
        pass_to_pass=TestsStatus() if late else resolution.pass_to_pass,
    )


async def run_tests(grading: Grading, patch: str, script: str) -> TestRun:
    """Apply a patch in a fresh box and run the tests by ``script``. Raises ``InfrastructureError``; ``ConfigError`` for
    a recipe with an unknown parser.
    """
    parse = parser_of(grading.recipe.parser)
    async with grading.open_box() as box:
        applied = await apply_patch(box, grading.instance, patch)
        if applied.kind is not None:
            await _check_space(box, applied.output)
            return TestRun(applied, RunLog(), {})
        word = secrets.token_hex(16)
        command, given = ["/bin/bash", "-c", _START, "eval.sh"], f"+{word} \n{script}".encode()
        ended = await box.run(command, timeout=grading.timeout, given=given, tests=True)
        await _check_space(box, ended.text)
    log = read_log(ended.text, word)
    if ended.timed_out:
        return TestRun(applied, log, {}, ended, f"the tests were not done after {grading.timeout:g} s")
    if word not in ended.text:
        raise InfrastructureError(f"the tests were not reached: {ended.last_line}")
    # Where the script began, code of the patch may have ended it, as the installation runs that, too.
    if log.tests is None or any(mark in log.tests for mark in _SPOILED):
        return TestRun(applied, log, {}, ended, "the run ended before its tests did")
    return TestRun(applied, log, parse(log.tests), ended)


async def _check_space(box: Box, printed: str) -> None:
    """Raise ``InfrastructureError`` when a run failed for want of space: that says nothing about its patch."""
    if _FULL in printed:
        fill = "head -c 4194304 /dev/zero >/tmp/space && rm -f /tmp/space"
        if (await box.run(["/bin/sh", "-c", fill], timeout=_SPACE_TIME)).code:
            raise InfrastructureError("no space is left where the tests run")


def read_log(text: str, word: str) -> RunLog:
    """Find the tests in a traced log and remove the random ``word`` from it."""
    lines = text.split("\n")
    # Output before a traced command may lack its newline.
    trace = re.compile(rf"\++{word} (.*)$")
    commands = {at: match[1] for at, line in enumerate(lines) if (match := trace.search(line))}
    begin = next((at for at, command in commands.items() if command == f": '{START}'"), len(lines))
    end = next((at for at, command in commands.items() if command == f": '{END}'" and at > begin), len(lines))
    forged: list[str] = []
    for at, line in enumerate(lines):
        if at not in commands and (START in line or END in line):
            # Official tools split the log at the markers: they must find the same ones.
            lines[at] = line.replace(">>>>> ", "> > > ")
            forged += [line] if begin < at < end else []
    tests = "\n".join(lines[begin + 1 : end]) if end < len(lines) else None
    # The script is read by another shell, which makes every trace one character longer than the official one.
    lines = [re.sub(rf"\+(\+*){word}", r"\1", line) if word in line else line for line in lines]
    return RunLog("\n".join(lines), tests, tuple(forged), tuple(commands.values()))


async def grade_and_log(
    instance: Instance, patch: str, logs: InstanceLogs, grade: Callable[[], Awaitable[PatchVerdict]]
) -> PatchVerdict:
    """The verdict with its time and logs; failures of the infrastructure are verdicts, too. An empty or refused patch
    is not graded.
    """
    began = time.monotonic()
    verdict = PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.EMPTY_PATCH, reason="the patch is empty")
    try:
        if patch.strip() and (why := refusal(patch)) is not None:
            verdict = verdict.model_copy(update={"kind": VerdictKind.REFUSED, "reason": why})
        elif patch.strip():
            logs.write_patch(patch)
            with boundary(FailureKind.GRADER, "instance.grade"):
                verdict = await grade()
    except RLError as error:
        # Messages of ``RLError`` are complete.
        reason = str(error.__cause__ if isinstance(error.__cause__, RLError) else error)
        verdict = verdict.model_copy(update={"kind": VerdictKind.INFRASTRUCTURE, "reason": reason})
    verdict = verdict.model_copy(update={"seconds": time.monotonic() - began, "logs": str(logs.folder)})
    logs.write_verdict(verdict)
    return verdict


class BoxBackend:
    """Grades each patch in a box of its own, which ``box`` makes. ``network`` is for the tests."""

    def __init__(self, guard: RewardHackGuard | None, *, network: bool) -> None:
        self._guard = guard
        self._network = network

    def box(self, instance: Instance, recipe: Recipe) -> AbstractAsyncContextManager[Box]:
        """A box with the instance's repository after its set-up; it is removed at the block's end."""
        raise NotImplementedError

    async def recipe(self, instance: Instance) -> Recipe:
        """The instance's recipe. Raises as ``recipe_of`` does."""
        raise NotImplementedError

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """The verdict on ``patch``; ``logs`` is the instance's folder. Never raises for what a patch does."""
        written = InstanceLogs(logs)

        async def grade() -> PatchVerdict:
            recipe = await self.recipe(instance)
            written.write("eval.sh", recipe.evaluation_script)
            open_box = functools.partial(self.box, instance, recipe)
            return await evaluate(Grading(open_box, instance, recipe, patch, timeout), written, self._guard)

        return await grade_and_log(instance, patch, written, grade)


async def grade_all(
    backend: InstanceBackend,
    instances: Sequence[Instance],
    predictions: Sequence[PatchPrediction],
    out: Path,
    *,
    run_id: str = "run",
    workers: int = 1,
    timeout: float = 1800.0,
    on_verdict: Callable[[PatchPrediction, PatchVerdict], None] = lambda prediction, verdict: None,
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
            found = {name: verdicts[model, name].kind for name in submitted if (model, name) in verdicts}
            reports.append(out / f"{folder}.{run_id}.json")
            write_file(reports[-1], json.dumps(run_report(found, list(rows), submitted), indent=4), PRIVATE)
    return verdicts, reports


def summary(verdicts: Mapping[tuple[str, str], PatchVerdict]) -> str:
    """``7 resolved, 2 unresolved, 1 timed out``."""
    counts = Counter(verdict.kind for verdict in verdicts.values())
    parts = [f"{counts[kind]} {kind.value.replace('_', ' ')}" for kind in VerdictKind if counts[kind]]
    flagged = sum(1 for verdict in verdicts.values() if verdict.flagged)
    return ", ".join(parts) + (f"; {flagged} flagged" if flagged else "") if parts else "nothing graded"
