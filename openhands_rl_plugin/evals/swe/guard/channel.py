"""The supervisors' records of pytest runs, and the flags that follow from them.

A record is signed with the random word of the run, which the shell passes to the supervisor and which no test can
read. Its content was sent by the plugin in the tests' own process: code of a patch that knows this plugin and changes
it in memory can forge that, and only the rules for patches can detect it. Tests that are
not run by ``pytest`` or ``python -m pytest`` in the script's own shell (Django's, SymPy's, tox's) have no channel.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pydantic import JsonValue, ValidationError

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.swe.grading import ObservedRun
from openhands_rl_plugin.evals.swe.guard.patch import without_outcomes
from openhands_rl_plugin.evals.swe.guard.rules import is_test_tool
from openhands_rl_plugin.evals.swe.patches import touched_files
from openhands_rl_plugin.evals.swe.recipes.parsers import Parser, Statuses
from openhands_rl_plugin.evals.swe.types import Flag, Instance, Severity

GOOD = ("PASSED", "XFAIL")

_EXPECTED = re.compile(r"^(?:.*(?:;|&&|\|\|)\s*)?(?:\w+=\S*\s+)*(?:pytest|py\.test|python3?\s[^;&|]*-m pytest)\b", re.M)
_HEREDOC = re.compile(r"<<'?(\w+)'?\n.*?\n\1$", re.M | re.S)
# In the order of pytest's own summary, whose later lines win where a test has two.
_ORDER = ("PASSED", "SKIPPED", "XFAIL", "XPASS", "ERROR", "FAILED")
_SKIPS = ("", "Skipped", "SkipTest", "XFailed")
_MOST = 5
"""Flags of one rule and run, at most: a row may have thousands of tests."""


class PhaseReport(NamedTuple):
    """A phase of a test, as pytest reported it. ``raised``: the name of the exception it raised; ``None``
    when the phase was reported without having been run in that process.
    """

    name: str
    when: str
    outcome: str
    expected: bool
    raised: str | None

    @property
    def status(self) -> str | None:
        """As in the summary's lines."""
        if self.expected:
            return {"skipped": "XFAIL", "passed": "XPASS"}.get(self.outcome)
        if self.when != "call":
            return {"failed": "ERROR", "skipped": "SKIPPED"}.get(self.outcome)
        return {"passed": "PASSED", "failed": "FAILED", "skipped": "SKIPPED"}.get(self.outcome)


class SupervisorRecord(Frozen):
    """One supervised command. ``status``: its exit status, negative for a signal. ``forged``: lines on the channel that
    the plugin did not send; ``cut``: there were more than are kept.
    """

    status: int
    began: float
    events: tuple[tuple[JsonValue, ...], ...]
    forged: int
    cut: bool

    def events_of(self, kind: str, values: int) -> Iterator[tuple[JsonValue, ...]]:
        """The events of a kind, without its name; those with another number of values are ignored."""
        return (event[1:] for event in self.events if len(event) == values + 1 and event[0] == kind)

    @property
    def reports(self) -> list[PhaseReport]:
        """Phases of tests, in order."""
        return [_report(event) for event in self.events_of("report", 5)]

    @property
    def root(self) -> str:
        """The folder that pytest was started in."""
        return next((str(event[0]) for event in self.events_of("start", 2)), "/testbed")


class GuardChannel(NamedTuple):
    """All records of a run. ``rejected``: files in the guard's folder that no supervisor wrote."""

    records: tuple[SupervisorRecord, ...]
    rejected: tuple[str, ...]

    @property
    def elsewhere(self) -> bool:
        """Whether tests ran in other processes, so that phases are reported only."""
        return any(event[1] for each in self.records for event in each.events_of("start", 2))


def read_channel(left: Mapping[str, bytes], word: str) -> GuardChannel:
    """The records in the guard's folder."""
    records: list[SupervisorRecord] = []
    rejected: list[str] = []
    for name, content in sorted(left.items()):
        digest, _, body = content.partition(b"\n")
        signed = hmac.new(word.encode(), body, hashlib.sha256).hexdigest().encode()
        try:
            record = SupervisorRecord.model_validate(json.loads(body)) if hmac.compare_digest(digest, signed) else None
        except (ValueError, ValidationError, RecursionError):
            record = None
        if record is None:
            rejected.append(name)
        else:
            records.append(record)
    return GuardChannel(tuple(sorted(records, key=lambda each: each.began)), tuple(rejected))


def _report(event: Sequence[JsonValue]) -> PhaseReport:
    name, when, outcome, expected, raised = event
    return PhaseReport(str(name), str(when), str(outcome), expected is True, None if raised is None else str(raised))


def expects_channel(script: str) -> bool:
    """Whether the script runs pytest in a way that is supervised."""
    return _EXPECTED.search(_HEREDOC.sub("", script)) is not None


def statuses_of(reports: Sequence[PhaseReport], parse: Parser) -> Statuses:
    """The statuses that the log's parser would read from pytest's summary of these reports."""
    lines = {status: [each.name for each in reports if each.status == status] for status in _ORDER}
    return parse("\n".join(f"{status} {name}" for status, names in lines.items() for name in names) + "\n")


