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
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pydantic import JsonValue, ValidationError

from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.swe.recipes.swe_bench import Parser, Statuses
from openhands_rl_plugin.evals.swe.types import Instance

GOOD = ("PASSED", "XFAIL")

_EXPECTED = re.compile(r"^(?:.*(?:;|&&|\|\|)\s*)?(?:\w+=\S*\s+)*(?:pytest|py\.test|python3?\s[^;&|]*-m pytest)\b", re.M)
_HEREDOC = re.compile(r"<<'?(\w+)'?\n.*?\n\1$", re.M | re.S)
# In the order of pytest's own summary, whose later lines win where a test has two.
_ORDER = ("PASSED", "SKIPPED", "XFAIL", "XPASS", "ERROR", "FAILED")


class PhaseReport(NamedTuple):
    """A phase of a test, as pytest reported it. ``raised``: the name of the exception it raised; ``None``
    when the phase was reported without having been run in that process. ``why``: the exception's message. ``callers``:
    files of the repository among the calls that led to the report.
    """

    name: str
    when: str
    outcome: str
    expected: bool
    raised: str | None
    why: str = ""
    callers: tuple[str, ...] = ()

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
        return [_report(event) for event in self.events_of("report", 7)]

    @property
    def root(self) -> str:
        """The folder that pytest was started in."""
        return next((str(event[0]) for event in self.events_of("start", 2)), "/testbed")


class GuardChannel(NamedTuple):
    """All records of a run. ``rejected``: files in the guard's folder that no supervisor wrote."""

    records: tuple[SupervisorRecord, ...]
    rejected: tuple[str, ...]

    @property
    def root(self) -> str:
        """The folder that the first pytest was started in."""
        return self.records[0].root if self.records else "/testbed"

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
    name, when, outcome, expected, raised, why, callers = event
    files = tuple(map(str, callers)) if isinstance(callers, list) else ()
    said = None if raised is None else str(raised)
    return PhaseReport(str(name), str(when), str(outcome), expected is True, said, str(why), files)


def expects_channel(script: str) -> bool:
    """Whether the script runs pytest in a way that is supervised."""
    return _EXPECTED.search(_HEREDOC.sub("", script)) is not None


def statuses_of(reports: Sequence[PhaseReport], parse: Parser) -> Statuses:
    """The statuses that the log's parser would read from pytest's summary of these reports."""
    lines = {status: [each.name for each in reports if each.status == status] for status in _ORDER}
    return parse("\n".join(f"{status} {name}" for status, names in lines.items() for name in names) + "\n")


def wanted_by(instance: Instance) -> dict[str, None]:
    """The row's tests, each once."""
    return dict.fromkeys((*instance.fail_to_pass, *instance.pass_to_pass))
