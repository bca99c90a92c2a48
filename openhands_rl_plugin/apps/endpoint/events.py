"""What happens while an agent answers, as far as its user may see it."""

from __future__ import annotations

from openhands_rl_plugin.core.types import Failure, Frozen, Message, StopReason, Trajectory
from openhands_rl_plugin.environments.tools.environment import ToolCallStarted as ToolCallStarted
from openhands_rl_plugin.environments.tools.environment import ToolResult as ToolResult


class TextDelta(Frozen):
    """More of what the agent says; no part of a thought or a call. ``turn`` counts the answers of the model from 1."""

    text: str
    turn: int


class AgentResult(Frozen):
    """How a request ended. ``answer`` is ``None`` when it ended without one; ``stop`` and ``failure`` say why."""

    answer: str | None
    trajectory: Trajectory

    @property
    def stop(self) -> StopReason:
        """Why the episode ended."""
        return self.trajectory.stop

    @property
    def failure(self) -> Failure | None:
        """What broke, if anything did."""
        return self.trajectory.failure

    @property
    def cut(self) -> bool:
        """Whether the model's last words were cut off by the limit of their length."""
        last = next(iter([*self.trajectory.sampled()][-1:]), None)
        return last is not None and last.finish_reason == "length"

    @property
    def messages(self) -> tuple[Message, ...]:
        """What came after the messages of the request, private notes too: what to append before the next question."""
        path = self.trajectory.path()
        first = next((at for at, index in enumerate(path) if self.trajectory.nodes[index].sampled), len(path))
        return tuple(self.trajectory.nodes[index].message for index in path[first:])


class Answer(Frozen):
    """The final answer. ``streamed``: its text has come as the ``TextDelta`` events of the last turn."""

    text: str
    result: AgentResult
    streamed: bool = False


class Stopped(Frozen):
    """The end without an answer."""

    reason: StopReason
    result: AgentResult


AgentEvent = TextDelta | ToolCallStarted | ToolResult | Answer | Stopped
"""The last event of a request is an ``Answer`` or ``Stopped``, and no other is."""
