"""Grades one patch on one instance: check, apply, run tests, parse the log. Every back end offers a ``Box`` for it.

The log's markers cannot be forged by what runs between them. Bash traces its commands (``set -x``) behind a random
word that it reads from stdin before the script begins; that word is in no file, argument or variable that a test
could see, and it is removed from the stored log. A marker without it was printed by other code.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from openhands_rl_plugin.core.errors import InfrastructureError, RLError, describe
from openhands_rl_plugin.core.redaction import redact_text
from openhands_rl_plugin.environments.workspace.processes import Ended
from openhands_rl_plugin.evals.swe.logs import InstanceLogs
from openhands_rl_plugin.evals.swe.patches import PATCH_INSIDE, apply_patch, refusal
from openhands_rl_plugin.evals.swe.recipes.base import Recipe
from openhands_rl_plugin.evals.swe.recipes.scripts import END, START
from openhands_rl_plugin.evals.swe.recipes.swe_bench import Parser, Statuses, parser_of
from openhands_rl_plugin.evals.swe.resolution import TestFailure, resolution_of, why_unresolved
from openhands_rl_plugin.evals.swe.types import Flag, Instance, PatchVerdict, Severity, VerdictKind

SCRIPT_INSIDE = "/eval.sh"

_APPLY_TIME = 120.0
_FULL = "No space left on device"
_SPOILED = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")


class Box(Protocol):
    """A running container or sandbox with the instance's repository at ``/testbed``, after set-up."""

    async def put(self, inside: str, text: str) -> None:
        """Write ``PATCH_INSIDE`` or ``SCRIPT_INSIDE``."""
        ...

    async def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        given: bytes | None = None,
        tests: bool = False,
    ) -> Ended:
        """Run a command in ``/testbed``. ``tests``: with the guard's equipment."""
        ...

    async def left(self) -> Mapping[str, bytes]:
        """The files in the guard's folder, by name."""
        ...


class GuardEquipment(NamedTuple):
    """What a guard adds to a test run: variables, and files that are mounted read-only in ``/guard``. Tests may write
    into ``/guard-out``; a guard that reads it has to authenticate its own files.
    """

    variables: Mapping[str, str] = {}
    files: Mapping[str, str] = {}


class ObservedRun(NamedTuple):
    """What a guard sees of a run. ``log``: what the tests printed; ``left``: the files in ``/guard-out``; ``script``:
    what ran the tests; ``parse``: how its log is read.

    ``put_back``: files of the patch that the tests did not see.

    ``word``: the random word, which a guard's own programs get from the shell, so that they can prove who they are.
    """

    instance: Instance
    patch: str
    log: str
    statuses: Statuses
    code: int
    left: Mapping[str, bytes]
    word: str
    script: str
    parse: Parser
    put_back: tuple[str, ...] = ()


class Guard(Protocol):
    """Detects reward hacking. A run with a deciding flag is not resolved."""

    def equipment(self, instance: Instance) -> GuardEquipment:
        """What the test run needs."""
        ...

    def check_patch(self, instance: Instance, patch: str) -> tuple[Flag, ...]:
        """Flags of a patch before it is applied."""
        ...

    def check_run(self, observed: ObservedRun) -> tuple[Flag, ...]:
        """Flags of a finished run."""
        ...

    def weigh(self, observed: ObservedRun, flags: tuple[Flag, ...]) -> tuple[Flag, ...]:
        """The flags of patch and run as they count together."""
        ...

    def explain(self, observed: ObservedRun) -> Mapping[str, TestFailure]:
        """Why tests did not pass, by the names that the log's parser gives them; as far as it is known."""
        ...


class NoGuard:
    """A guard without rules."""

    def equipment(self, instance: Instance) -> GuardEquipment:
        """Nothing."""
        return GuardEquipment()

    def check_patch(self, instance: Instance, patch: str) -> tuple[Flag, ...]:
        """None."""
        return ()

    def check_run(self, observed: ObservedRun) -> tuple[Flag, ...]:
        """None."""
        return ()

    def weigh(self, observed: ObservedRun, flags: tuple[Flag, ...]) -> tuple[Flag, ...]:
        """All of them."""
        return flags

    def explain(self, observed: ObservedRun) -> Mapping[str, TestFailure]:
        """Nothing is known beside the log."""
        return {}


class RunLog(NamedTuple):
    """A run's log without the random word; ``tests`` is the part between the markers, ``None`` where they were not
    reached. ``whole``: the end was reached too. ``forged``: lines that look like markers and are not.
    """

    text: str
    tests: str | None
    whole: bool
    forged: tuple[str, ...]


