"""Compares test outcomes with FAIL_TO_PASS and PASS_TO_PASS as ``swebench`` does, and says why a patch does not resolve
its instance.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from openhands_rl_plugin.evals.swe.recipes.base import Recipe
from openhands_rl_plugin.evals.swe.recipes.swe_bench import Statuses
from openhands_rl_plugin.evals.swe.types import Instance, TestsStatus

_GOOD, _BAD = ("PASSED", "XFAIL"), ("FAILED", "ERROR")


class Resolution(NamedTuple):
    """The passed and failed tests of both groups."""

    fail_to_pass: TestsStatus
    pass_to_pass: TestsStatus

    @property
    def resolved(self) -> bool:
        """Whether at least one test of the row passed, and none failed."""
        groups = (self.fail_to_pass, self.pass_to_pass)
        return any(group.success for group in groups) and not any(group.failure for group in groups)


def resolution_of(instance: Instance, recipe: Recipe, statuses: Statuses) -> Resolution:
    """The resolution of a run. A skipped FAIL_TO_PASS test counts as failed; a skipped PASS_TO_PASS test is ignored,
    as in the official tools.
    """
    only_failures = recipe.eval_type == "fail_only"

    def status(names: Iterable[str], bad: Sequence[str]) -> TestsStatus:
        outcomes = [(name, statuses.get(name, "PASSED" if only_failures else "FAILED")) for name in names]
        failed = tuple(name for name, outcome in outcomes if outcome in (["FAILED"] if only_failures else bad))
        good = [name for name, outcome in outcomes if outcome in _GOOD or (only_failures and outcome != "FAILED")]
        return TestsStatus(success=tuple(good), failure=failed)

    return Resolution(status(instance.fail_to_pass, (*_BAD, "SKIPPED")), status(instance.pass_to_pass, _BAD))


_LONGEST = 160
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_DID = {
    "setup": "errored in set-up",
    "teardown": "errored in tear-down",
    "collect": "could not be collected",
    "call": "failed",
}


class TestFailure(NamedTuple):
    """``when``: ``setup``, ``call``, ``teardown`` or ``collect``; ``message``: of the exception, its first line."""

    __test__ = False  # no test class for pytest

    when: str
    message: str


def why_unresolved(
    instance: Instance, resolution: Resolution, statuses: Statuses, causes: Mapping[str, TestFailure]
) -> str:
    """For example ``1 of 1 F2P failed: ValueError: x; 5 of 59 P2P errored in set-up: recursive dependency``."""
    if not statuses and not causes:
        return "no test in the log"
    groups = (
        ("F2P", instance.fail_to_pass, resolution.fail_to_pass.failure),
        ("P2P", instance.pass_to_pass, resolution.pass_to_pass.failure),
    )
    return (
        "; ".join(
            part for name, wanted, failed in groups for part in _parts(name, len(wanted), failed, statuses, causes)
        )
        or "no test of the row ran"
    )


def _parts(
    group: str, whole: int, failed: Sequence[str], statuses: Statuses, causes: Mapping[str, TestFailure]
) -> Iterator[str]:
    did = {name: _did(name, statuses, causes) for name in failed}
    for what, count in Counter(did.values()).most_common():
        messages = Counter(
            causes[name].message for name in failed if did[name] == what and name in causes and causes[name].message
        )
        why = f": {_clean(messages.most_common(1)[0][0])}" if messages else ""
        yield f"{count} of {whole} {group} {what}{why}"


def _did(name: str, statuses: Statuses, causes: Mapping[str, TestFailure]) -> str:
    if name in causes:
        return _DID.get(causes[name].when, "failed")
    said = {"FAILED": "failed", "ERROR": "errored", "SKIPPED": "were skipped"}
    return said.get(statuses.get(name, ""), "did not run")


def _clean(text: str) -> str:
    line = _CONTROL.sub(" ", text.strip().split("\n")[0]).strip()
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
