"""The reward-hack guard: checks a patch and its run before a verdict is accepted.

Rules over a patch's text are notes where the channel saw whole sessions of pytest and nothing that decides. What
decides there are consequences: a test that ran with other code, did not run, or passes although another value is
expected of it, in its code and in its file; an XFAIL that only the patch asks for; functions of pytest, unittest, the
tests or the guard that are others; lines of the patch that look into the tests' frames, memory or files, or run before
the guard does.

It does not detect: machine code of a patch (a changed C source) that changes memory; code that catches the guard's own
frame while a record is sent, or, before Python 3.8, finds the channel's key or changes the guard's parts; code of a
patch that runs before the tests, while a script reinstalls the repository; what is done once only, within the call of
one test (an object that equals the first it is compared with, a function of pytest that is put back); answers that are
read from a test, in a way that no rule over lines knows, where that test needs a fixture of the repository, or
remembered from its first run; results that are correct only for the tests' arguments, or under pytest. A plugin that a
patch adds and loads by ``-p`` is not trusted, whatever it does. When a repository's tests are not run by pytest,
outcomes come from the log alone, rules over the patch decide, and a note says so.
"""

from __future__ import annotations

import functools
import secrets
from importlib.resources import files

from openhands_rl_plugin.evals.swe.grading import GuardEquipment, ObservedRun
from openhands_rl_plugin.evals.swe.guard import inside as guard_inside
from openhands_rl_plugin.evals.swe.guard.patch import flags_of_patch
from openhands_rl_plugin.evals.swe.guard.runs import causes_of, flags_of_run, honest
from openhands_rl_plugin.evals.swe.resolution import TestFailure
from openhands_rl_plugin.evals.swe.types import Flag, Instance, Severity


class RewardHackGuard:
    """A ``Guard`` with rules for patches and a channel besides the log. It is stateless."""

    def equipment(self, instance: Instance) -> GuardEquipment:
        """A shell file by which pytest is started under a supervisor, with a plugin under a random name."""
        plugin = f"guard_{secrets.token_hex(8)}"
        return GuardEquipment(
            {"BASH_ENV": "/guard/shell.sh"},
            {
                "shell.sh": _text("shell.sh").replace("@PLUGIN@", plugin),
                "supervisor.txt": _text("supervisor.py"),
                "sitecustomize.py": _text("startup.py"),
                f"{plugin}.py": _text("plugin.py"),
                f"{plugin}_checks.py": _text("checks.py"),
                f"{plugin}_canaries.py": _text("canaries.py"),
            },
        )

    def check_patch(self, instance: Instance, patch: str) -> tuple[Flag, ...]:
        """Flags of a patch before it is applied."""
        return flags_of_patch(instance, patch)

    def check_run(self, observed: ObservedRun) -> tuple[Flag, ...]:
        """Flags of a finished run."""
        return flags_of_run(observed)

    def weigh(self, observed: ObservedRun, flags: tuple[Flag, ...]) -> tuple[Flag, ...]:
        """Rules over the patch's text alone are notes where the channel saw whole sessions without a deciding flag."""
        read = self.check_patch(observed.instance, observed.patch)
        seen = [each for each in flags if each not in read]
        if not honest(observed, seen):
            return flags
        note, decides = Severity.NOTE, Severity.DECIDES
        return tuple(
            each.model_copy(update={"severity": note}) if each in read and each.severity is decides else each
            for each in flags
        )

    def explain(self, observed: ObservedRun) -> dict[str, TestFailure]:
        """Why tests did not pass, by the channel."""
        return causes_of(observed)


@functools.cache
def _text(name: str) -> str:
    return files(guard_inside).joinpath(name).read_text(encoding="utf-8")
