"""The agent that OpenRLHF 0.11 loads: ``--train.agent_func_path .../openhands_rl_plugin/training/openrlhf/agent.py``.

    export OPENHANDS_RL_CONFIG=/path/to/config.toml

OpenRLHF looks for ``AgentExecutor``. It runs an episode like every other runner of this package, and differs from the
stock multi-turn executor: every answer counts against ``max_turns``, an episode ended by a limit is flagged as
truncated, the sampling parameters are not changed, and a first prompt that is too long is an error instead of being
truncated. ``AgentInstance`` is the same episode for another executor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.training.openrlhf.rollouts import Rollout, RolloutConfig, RolloutSource, Step, SteppedEpisode

try:
    from openrlhf.utils.agent import (  # pyright: ignore[reportMissingImports]  (brings its own vLLM and torch)
        AgentInstanceBase,
        MultiTurnAgentExecutor,
    )
except ModuleNotFoundError as error:
    raise ConfigError(
        f"{error.name} is not installed; OpenRLHF pins its own torch and vLLM, so it needs a separate environment: "
        "pip install openrlhf[vllm]==0.11.2 .[train] in a clone of the package"
    ) from error


class AgentInstance(AgentInstanceBase):
    """One episode, stepped with the texts of answers."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._episode = SteppedEpisode(_rollouts())

    async def reset(self, states: dict[str, Any], **kwargs: object) -> dict[str, str]:
        """``{"observation", "label"}`` -> ``{"observation"}``, the text of the first prompt."""
        return {"observation": await self._episode.reset(states["observation"], states.get("label"))}

    async def step(self, state_dict: dict[str, Any], **kwargs: object) -> Step:
        """Execute ``action_text``."""
        return await self._episode.step(state_dict["action_text"])


class AgentExecutor(MultiTurnAgentExecutor):
    """Runs whole episodes on token ids."""

    def __init__(self) -> None:
        super().__init__(AgentInstance)
        # Errors in the configuration are raised before the first rollout.
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
def _rollouts() -> RolloutSource:
    return RolloutSource(RolloutConfig.from_environment())
