"""Episodes of OpenHands for verl's V1 trainer. Imported by the Python that has verl."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from openhands_rl_plugin.apps.rollout.episode_program import EpisodeProgram
from openhands_rl_plugin.apps.rollout.pythons import check_release
from openhands_rl_plugin.contrib.trainers.verl.endpoint import MODEL, PolicyEndpoint
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.trajectories.exchange.trainers.verl import agent_loop_rows

check_release("verl", "0.9")
from verl.experimental.agent_loop.agent_loop import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    AgentLoopBase,
    AgentLoopOutput,
)

TASK = "task"
"""The column of the data set with the task: an id of a suite, or a whole row as JSON."""

_ENDPOINT = PolicyEndpoint()


class OpenHandsAgentLoop(AgentLoopBase):
    """Plays the task of a row by ``openhands-rl rollout``, in the Python that ``OPENHANDS_RL_PYTHON`` names.

    ``options``: those of the command, with underscores. ``tries``, ``store``: see ``EpisodeProgram``. Raises
    ``ConfigError`` for what would be trained wrongly.
    """

    def __init__(
        self, *args: Any, options: Mapping[str, Any] | None = None, tries: int = 2, store: str = "", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._program = EpisodeProgram(
            options or {}, where="options", trainer="verl", said=frozenset({"temperature"}), tries=tries, store=store
        )
        if not self.config.trainer.get("use_v1", False):
            raise ConfigError("set trainer.use_v1=True: the other trainer has no place for an episode that failed")
        for name, neutral in (("top_p", (1,)), ("top_k", (-1, 0))):
            if (said := self.rollout_config.get(name, neutral[0])) not in neutral:
                raise ConfigError(
                    f"actor_rollout_ref.rollout.{name}={said}: logprobs are then not the policy's; leave it out"
                )

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Any]:
        """One ``AgentLoopOutput`` a segment. Raises ``InfrastructureError`` for a failed episode: verl then drops the
        prompt, and nothing is trained on a reward that nobody gave."""
        task = row.get(TASK) or (row.get("extra_info") or {}).get(TASK)
        if not isinstance(task, str) or not task:
            raise ConfigError(f"the data set needs a column {TASK!r}, with an id of a suite or a row as JSON")
        sizes = self.rollout_config
        longest = sizes.get("max_model_len") or sizes.prompt_length + sizes.response_length
        temperature = float(sampling_params.get("temperature", 1.0))
        name = uuid.uuid4().hex  # the same server for all turns, which has their prefix

        async def sample(ids: tuple[int, ...], most: int) -> Any:
            asked = {**sampling_params, "logprobs": True, "max_tokens": most}
            return await self.server_manager.generate(name, prompt_ids=list(ids), sampling_params=asked)

        with _ENDPOINT.open(sample, self.tokenizer, longest) as (url, key):
            played = await self._program.play(task, url, MODEL, key=key, temperature=temperature)
        if isinstance(played, str):
            raise InfrastructureError(f"{task[:80]}: {played}")
        if played.off_policy:
            raise ConfigError(f"answers that are no samples of the policy cannot be trained: {played.off_policy}")
        rows = agent_loop_rows(
            played,
            longest_prompt=sizes.prompt_length,
            longest_response=sizes.response_length,
            temperature=temperature,
        )
        # Copied from the last to the others, and expected there.
        told = {"reward_extra_info": {}}
        return [AgentLoopOutput(**{**each, "extra_fields": {**each["extra_fields"], **told}}) for each in rows]
