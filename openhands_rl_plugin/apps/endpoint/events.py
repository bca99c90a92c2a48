"""Events of a running agent that its user may see."""

from __future__ import annotations

from openhands_rl_plugin.core.types import Failure, Frozen, Message, StopReason, Trajectory
from openhands_rl_plugin.environments.tools.environment import ToolCallStarted as ToolCallStarted
from openhands_rl_plugin.environments.tools.environment import ToolResult as ToolResult


class TextDelta(Frozen):
    """New text of the agent, without reasoning and tool calls. ``turn`` counts the model responses from 1."""

    text: str
    turn: int


class AgentResult(Frozen):
    """Result of a request. Without an ``answer`` it is ``None``; ``stop`` and ``failure`` are the reason."""

    answer: str | None
    trajectory: Trajectory

    @property
    def stop(self) -> StopReason:
        """Why the episode ended."""
        return self.trajectory.stop

    @property
    def failure(self) -> Failure | None:
        """The failure of the episode, if any."""
        return self.trajectory.failure

    @property
    def cut(self) -> bool:
        """Whether the last model response was truncated by ``max_tokens``."""
        last = next(iter([*self.trajectory.sampled()][-1:]), None)
        return last is not None and last.finish_reason == "length"

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages after those of the request, reasoning included: append them before the next user message."""
        path = self.trajectory.path()
        first = next((at for at, index in enumerate(path) if self.trajectory.nodes[index].sampled), len(path))
        return tuple(self.trajectory.nodes[index].message for index in path[first:])


class Answer(Frozen):
    """The final answer. ``streamed``: its text was already sent as ``TextDelta`` events of the last turn."""

    text: str
    result: AgentResult
    streamed: bool = False


class Stopped(Frozen):
    """The episode ended without an answer."""

    reason: StopReason
    result: AgentResult


AgentEvent = TextDelta | ToolCallStarted | ToolResult | Answer | Stopped
"""The last event of a request, and only the last, is an ``Answer`` or ``Stopped``."""
