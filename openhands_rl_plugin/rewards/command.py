"""A reward by a shell command, such as the project's own tests, run in the workspace when the episode ends."""

from __future__ import annotations

import hashlib
import math
from typing import Literal

from pydantic import ValidationError

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.judgements import host_evidence
from openhands_rl_plugin.core.records import CHECKED, CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import JsonObject, Score, Trajectory

# What a shell exits with when it cannot execute or find a command: that says nothing about the work.
_NOT_RUN = (126, 127)
_SHOWN = 200


class CommandOptions(WorkspaceCommand):
    """``command`` and ``timeout`` (seconds). ``result``: how its end becomes the reward.

    ``exit-status``: 1.0 when it exits with 0, else 0.0, also when its time is up. ``last-line``: the number that it
    prints last, on a line of its own.
    """

    result: Literal["exit-status", "last-line"] = "exit-status"


class CommandReward:
    """Pass or fail of a command (``pytest -q``, ``make check``), or the number that it prints last.

    It is run once, by the host, in a fresh sandbox over the workspace as it stands; later scores read that result.
    """

    Options = CommandOptions

    def __init__(self, options: CommandOptions) -> None:
        self.options = options

    @property
    def version(self) -> str:
        """Another command, or another reading of its end, gives other scores."""
        digest = hashlib.sha256(self.options.command.encode()).hexdigest()[:8]
        return f"command-1@{self.options.result}/{digest}"

    @property
    def workspace_command(self) -> WorkspaceCommand:
        """What to run."""
        return self.options

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` for a failed one, and where the command gave no result."""
        ran = self._ran(host_evidence(trajectory))
        reward = self._printed(ran) if self.options.result == "last-line" else self._passed(ran)
        return Score(
            trajectory_id=trajectory.id,
            reward=reward,
            detail={"exit_code": ran.exit_code, "timed_out": ran.timed_out, "seconds": ran.seconds},
            reward_version=self.version,
        )

    def _ran(self, evidence: JsonObject) -> CommandEvidence:
        try:
            ran = CommandEvidence.model_validate(evidence[CHECKED])
        except (KeyError, ValidationError) as error:
            raise GraderError(
                "no command was run in their workspace: it is at the end of a run with [rl.reward] "
                'name = "command", in the runtimes of openhands_rl_plugin'
            ) from error
        if ran.command != self.options.command:
            raise GraderError(f"another command was run in their workspace, which is gone: {ran.command!r:.{_SHOWN}}")
        if ran.error:
            raise GraderError(f"the command could not be run: {ran.error!r:.{_SHOWN}}")
        return ran

    def _passed(self, ran: CommandEvidence) -> float:
        if ran.exit_code in _NOT_RUN:
            raise GraderError(f"the shell could not run the command: {_last_line(ran)!r:.{_SHOWN}}")
        if ran.exit_code is None and not ran.timed_out:
            raise GraderError("the command ended without an exit status")
        return float(ran.exit_code == 0)

    def _printed(self, ran: CommandEvidence) -> float:
        try:
            number = math.nan if ran.timed_out else float(_last_line(ran))
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise GraderError(f"the command printed no number on its last line, but {_last_line(ran)!r:.{_SHOWN}}")
        return number


def _last_line(ran: CommandEvidence) -> str:
    return next((line.strip() for line in reversed(ran.output.splitlines()) if line.strip()), "")
