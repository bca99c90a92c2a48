"""A reward by a shell command, such as the project's own tests, run in the workspace when the episode ends."""

from __future__ import annotations

import hashlib
import math
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.judgements import host_evidence
from openhands_rl_plugin.core.records import CHECKED, CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.types import JsonObject, Score, Trajectory

# What a shell exits with when it cannot execute or find a command.
_NOT_RUN = (126, 127)
_SHOWN = 200


class CommandOptions(WorkspaceCommand):
    """``command``, ``timeout`` (seconds) and ``protected`` (files that are put back before it is run).

    ``result``: how its end becomes the reward. ``exit-status``: 1.0 when it exits with 0, else 0.0, also when its time
    is up. ``last-line``: the number from ``least`` to ``most`` that it prints last, on a line of its own; ``least`` for
    any other end.
    """

    result: Literal["exit-status", "last-line"] = "exit-status"
    least: float = Field(default=0.0, allow_inf_nan=False)
    most: float = Field(default=1.0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.least >= self.most:
            raise ValueError("least must be below most")
        return self


class CommandReward:
    """Pass or fail of a command (``pytest -q``, ``make check``), or the number that it prints last.

    The host runs it once, in a fresh sandbox over a copy of the workspace as it stands; later scores read that result.
    The policy wrote in that workspace, so it can change what the command runs, but for the ``protected`` files: name
    the tests, and all that decides how they are run. What keeps the command from a result is worth the least.
    """

    Options = CommandOptions

    def __init__(self, options: CommandOptions) -> None:
        self.options = options

    @property
    def version(self) -> str:
        """Another command, other protected files, or another reading of its end, gives other scores."""
        asked = self.options.model_dump_json(exclude={"timeout"})
        return f"command-2@{self.options.result}/{hashlib.sha256(asked.encode()).hexdigest()[:8]}"

    @property
    def workspace_command(self) -> WorkspaceCommand:
        """The command to run in the workspace."""
        return self.options

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` for a failed one, and where the command was not run."""
        ran = self._ran(host_evidence(trajectory))
        reward, why = self._read(ran)
        detail: JsonObject = {"exit_code": ran.exit_code, "timed_out": ran.timed_out, "seconds": ran.seconds}
        if why:
            detail["refused"] = why[:_SHOWN]
        return Score(trajectory_id=trajectory.id, reward=reward, detail=detail, reward_version=self.version)

    def _ran(self, evidence: JsonObject) -> CommandEvidence:
        try:
            ran = CommandEvidence.model_validate(evidence[CHECKED])
        except (KeyError, ValidationError) as error:
            raise GraderError(
                "no command was run in their workspace: it is at the end of a run with [rl.reward] "
                'name = "command", in the runtimes of openhands_rl_plugin'
            ) from error
        if (ran.command, ran.protected) != (self.options.command, self.options.protected):
            raise GraderError(f"another command was run in their workspace, which is gone: {ran.command!r:.{_SHOWN}}")
        if ran.error:
            raise GraderError(f"the command could not be run: {ran.error!r:.{_SHOWN}}")
        return ran

    def _read(self, ran: CommandEvidence) -> tuple[float, str]:
        """The reward, and why it is the least where the command gave no result."""
        worst = self.options.least if self.options.result == "last-line" else 0.0
        last = next((line.strip() for line in reversed(ran.output.splitlines()) if line.strip()), "")
        if ran.prevented:
            return worst, ran.prevented
        if ran.exit_code in _NOT_RUN:
            return worst, f"the shell could not run the command: {last}"
        if self.options.result == "exit-status":
            return float(ran.exit_code == 0), ""
        try:
            number = math.nan if ran.timed_out else float(last)
        except ValueError:
            number = math.nan
        if self.options.least <= number <= self.options.most:
            return number, ""
        return worst, f"no number from {self.options.least:g} to {self.options.most:g} on the last line, but {last!r}"
