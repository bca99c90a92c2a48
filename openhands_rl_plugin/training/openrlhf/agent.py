"""The agent that OpenRLHF 0.11 loads: ``--train.agent_func_path .../openhands_rl_plugin/training/openrlhf.py``.

    export OPENHANDS_RL_CONFIG=/path/to/config.toml

``AgentExecutor`` is what it looks for. It plays an episode as every other runner here does, and mends what the stock
multi-turn executor leaves open: every answer counts against ``max_turns``, a limit's end is flagged as truncated, the
sampling parameters stay as they were given, and a first prompt that is too long is refused instead of losing its
beginning. ``AgentInstance`` is the same episode for an executor of one's own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.training.openrlhf.rollouts import Rollout, RolloutConfig, Rollouts
from openhands_rl_plugin.training.openrlhf.steps import Step, SteppedEpisode

try:
    from openrlhf.utils.agent import (  # pyright: ignore[reportMissingImports]  (brings its own vLLM and torch)
        AgentInstanceBase,
        MultiTurnAgentExecutor,
    )
except ModuleNotFoundError as error:
    raise ConfigError(
        f"{error.name} is not installed; OpenRLHF has a torch and a vLLM of its own, so that it needs an environment "
        "of its own: pip install openrlhf[vllm]==0.11.2 openhands_rl_plugin[train]"
    ) from error


class AgentInstance(AgentInstanceBase):
    """One episode, stepped with texts."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._episode = SteppedEpisode(_rollouts())

    async def reset(self, states: dict[str, Any], **kwargs: object) -> dict[str, str]:
        """``{"observation", "label"}`` -> ``{"observation"}``, the text of the first prompt."""
        return {"observation": await self._episode.reset(states["observation"], states.get("label"))}

    async def step(self, state_dict: dict[str, Any], **kwargs: object) -> Step:
        """Execute ``action_text``."""
        return await self._episode.step(state_dict["action_text"])


class AgentExecutor(MultiTurnAgentExecutor):
    """Plays whole episodes, with token ids from end to end."""

    def __init__(self) -> None:
        super().__init__(AgentInstance)
        # What is wrong with the configuration is told before the first rollout.
        self._rollouts = _rollouts()

    async def execute(
        self,
        prompt: str,
        label: object,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: object = None,
    ) -> Rollout:
        """One episode. Raises ``ConfigError`` or ``TrainingError``."""
        return await self._rollouts.play(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)


@cache
def _rollouts() -> Rollouts:
    return Rollouts(RolloutConfig.from_environment())