def before_box(instance: Instance, patch: str) -> PatchVerdict | None:
    """The verdict on an empty or refused patch, which needs no box; ``None`` for other patches."""
    if not patch.strip():
        return PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.EMPTY_PATCH, reason="the patch is empty")
    if (why := refusal(patch)) is not None:
        return PatchVerdict(instance_id=instance.instance_id, kind=VerdictKind.REFUSED, reason=why)
    return None


async def evaluate(
    box: Box, instance: Instance, recipe: Recipe, patch: str, logs: InstanceLogs, *, timeout: float, guard: Guard
) -> PatchVerdict:
    """Apply ``patch`` in a fresh box and run the tests. Raises ``InfrastructureError``; ``ConfigError`` for a recipe
    with an unknown parser.
    """
    parse = parser_of(recipe.parser)
    flags = await asyncio.to_thread(guard.check_patch, instance, patch)
    await box.put(PATCH_INSIDE, patch)
    applied = await apply_patch(lambda command, seconds: box.run(command, timeout=seconds), instance, patch)
    logs.write("run_instance.log", redact_text(f"apply:\n{applied.output}"))
    if applied.kind is not None:
        await _check_space(box, applied.output)
        identity = instance.instance_id
        return PatchVerdict(instance_id=identity, kind=applied.kind, reason=applied.reason, flags=flags)
    word = secrets.token_hex(16)
    await box.put(SCRIPT_INSIDE, recipe.evaluation_script)
    start = f"IFS= read -r PS4; exec </dev/null; . {SCRIPT_INSIDE}"
    ended = await box.run(
        ["/bin/bash", "-c", start, SCRIPT_INSIDE],
        timeout=timeout,
        given=f"+{word} \n".encode(),
        tests=True,
    )
    log = read_log(ended.text, word, instance.base_commit)
    short = "\n\nThe output was cut here." if ended.truncated else ""
    late = f"\n\nTimeout error: {timeout:g} seconds exceeded." if ended.timed_out else ""
    logs.write("test_output.txt", log.text + short + late)
    found = PatchVerdict(
        instance_id=instance.instance_id,
        kind=VerdictKind.UNRESOLVED,
        flags=(*flags, *(Flag(rule="log_marker", where="test output", detail=line[:200]) for line in log.forged)),
        test_seconds=ended.seconds,
    )
    if ended.timed_out:
        late = f"the tests were not done after {timeout:g} s"
        return found.model_copy(update={"kind": VerdictKind.TIMED_OUT, "reason": late})
    if log.tests is None and word not in ended.text:
        raise InfrastructureError(f"the tests were not reached: {ended.last_line}")
    # Where the script began, code of the patch may have ended it, as the installation runs that, too.
    tests = log.tests or ""
    whole = log.whole and not any(mark in tests for mark in _SPOILED)
    statuses = parse(tests) if whole else {}
    left = await box.left()
    script, back = recipe.evaluation_script, applied.put_back
    observed = ObservedRun(instance, patch, tests, statuses, ended.code, left, word, script, parse, back)

    def judged() -> tuple[tuple[Flag, ...], Mapping[str, TestFailure]]:
        return guard.weigh(observed, (*found.flags, *guard.check_run(observed))), guard.explain(observed)

    seen, causes = await asyncio.to_thread(judged)
    why = "" if whole else "the run ended before its tests did"
    verdict = _resolved(found, instance, recipe, statuses, seen, causes, why)
    if not verdict.resolved:
        await _check_space(box, log.text)
    return verdict


async def _check_space(box: Box, said: str) -> None:
    """Raise ``InfrastructureError`` when a run failed for want of space: that says nothing about its patch."""
    if _FULL in said:
        fill = "head -c 4194304 /dev/zero >/tmp/space && rm -f /tmp/space"
        if (await box.run(["/bin/sh", "-c", fill], timeout=_APPLY_TIME)).code:
            raise InfrastructureError("no space is left where the tests run")


def _resolved(
    found: PatchVerdict,
    instance: Instance,
    recipe: Recipe,
    statuses: Statuses,
    flags: tuple[Flag, ...],
    causes: Mapping[str, TestFailure],
    cut: str,
) -> PatchVerdict:
    resolution = resolution_of(instance, recipe, statuses)
    resolved = resolution.resolved and not cut
    reason = cut or ("" if resolved else why_unresolved(instance, resolution, statuses, causes))
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
    return RunLog("\n".join(lines), tests, end is not None, tuple(forged))


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
