"""Compares test outcomes with FAIL_TO_PASS and PASS_TO_PASS: by the ``swebench`` package's functions, or by equivalent
ones for rows that do not need the package. Says why a patch does not resolve its instance.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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


def load_official_grader(recipe: Recipe) -> None:
    """Import what ``resolution_of`` needs. The first import takes seconds, so it runs while the tests run.

    Raises ``MissingExtraError``.
    """
    if recipe.grader == "official":
        from openhands_rl_plugin.evals.swe.recipes.swe_bench import swebench

        swebench("grading")


def resolution_of(instance: Instance, recipe: Recipe, statuses: Statuses) -> Resolution:
    """The resolution of a run. A skipped FAIL_TO_PASS test counts as failed; a skipped PASS_TO_PASS test is ignored,
    as in the official tools.
    """
    if recipe.grader == "official":
        fixed, kept = _official(instance, recipe, statuses)
    else:
        fixed, kept = (_status(names, statuses) for names in (instance.fail_to_pass, instance.pass_to_pass))
    counted = {*fixed.success, *fixed.failure}
    skipped = tuple(name for name in instance.fail_to_pass if name not in counted)
    return Resolution(TestsStatus(success=fixed.success, failure=(*fixed.failure, *skipped)), kept)


def _status(names: Iterable[str], statuses: Statuses) -> TestsStatus:
    outcomes = {name: statuses.get(name, "FAILED") for name in names}
    return TestsStatus(
        success=tuple(name for name, outcome in outcomes.items() if outcome in _GOOD),
        failure=tuple(name for name, outcome in outcomes.items() if outcome in _BAD),
    )


def _official(instance: Instance, recipe: Recipe, statuses: Statuses) -> tuple[TestsStatus, TestsStatus]:
    from openhands_rl_plugin.evals.swe.recipes.swe_bench import swebench

    grading: Any = swebench("grading")
    wanted = {"FAIL_TO_PASS": list(instance.fail_to_pass), "PASS_TO_PASS": list(instance.pass_to_pass)}
    kind = swebench("constants").EvalType(recipe.eval_type)
    report = grading.get_eval_tests_report(statuses, wanted, eval_type=kind)
    fixed, kept = (TestsStatus.model_validate(report[group]) for group in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    return fixed, kept


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
