"""Grades one patch on one instance: check, apply, run tests, parse the log. Every back end offers a ``Box`` for it.

The log's markers cannot be forged by what runs between them. Bash traces its commands (``set -x``) behind a random
word that it reads from stdin before the script begins; that word is in no file, argument or variable that a test
could see, and it is removed from the stored log. A marker without it was printed by other code.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from openhands_rl_plugin.core.errors import InfrastructureError, RLError, describe
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.environments.workspace.processes import Ended
from openhands_rl_plugin.evals.swe.logs import InstanceLogs
from openhands_rl_plugin.evals.swe.patches import PATCH_INSIDE, Applied, apply_patch, refusal
from openhands_rl_plugin.evals.swe.recipes.base import Recipe
from openhands_rl_plugin.evals.swe.recipes.scripts import END, START
from openhands_rl_plugin.evals.swe.recipes.swe_bench import Statuses, parser_of
from openhands_rl_plugin.evals.swe.resolution import TestFailure, resolution_of, why_unresolved
from openhands_rl_plugin.evals.swe.types import Flag, Instance, PatchVerdict, Severity, VerdictKind

# The script is in no file: tests could read there what they are expected to do.
_START = 'IFS= read -r PS4; script=$(cat); exec </dev/null; eval "$script"'
_APPLY_TIME = 120.0
_FULL = "No space left on device"
_FAILURE = re.compile(r"^(FAILED|ERROR) +(\S[^\n]*?) - ([^\n]+)$", re.M)
_SPOILED = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")


class Box(Protocol):
    """A running container or sandbox with the instance's repository at ``/testbed``, after set-up."""

    async def put(self, inside: str, text: str) -> None:
        """Write ``PATCH_INSIDE``."""
        ...

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        given: bytes | None = None,
        tests: bool = False,
    ) -> Ended:
        """Run a command in ``/testbed``. ``tests``: with what tests need of a network."""
        ...


OpenBox = Callable[[], AbstractAsyncContextManager[Box]]
"""Makes a fresh box, which is gone after the block."""


class Grading(NamedTuple):
    """A patch and where it is graded, every run in a box of its own; ``timeout``: seconds of one run of the tests."""

    open_box: OpenBox
    instance: Instance
    recipe: Recipe
    patch: str
    timeout: float


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

    @property
    def tests(self) -> str:
        """What the tests printed."""
        return self.log.tests or ""


class Guard(Protocol):
    """Detects reward hacking. A run with a deciding flag is not resolved."""

    def script(self, grading: Grading) -> str:
        """What runs the tests, in the place of the recipe's script."""
        ...

    async def flags(self, grading: Grading, run: TestRun, *, passed: bool) -> tuple[Flag, ...]:
        """Flags of a finished run, which may need other runs; ``passed``: it resolves the instance without them."""
        ...


class RunLog(NamedTuple):
    """A run's log without the random word; ``tests`` is the part between the markers, ``None`` where they were not
    reached. ``whole``: the end was reached too. ``forged``: lines that look like markers and are not. ``traced``: the
    script's own commands.
    """

    text: str = ""
    tests: str | None = None
    whole: bool = False
    forged: tuple[str, ...] = ()
    traced: tuple[str, ...] = ()


def before_box(instance: Instance, patch: str) -> PatchVerdict | None:
    """The verdict on an empty or refused patch, which needs no box; ``None`` for other patches."""
    if not patch.strip():
        return PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.EMPTY_PATCH, reason="the patch is empty")
    if (why := refusal(patch)) is not None:
        return PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.REFUSED, reason=why)
    return None


