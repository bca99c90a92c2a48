"""The reward-hack guard: what a patch says, and what its run did, before a verdict is believed.

What it does not see: a patch whose code searches the memory of the tests' process for the guard's plugin and speaks in
its place, without a word that the rules know; code of a patch that runs before the tests, where a script installs the
repository once more, and looks into the shell there; answers that are right for the tests' own arguments alone; objects
that are equal to everything, which are counted only. Where a repository's tests are not run by pytest, outcomes are
from the log alone, and a note among the flags says so.
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
    """A ``Guard`` of rules over patches and of a channel beside the log. It keeps nothing between runs."""

    def equipment(self, instance: Instance) -> GuardEquipment:
        """A shell file by which pytest is started under a supervisor, with a plugin whose name no patch can know."""
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
