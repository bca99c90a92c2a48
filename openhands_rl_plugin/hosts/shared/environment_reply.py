"""How an environment's replies pass through OpenHands: as the content of a tool's observation (V0: ``MCPObservation``).

The boundary between OpenHands' agent and its runtime is the boundary between policy and environment. An action of the
policy is a call of ``STEP_TOOL``; the reply is JSON text, so that the host's event log holds rewards and ends of
episodes, too. The first action of an episode is ``RESET_TOOL``, which costs no completion.
"""

from __future__ import annotations

from openhands_rl_plugin.core.types import Failure, Frozen, JsonObject, Message

RESET_TOOL = "environment_reset"
STEP_TOOL = "environment_step"


class EnvironmentReply(Frozen):
    """One reply of the environment; ``messages`` open the conversation after a reset and continue it after a step.

    ``failure`` is set when the environment could not answer; the agent then ends the episode.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    evidence: JsonObject | None = None
    failure: Failure | None = None
