"""What a reward needs beside the episode when it judges as a critic: the last answer, and commands in the workspace."""

from __future__ import annotations

import threading
from typing import Protocol, runtime_checkable

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.records import CHECKED, CommandEvidence, WorkspaceCommand
from openhands_rl_plugin.core.transcript import last_answer
from openhands_rl_plugin.core.types import JsonObject, Trajectory
from openhands_rl_plugin.rollout.scoring import workspace_command

ANSWER, LABEL, TESTED = "answer", "label", "test_result"
# What a shell exits with when it cannot execute or find a command.
_NOT_RUN = (126, 127)


@runtime_checkable
class ChecksCopies(Protocol):
    """A workspace in which a command can be run without leaving anything."""

    def check_copy(self, asked: WorkspaceCommand, stop: threading.Event) -> CommandEvidence:
        """Run it in a fresh sandbox over a copy. Blocks."""
        ...


class Gathering:
    """Gathers evidence for one judgement that may take ``seconds``. ``tests``: the command of the reward ``tests``."""

    def __init__(self, workspace: object, *, tests: str, seconds: float) -> None:
        self._workspace = workspace
        self._tests = tests
        self._seconds = seconds
        self._stop = threading.Event()

    def evidence(self, reward: Reward, trajectory: Trajectory) -> JsonObject:
        """What is known without asking, and what the reward asks for. Blocks; raises ``GraderError``."""
        found: JsonObject = {}
        if (said := last_answer(trajectory)) is not None:
            found[ANSWER] = said
        if (label := trajectory.task.data.get(LABEL)) is not None:
            found[LABEL] = label
        if (asked := workspace_command(reward)) is not None:
            found[CHECKED] = self._run(asked).model_dump(mode="json")
        if self._tests:
            ran = self._run(WorkspaceCommand(command=self._tests))
            if ran.exit_code is None or ran.exit_code in _NOT_RUN:
                raise GraderError(f"the tests could not be run: {ran.error or ran.output.strip()[-200:]}")
            found[TESTED] = {"report": {"resolved": ran.exit_code == 0}, "test_output": ran.output}
        return found

    def give_up(self) -> None:
        """End a copy that is being made."""
        self._stop.set()

    def _run(self, asked: WorkspaceCommand) -> CommandEvidence:
        if not isinstance(self._workspace, ChecksCopies):
            raise GraderError("its command needs the workspace of an RLAgent in a sandbox ([rl.workspace] isolation)")
        ran = self._workspace.check_copy(
            asked.model_copy(update={"timeout": min(asked.timeout, self._seconds)}), self._stop
        )
        if ran.timed_out and asked.timeout > self._seconds:
            raise GraderError(f"its command took longer than {self._seconds:g} s; raise the critic's timeout")
        return ran
