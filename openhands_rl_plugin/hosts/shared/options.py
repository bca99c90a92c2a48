"""What a host is asked for beside ``[rl]``: where an episode takes place, by which agent, and with which bounds."""

from __future__ import annotations

from pydantic import Field

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.types import Frozen, JsonObject, StrategySpec

ENVIRONMENT_RUNTIME = "openhands_rl_plugin.hosts.v0.environment_runtime.EnvironmentRuntime"
WORKSPACE_RUNTIME = "openhands_rl_plugin.hosts.v0.runtime.WorkspaceRuntime"
RL_AGENT = "RLAgent"


class UserReplies(Frozen):
    """What a user would say who cannot help: ``first``, and ``later`` added to it from the second time on."""

    first: str
    later: str = ""


class ControllerOptions(Frozen):
    """What a runner needs beside ``[rl]``.

    ``runtime`` is a class path; ``environment_mode`` says whether the model sees only what an environment says, or
    works in a workspace with OpenHands' own tools. ``sessions`` bounds the sessions at a time (default:
    ``[rl] max_workers``), ``command_timeout`` is in seconds, ``strategy_options`` override those of ``[rl.strategy]``.
    ``agent`` is ``RLAgent`` or a stock agent of OpenHands, which decides by itself, without the strategy.
    ``token_ids``: ask the server for token ids and logprobs, which some refuse. ``stuck_detection`` is OpenHands' own.
    ``replies`` answer an agent that says something without doing anything (default: OpenHands' own words).
    """

    runtime: str = ENVIRONMENT_RUNTIME
    environment_mode: bool = True
    sessions: int | None = None
    command_timeout: int = 60
    native_tool_calling: bool = True
    strategy_options: JsonObject = Field(default_factory=dict)
    agent: str = RL_AGENT
    token_ids: bool = True
    stuck_detection: bool = False
    llm_retries: int = Field(default=2, ge=1)
    replies: UserReplies | None = None

    def strategy_spec(self, settings: RLSettings) -> StrategySpec:
        """The strategy and all the options that it is made with; a stock agent's is the agent itself."""
        if self.agent != RL_AGENT:
            return StrategySpec(name=self.agent)
        options = {**settings.strategy, **self.strategy_options}
        return StrategySpec(name=settings.rollout_strategy, options=options)