async def evaluate(grading: Grading, logs: InstanceLogs, guard: Guard | None) -> PatchVerdict:
    """Apply the patch in a fresh box and run the tests. Raises ``InfrastructureError``; ``ConfigError`` for a recipe
    with an unknown parser.
    """
    instance = grading.instance
    run = await run_tests(grading, grading.patch, guard.script(grading) if guard else grading.recipe.evaluation_script)
    logs.write("run_instance.log", redact_text(f"apply:\n{run.applied.output}"))
    found = PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.UNRESOLVED, reason=run.applied.reason)
    if run.ended is None:
        return found.model_copy(update={"kind": run.applied.kind})
    short = "\n\nThe output was cut here." if run.ended.truncated else ""
    late = f"\n\nTimeout error: {grading.timeout:g} seconds exceeded." if run.ended.timed_out else ""
    logs.write("test_output.txt", run.log.text + short + late)
    forged = (Flag(rule="log_marker", where="test output", detail=line[:200]) for line in run.log.forged)
    found = found.model_copy(update={"flags": tuple(forged), "test_seconds": run.ended.seconds})
    if late:
        return found.model_copy(update={"kind": VerdictKind.TIMED_OUT, "reason": run.cut})
    verdict = _resolved(found, grading, run)
    if guard is None:
        return verdict
    return _resolved(found, grading, run, await guard.flags(grading, run, passed=verdict.resolved))


async def run_tests(grading: Grading, patch: str, script: str) -> TestRun:
    """Apply a patch in a fresh box and run the tests by ``script``. Raises ``InfrastructureError``; ``ConfigError`` for
    a recipe with an unknown parser.
    """
    instance, recipe = grading.instance, grading.recipe
    parse = parser_of(recipe.parser)
    async with grading.open_box() as box:
        await box.put(PATCH_INSIDE, patch)
        applied = await apply_patch(lambda command, seconds: box.run(command, timeout=seconds), instance, patch)
        if applied.kind is not None:
            await _check_space(box, applied.output)
            return TestRun(applied, RunLog(), {})
        word = secrets.token_hex(16)
        ended = await box.run(
            ["/bin/bash", "-c", _START, "eval.sh"],
            timeout=grading.timeout,
            given=f"+{word} \n{script}".encode(),
            tests=True,
        )
        await _check_space(box, ended.text)
    log = read_log(ended.text, word, instance.base_commit)
    if ended.timed_out:
        return TestRun(applied, log, {}, ended, f"the tests were not done after {grading.timeout:g} s")
    if log.tests is None and word not in ended.text:
        raise InfrastructureError(f"the tests were not reached: {ended.last_line}")
    # Where the script began, code of the patch may have ended it, as the installation runs that, too.
    if not log.whole or any(mark in (log.tests or "") for mark in _SPOILED):
        return TestRun(applied, log, {}, ended, "the run ended before its tests did")
    return TestRun(applied, log, parse(log.tests or ""), ended)


async def _check_space(box: Box, said: str) -> None:
    """Raise ``InfrastructureError`` when a run failed for want of space: that says nothing about its patch."""
    if _FULL in said:
        fill = "head -c 4194304 /dev/zero >/tmp/space && rm -f /tmp/space"
        if (await box.run(["/bin/sh", "-c", fill], timeout=_APPLY_TIME)).code:
            raise InfrastructureError("no space is left where the tests run")


def _resolved(found: PatchVerdict, grading: Grading, run: TestRun, flags: tuple[Flag, ...] = ()) -> PatchVerdict:
    instance, flags = grading.instance, (*found.flags, *flags)
    resolution = resolution_of(instance, grading.recipe, run.statuses)
    resolved = resolution.resolved and not run.cut
    causes = {} if resolved else _causes(grading, run)
    reason = run.cut or ("" if resolved else why_unresolved(instance, resolution, run.statuses, causes))
    if resolved and (deciding := sorted({flag.rule for flag in flags if flag.severity is Severity.DECIDES})):
        resolved, reason = False, f"flagged: {', '.join(deciding)}"
    return found.model_copy(
        update={
            "kind": VerdictKind.RESOLVED if resolved else VerdictKind.UNRESOLVED,
            "reason": reason,
            "flags": flags,
            "fail_to_pass": resolution.fail_to_pass,
            "pass_to_pass": resolution.pass_to_pass,
        }
    )


