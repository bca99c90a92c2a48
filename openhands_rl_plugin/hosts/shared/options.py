"""Options of a host beside ``[rl]``: where an episode runs, with which agent, and within which limits."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from openhands_rl_plugin.config.build import strategy_spec
from openhands_rl_plugin.config.rl import AUTO, RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import Frozen, JsonObject, StrategySpec

RL_AGENT = "RLAgent"


class HostOptions(Frozen):
    """How a host runs its sessions.

    ``environment_mode``: the model sees only an environment's observations; else it works in a workspace with
    OpenHands' own tools. ``sessions``: how many a worker of a pool runs at a time (default: ``[rl] max_workers``
    divided by the workers). ``command_timeout`` is in seconds. ``agent`` is ``RLAgent`` or an agent of OpenHands, which
    does not use the strategy. ``token_ids``: request token ids and logprobs, which some servers reject.
    ``stuck_detection`` is OpenHands' own. ``replies``: what a simulated user replies to each message without a tool
    call, the last of them from then on (default: OpenHands' own text). ``condenser`` is a section
    ``[agent.NAME.condenser]`` of OpenHands, whose model is the policy; by default there is none, so that every prompt
    is a prefix of the next one. ``llm``, of this process only: keys of ``[llm]`` in place of ``[rl.serving]``.
    ``folder``: where a session without a workspace of its own works; default: one that is removed with it.
    """

    environment_mode: bool = True
    sessions: int | None = None
    command_timeout: int = 60
    native_tool_calling: bool = True
    agent: str = RL_AGENT
    token_ids: bool = True
    stuck_detection: bool = False
    llm_retries: int = Field(default=2, ge=1)
    replies: tuple[str, ...] = ()
    condenser: JsonObject = Field(default_factory=dict)
    llm: JsonObject = Field(default_factory=dict, repr=False)
    folder: Path | None = None

    def strategy_spec(self, settings: RLSettings) -> StrategySpec:
        """The strategy with all its options. For an agent of OpenHands it names that agent."""
        if self.agent != RL_AGENT:
            return StrategySpec(name=self.agent)
        return strategy_spec(settings)


def check_engine_setting(settings: RLSettings) -> None:
    """OpenHands' controller asks its model server itself. Raises ``ConfigError`` for another engine."""
    if settings.engine not in (AUTO, "openai"):
        raise ConfigError(
            f"[rl] engine: OpenHands asks its model by itself, so {settings.engine!r} would not be used; it is for "
            "RLAgent in Python. Remove the line from this config.toml"
        )
