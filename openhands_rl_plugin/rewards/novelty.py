"""A command's pass or fail, with a bonus where the last turn showed something new: a value for searches that train.

A model that tries again what has failed, or writes an edit that no test is run on, learns nothing of the bug by it. By
the tests alone such an answer is worth as much as an attempt: both leave them failing.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from openhands_rl_plugin.core.records import WorkspaceCommand
from openhands_rl_plugin.core.types import Message, Score, Trajectory
from openhands_rl_plugin.rewards.command import CommandOptions, CommandReward

_EXIT_CODE = re.compile(r"exit code (-?\d+)")
_CALL = "<function="  # of OpenHands, where the model has no tool calling


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    return pattern


class NoveltyOptions(WorkspaceCommand):
    """``command`` and ``timeout`` (seconds). ``novelty``: the reward where the command fails and the last turn showed
    something new. ``shows``: what it then showed, though its own command failed; as pytest and unittest count tests.
    """

    novelty: float = Field(default=0.2, ge=0, lt=1)
    shows: Annotated[str, AfterValidator(_compiles)] = r"\d+ (?:failed|passed)|\bRan \d+ test"


class NoveltyReward:
    """1.0 where the command exits with 0, else ``novelty`` or 0.0.

    A turn showed something new if its command exited with 0, or what it printed matches ``shows``, and if no earlier
    turn of the episode did the same and saw the same. What ends an episode shows nothing.
    """

    Options = NoveltyOptions

    def __init__(self, options: NoveltyOptions) -> None:
        self._novelty = options.novelty
        self._shows = re.compile(options.shows)
        self._command = CommandReward(CommandOptions(command=options.command, timeout=options.timeout))

    @property
    def version(self) -> str:
        """Another bonus, another pattern or another command gives other scores."""
        return f"novelty-1@{self._novelty:g}/{self._shows.pattern}/{self._command.version}"

    @property
    def workspace_command(self) -> WorkspaceCommand:
        """As in ``JudgesWorkspace``."""
        return self._command.workspace_command

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` as ``CommandReward`` does."""
        judged = await self._command(trajectory)
        new = self._showed_something_new(trajectory)
        reward = self._novelty if judged.reward == 0 and new else judged.reward
        detail = {**judged.detail, "new": new}
        return judged.model_copy(update={"reward": reward, "detail": detail, "reward_version": self.version})

    def _showed_something_new(self, trajectory: Trajectory) -> bool:
        turns = _turns(trajectory)
        if not turns or turns[-1] in turns[:-1]:
            return False
        answer, seen = turns[-1]
        if not seen or not (answer.tool_calls or _CALL in (answer.content or "")):
            return False
        code = _EXIT_CODE.search(seen)
        return code is None or code[1] == "0" or self._shows.search(seen) is not None


def _turns(trajectory: Trajectory) -> list[tuple[Message, str]]:
    """Of each turn what the policy said, and what was shown after it."""
    found: list[tuple[Message, str]] = []
    for at in trajectory.path():
        node = trajectory.nodes[at]
        if node.sampled:
            calls = tuple(call.model_copy(update={"id": ""}) for call in node.message.tool_calls)
            said = (node.message.content or "").strip()
            found.append((node.message.model_copy(update={"content": said, "tool_calls": calls}), ""))
        elif found:
            found[-1] = (found[-1][0], found[-1][1] + (node.message.content or ""))
    return found
