"""The reward-hack guard: checks a patch and its run before a verdict is accepted.

It does not detect: code that finds the guard's plugin in the memory of the tests' process and sends records in its
name without matching a rule; code of a patch that runs before the tests, while a script reinstalls the repository, and
reads the shell there; results that are correct only for the tests' arguments. Objects that are equal to everything are
counted only. When a repository's tests are not run by pytest, outcomes come from the log alone, and a note says so.
"""

from __future__ import annotations

import functools
import secrets
from importlib.resources import files

from openhands_rl_plugin.evals.swe.grading import GuardEquipment, ObservedRun
from openhands_rl_plugin.evals.swe.guard import inside as guard_inside
from openhands_rl_plugin.evals.swe.guard.channel import flags_of_run
from openhands_rl_plugin.evals.swe.guard.patch import flags_of_patch
from openhands_rl_plugin.evals.swe.types import Flag, Instance


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
                f"{plugin}.py": _text("plugin.py"),
            },
        )

    def check_patch(self, instance: Instance, patch: str) -> tuple[Flag, ...]:
        """Flags of a patch before it is applied."""
        return flags_of_patch(instance, patch)

    def check_run(self, observed: ObservedRun) -> tuple[Flag, ...]:
        """Flags of a finished run."""
        return flags_of_run(observed)


@functools.cache
def _text(name: str) -> str:
    return files(guard_inside).joinpath(name).read_text(encoding="utf-8")