def flags_of_run(observed: ObservedRun) -> tuple[Flag, ...]:
    """The flags of a run from its channel, or from the lack of one."""
    channel = read_channel(observed.left, observed.word)
    flags = [Flag(rule="guard_files", where=f"/guard-out/{name}", detail="no record") for name in channel.rejected]
    if not channel.records:
        if expects_channel(observed.script):
            return (*flags, Flag(rule="channel_silent", where="test command", detail="no record of pytest's run"))
        why = "the tests are not run by pytest from the script: outcomes are from the log alone"
        note = Flag(rule="no_channel", where="test command", detail=why, severity=Severity.NOTE)
        return (*flags, note, *without_outcomes(observed.instance, observed.patch))
    for record in channel.records:
        flags += _endings(record, expects_channel(observed.script))
    flags += _against_log(observed, channel)
    flags += _rewritten(channel, observed)
    flags += _tampered(channel, observed)
    return tuple(dict.fromkeys(flags))


def _endings(record: SupervisorRecord, expected: bool) -> Iterator[Flag]:
    if record.cut:
        yield Flag(rule="channel_forged", where="channel", detail="more was sent than tests have to say")
    if record.forged:
        yield Flag(rule="channel_forged", where="channel", detail=f"{record.forged} lines that the plugin did not send")
    for (name,) in record.events_of("stopped", 1):
        if name == "SystemExit":
            yield Flag(rule="process_exit", where="collection", detail="SystemExit ended pytest's session")
    started, finished = any(record.events_of("start", 2)), any(record.events_of("finish", 1))
    if started and not finished and record.status >= 0:
        said = f"pytest ended with status {record.status} before its session did"
        yield Flag(rule="process_exit", where="test run", detail=said)
    if expected and not started and record.status == 0:
        yield Flag(rule="process_exit", where="test run", detail="pytest ended with status 0 without a session")


def _against_log(observed: ObservedRun, channel: GuardChannel) -> Iterator[Flag]:
    """Tests of the row which passed in the log and not in the channel."""
    found: Statuses = {}
    for record in channel.records:
        found |= statuses_of(record.reports, observed.parse)
    passed = [name for name in _wanted(observed.instance) if observed.statuses.get(name) in GOOD]
    wrong = [name for name in passed if found.get(name) not in GOOD]
    for name in wrong[:_MOST]:
        real = found.get(name, "not run")
        said = f"{observed.statuses[name]} in the log, {real} by pytest's own word ({len(wrong)} such tests)"
        yield Flag(rule="forged_log", where=name, detail=said)


def _rewritten(channel: GuardChannel, observed: ObservedRun) -> Iterator[Flag]:
    """Tests of the row that passed by their report although they raised, or were never run."""
    wanted = _wanted(observed.instance)
    reports = (each for record in channel.records for each in record.reports if each.when == "call")
    passed = [each for each in {each.name: each for each in reports}.values() if each.status == "PASSED"]
    odd = [each for each in passed if each.raised not in _SKIPS and not (each.raised is None and channel.elsewhere)]
    wrong = [each for each in odd if not wanted.keys().isdisjoint(observed.parse(f"PASSED {each.name}\n"))]
    for each in wrong[:_MOST]:
        said = "reported without having been run" if each.raised is None else f"raised {each.raised}"
        detail = f"passed by its report, but {said} ({len(wrong)} such tests)"
        yield Flag(rule="rewritten_report", where=each.name, detail=detail)


def _wanted(instance: Instance) -> dict[str, None]:
    return dict.fromkeys((*instance.fail_to_pass, *instance.pass_to_pass))


def _tampered(channel: GuardChannel, observed: ObservedRun) -> Iterator[Flag]:
    changed = touched_files(observed.patch) - touched_files(observed.instance.test_patch) - observed.instance.test_files
    needed, tool = touched_files(observed.instance.patch), is_test_tool(observed.instance)
    decides = Severity.COUNTED if tool else Severity.DECIDES
    for record in channel.records:
        for name, place, new in record.events_of("hook", 3):
            file = _inside(str(place), record.root)
            if new is True or file in changed:
                wanted = file in needed and file.endswith("conftest.py")
                severity = Severity.COUNTED if wanted and new is not True else decides
                yield Flag(rule="pytest_hook", where=file or str(place), detail=str(name), severity=severity)
        for path, place in record.events_of("replaced", 2):
            file = _inside(str(place), record.root)
            if file in changed or (not file and not str(place).startswith("/")):
                severity = decides if file else Severity.COUNTED
                yield Flag(rule="replaced_function", where=file or str(place), detail=str(path), severity=severity)
        for (ways,) in record.events_of("softened", 1):
            for way in ways if isinstance(ways, list) else ():
                said = f"{way}: what has to fail passed"
                yield Flag(rule="softened_tests", where="test run", detail=said, severity=decides)


def _inside(place: str, root: str) -> str:
    """The path of a file in the repository; empty for others, and for code without a file."""
    path = os.path.normpath(os.path.join(root, place))
    inside = bool(place) and not place.startswith("<") and path.startswith(root + "/")
    return path[len(root) + 1 :] if inside else ""
