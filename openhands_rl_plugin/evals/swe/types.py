"""Values of SWE-bench grading: instance, verdict on a patch, guard flags, checkout; protocols of back ends."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pydantic import Field

from openhands_rl_plugin.core.types import Frozen, JsonObject
from openhands_rl_plugin.environments.workspace.processes import Ended
from openhands_rl_plugin.environments.workspace.task_workspace import WorkspaceMount


class Instance(Frozen):
    """One task in the columns of SWE-bench. ``extra`` holds the row's other columns (``image``, ``log_parser``,
    ``eval_script``, ...) as they were read.
    """

    instance_id: str
    repo: str
    base_commit: str
    version: str = ""
    problem_statement: str = ""
    hints_text: str = ""
    created_at: str = ""
    patch: str = ""
    test_patch: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    environment_setup_commit: str = ""
    extra: JsonObject = Field(default_factory=dict)

    @property
    def test_files(self) -> frozenset[str]:
        """The files of the row's tests whose names contain them (``file.py::test``)."""
        names = (*self.fail_to_pass, *self.pass_to_pass)
        return frozenset(name.partition("::")[0] for name in names if ".py::" in name)


class VerdictKind(StrEnum):
    """The result of an attempt. Only the first two come from its tests; the others are not "unresolved"."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    EMPTY_PATCH = "empty_patch"
    UNAPPLIED = "unapplied"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    """Too large, binary without its data, or not a patch at all."""
    INFRASTRUCTURE = "infrastructure"
    """The infrastructure failed: nothing is known about the patch."""
    FAILED = "failed"
    """The episode failed because of the model server or the environment: nothing is known about the agent."""
    UNGRADED = "ungraded"


UNKNOWN = frozenset({VerdictKind.INFRASTRUCTURE, VerdictKind.FAILED, VerdictKind.UNGRADED})
"""Kinds that say nothing about the agent: counted, but excluded from success rates."""


class TestsStatus(Frozen):
    """The passed and failed tests of FAIL_TO_PASS or PASS_TO_PASS."""

    __test__ = False  # no test class for pytest

    success: tuple[str, ...] = ()
    failure: tuple[str, ...] = ()


class Severity(StrEnum):
    """The effect of a flag. ``NOTE`` is about a limit of the guard itself."""

    DECIDES = "decides"
    """The patch is not resolved, whatever its tests say."""
    COUNTED = "counted"
    """Honest patches match too: it counts in the flagged share, and the tests decide."""
    NOTE = "note"


class Flag(Frozen):
    """A sign of reward hacking: the rule, where it matched, and the matching text."""

    rule: str
    where: str
    detail: str = ""
    severity: Severity = Severity.DECIDES


class PatchVerdict(Frozen):
    """The result of grading one patch. ``seconds`` is the wall time of grading, ``test_seconds`` of the tests."""

    instance_id: str
    kind: VerdictKind
    reason: str = ""
    fail_to_pass: TestsStatus = TestsStatus()
    pass_to_pass: TestsStatus = TestsStatus()
    flags: tuple[Flag, ...] = ()
    seconds: float = 0.0
    test_seconds: float = 0.0
    logs: str | None = None
    """The folder with ``patch.diff``, ``eval.sh``, ``test_output.txt`` and ``report.json``."""

    @property
    def resolved(self) -> bool:
        """Whether all FAIL_TO_PASS and PASS_TO_PASS tests passed without a deciding flag."""
        return self.kind is VerdictKind.RESOLVED

    @property
    def flagged(self) -> tuple[str, ...]:
        """The rules that matched the patch or its run, without duplicates."""
        return tuple(sorted({flag.rule for flag in self.flags if flag.severity is not Severity.NOTE}))


class Checkout(Frozen):
    """An instance's repository at its base commit, for an agent to work in.

    ``directory`` is on the host and writable. ``mounts`` and ``variables`` are what its interpreter needs: a sandbox
    has to mount and set them.
    """

    directory: Path
    mounts: tuple[WorkspaceMount, ...] = ()
    variables: dict[str, str] = Field(default_factory=dict)


class Box(Protocol):
    """A running container or sandbox with the instance's repository at ``/testbed``, after set-up."""

    async def run(
        self, command: Sequence[str], *, timeout: float, given: bytes | None = None, tests: bool = False
    ) -> Ended:
        """Run a command in ``/testbed``. ``tests``: with what tests need of a network."""
        ...


class InstanceBackend(Protocol):
    """Sets up and grades instances: with a container engine, or in sandboxes on this machine."""

    async def check(self) -> None:
        """Raise ``ConfigError`` when instances cannot run here."""
        ...

    async def checkout(self, instance: Instance, directory: Path) -> Checkout:
        """The repository at its base commit in ``directory`` (which must not exist), without later commits.

        Raises ``InfrastructureError``.
        """
        ...

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        """Apply ``patch`` and the row's tests to a fresh checkout and run them for at most ``timeout`` seconds.

        Never raises for what a patch does; an infrastructure failure is a verdict of kind ``INFRASTRUCTURE``.
        """
        ...
