"""What the tests of a repository say before there is any bug."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen
from openhands_rl_plugin.evals.tasks.sources.packages import Package, TaskPlan
from openhands_rl_plugin.evals.tasks.sources.prepared_package import prepare_package

_LEAST_STEADY = 0.5


class Survey(Frozen):
    """Two runs of the tests. ``steady`` ones passed twice; only they are used. ``unnamed`` ones have names
    that a log cannot show. ``files``: of code. ``seconds``: of one
    run. ``size``: of all files, in bytes.
    """

    tests: int
    steady: int
    failing: int
    flickering: int
    unnamed: int
    files: int
    seconds: float
    size: int

    def notes(self) -> tuple[str, ...]:
        """What is not used, one line each."""
        found = (
            (self.failing, "fail before any bug"),
            (self.flickering, "flicker (pass in one run only) before any bug"),
            (self.unnamed, "have names that a log cannot show (blanks, other alphabets)"),
        )
        return tuple(f"{count} of {self.tests} tests {what}: they are not used" for count, what in found if count)


def survey(package: Package, plan: TaskPlan, cache: Path) -> Survey:
    """Run the tests twice, without a bug.

    Raises ``ConfigError`` where there are none, none passes, or fewer than half of them pass twice, and
    ``InfrastructureError`` where what they need cannot be installed.
    """
    prepared = prepare_package(package, plan, cache)
    run = prepared.first_run
    played = {name: outcome for name, outcome in run.outcomes.items() if outcome not in ("skipped", "xfailed")}
    flickering = sorted(prepared.flickering)
    failing = sorted(played.keys() - run.passed - prepared.flickering)
    found = Survey(
        tests=len(played),
        steady=len(prepared.tests),
        failing=len(failing),
        flickering=len(flickering),
        unnamed=len(run.passed - prepared.tests - prepared.flickering),
        files=len(prepared.layout.code),
        seconds=round(run.seconds, 1),
        size=sum(len(file.data) for file in prepared.tree.files.values()),
    )
    if found.failing + found.flickering > (1 - _LEAST_STEADY) * found.tests:
        what = f"{found.failing} fail and {found.flickering} flicker"
        raise ConfigError(
            f"{package.label}: of {found.tests} tests, {what} before any bug ({(failing or flickering)[0]:.100}): mend "
            "them, install what they need (--with), or name those that pass (--tests)"
        )
    return found