def _causes(grading: Grading, run: TestRun) -> dict[str, TestFailure]:
    """Why tests did not pass, by the summary of pytest."""
    parse, row = parser_of(grading.recipe.parser), grading.instance
    causes: dict[str, TestFailure] = {}
    for status, name, why in _FAILURE.findall(run.tests):
        alike = [each for each in (*row.fail_to_pass, *row.pass_to_pass) if each.startswith(f"{name}::")]
        when = "call" if status == "FAILED" else "collect" if alike else "setup"
        causes |= {each: TestFailure(when, why) for each in alike or parse(f"{status} {name}\n")}
    return causes


def read_log(text: str, word: str, base_commit: str) -> RunLog:
    """Find the tests in a traced log and remove the random ``word`` from it."""
    lines = text.split("\n")
    # Output before a traced command may lack its newline.
    trace = re.compile(rf"\++{word} (.*)$")
    commands = {at: match[1] for at, line in enumerate(lines) if (match := trace.search(line))}
    begin, end = _bounds(commands, base_commit)
    printed: set[int] = set()
    if not commands:
        begin, end = _printed_bounds(lines)
        printed = {at for at in (begin, end) if at is not None}
    forged: list[str] = []
    for at, line in enumerate(lines):
        if at not in {*commands, *printed} and (START in line or END in line):
            # Official tools split the log at the markers: they must find the same ones.
            lines[at] = line.replace(">>>>> ", "> > > ")
            if begin is not None and at > begin and (end is None or at < end):
                forged.append(line)
    # The script is read by another shell, which makes every trace one character longer than the official one.
    lines = [re.sub(rf"\+(\+*){word}", r"\1", line) if word in line else line for line in lines]
    tests = None if begin is None else "\n".join(lines[begin + 1 : end])
    return RunLog("\n".join(lines), tests, end is not None, tuple(forged), tuple(commands.values()))


def _bounds(commands: Mapping[int, str], base_commit: str) -> tuple[int | None, int | None]:
    """The lines where the tests begin and end: at the markers, or, in SWE-Gym's scripts, which have none, at the last
    command before the tests and the one after them.
    """
    started = [at for at, command in commands.items() if command == f": '{START}'"]
    if started:
        ended = [at for at, command in commands.items() if command == f": '{END}'" and at > started[0]]
        return started[0], ended[0] if ended else None
    applied = [at for at, command in commands.items() if command.startswith("git apply -v -")]
    if not applied:
        return None, None
    restored = f"git checkout {base_commit}"
    ended = [at for at, command in commands.items() if command.startswith(restored) and at > applied[-1]]
    return applied[-1], ended[-1] if ended else None


def _printed_bounds(lines: Sequence[str]) -> tuple[int | None, int | None]:
    """The markers of a script that does not trace its commands."""
    started = [at for at, line in enumerate(lines) if START in line]
    ended = [at for at, line in enumerate(lines) if END in line]
    return (started[0], ended[-1] if ended and ended[-1] > started[0] else None) if started else (None, None)


async def grade_and_log(
    instance: Instance, patch: str, logs: InstanceLogs, grade: Callable[[], Awaitable[PatchVerdict]]
) -> PatchVerdict:
    """The verdict with its time and logs; infrastructure failures are verdicts, too. An empty or refused patch is not
    graded.
    """
    began = time.monotonic()
    verdict = before_box(instance, patch)
    try:
        if verdict is None:
            logs.write_patch(patch)
            verdict = await grade()
    except (RLError, OSError) as error:
        # Messages of ``RLError`` are complete.
        reason = str(error) if isinstance(error, RLError) else describe(error)
        verdict = PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.INFRASTRUCTURE, reason=reason)
    verdict = verdict.model_copy(update={"seconds": time.monotonic() - began, "logs": str(logs.folder)})
    logs.write_verdict(verdict)
    return verdict
