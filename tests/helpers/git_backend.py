"""Instances of temporary git repositories, and a small back end that grades them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import uuid
from pathlib import Path

from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.environments.workspace.task_workspace import TaskWorkspace
from openhands_rl_plugin.evals.swe.instances import Flag, Instance, PatchVerdict, TestsStatus, VerdictKind
from openhands_rl_plugin.evals.tasks.bugs import patch_of

WHO = ["-c", "user.name=a", "-c", "user.email=a@b"]
CHECK = "adder.py adds right"
WRONG = "def add(a, b):\n    return a - b\n"


def git(directory: Path, *words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *WHO, *words], cwd=directory, input=stdin, capture_output=True, text=True)


def make_instances(folder: Path, count: int) -> tuple[Instance, ...]:
    """``count`` instances of one repository whose ``adder.py`` is wrong."""
    origin = folder / "origin"
    origin.mkdir(parents=True)
    (origin / "adder.py").write_text(WRONG)
    git(origin, "init", "-q", "-b", "main")
    git(origin, "add", "-A")
    git(origin, "commit", "-qm", "start")
    base = git(origin, "rev-parse", "HEAD").stdout.strip()
    return tuple(
        Instance(
            instance_id=f"owner__adder-{number}",
            repo="owner/adder",
            version="1.0",
            base_commit=base,
            problem_statement=f"add(2, 3) must be 5 ({number})",
            patch=FIX,
            fail_to_pass=(CHECK,),
            extra={"origin": str(origin), "number": number},
        )
        for number in range(count)
    )


FIX = patch_of("adder.py", WRONG, WRONG.replace("-", "+"))


class GitBackend:
    """Clones the origin; grades by calling ``add``. ``outages`` gradings fail first, as if the machine was full."""

    def __init__(self, folder: Path, *, outages: int = 0, lost_checkouts: int = 0) -> None:
        self._folder = folder
        self.outages = outages
        self.lost_checkouts = lost_checkouts
        self.graded: list[str] = []
        self.checked_out: list[str] = []

    async def check(self) -> None:
        return None

    async def checkout(self, instance: Instance, directory: Path) -> TaskWorkspace:
        if self.lost_checkouts:
            self.lost_checkouts -= 1
            raise InfrastructureError("the mirror is away")
        if "origin" not in instance.extra:
            raise ConfigError("nothing is known about this row")
        self.checked_out.append(instance.instance_id)
        await asyncio.to_thread(self._clone, instance, directory)
        variables = {"INSTANCE": instance.instance_id}
        return TaskWorkspace(root=directory.parent, repository=directory.name, variables=variables)

    async def grade(self, instance: Instance, patch: str, *, logs: Path, timeout: float) -> PatchVerdict:
        if self.outages:
            self.outages -= 1
            return PatchVerdict(
                instance_id=instance.instance_id, kind=VerdictKind.INFRASTRUCTURE, reason="the disk is full"
            )
        self.graded.append(instance.instance_id)
        return await asyncio.to_thread(self._grade, instance, patch)

    def _clone(self, instance: Instance, directory: Path) -> None:
        git(directory.parent, "clone", "-q", str(instance.extra["origin"]), str(directory))
        git(directory, "remote", "remove", "origin")

    def _grade(self, instance: Instance, patch: str) -> PatchVerdict:
        started = time.perf_counter()
        kind, flags = self._judge(instance, patch)
        status = TestsStatus(success=(CHECK,)) if kind is VerdictKind.RESOLVED else TestsStatus(failure=(CHECK,))
        return PatchVerdict(
            instance_id=instance.instance_id,
            kind=kind,
            fail_to_pass=status,
            flags=flags,
            seconds=time.perf_counter() - started,
        )

    def _judge(self, instance: Instance, patch: str) -> tuple[VerdictKind, tuple[Flag, ...]]:
        if not patch.strip():
            return VerdictKind.EMPTY_PATCH, ()
        directory = self._folder / uuid.uuid4().hex
        directory.mkdir(parents=True)
        self._clone(instance, directory / "work")
        if git(directory / "work", "apply", "-", stdin=patch).returncode:
            return VerdictKind.UNAPPLIED, ()
        code = "import adder; assert adder.add(2, 3) == 5; print('added')"
        done = subprocess.run(
            [sys.executable, "-S", "-c", code], cwd=directory / "work", capture_output=True, text=True
        )
        flags = (Flag(rule="exit", where="adder.py"),) if "sys.exit" in patch else ()
        return (VerdictKind.RESOLVED if done.stdout == "added\n" else VerdictKind.UNRESOLVED), flags
