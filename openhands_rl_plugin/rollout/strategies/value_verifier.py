"""The probability of success of an episode up to a state, by a trained verifier."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ConfigDict, Field

from openhands_rl_plugin.core.protocols import Reward
from openhands_rl_plugin.core.types import JsonObject, Trajectory
from openhands_rl_plugin.rollout.strategies.budget import StrictOptions
from openhands_rl_plugin.rollout.strategies.search import Search
from openhands_rl_plugin.rollout.strategies.value import ValueEstimate, earned, episode_so_far, judged_in_time


class VerifierValueOptions(StrictOptions):
    """``scale`` is the value of a sure success. All other keys are those of the reward ``verifier``, such as
    ``adapter`` and ``base_url``; ``verifier`` names another reward of that kind.
    """

    model_config = ConfigDict(extra="allow")

    verifier: str = "verifier"
    scale: float = Field(default=1.0, gt=0)

    @property
    def verifier_options(self) -> JsonObject:
        """What the reward is built from."""
        return dict(self.model_extra or {})


class VerifierValue:
    """A verifier's score of the episode up to a state. It reads the conversation, so no fork is needed; states that are
    judged together, as the candidates of a turn are, share the computation of their common prefix.
    """

    Options = VerifierValueOptions
    Parts: ClassVar = {"verifier": "rewards"}
    name = "verifier"
    needs_world = False

    def __init__(self, options: VerifierValueOptions | None = None, *, verifier: Reward) -> None:
        self._scale = (options or VerifierValueOptions()).scale
        self._verifier = verifier

    async def estimate(self, search: Search, state: int) -> ValueEstimate | None:
        """Judge once; ``None`` if it cannot be judged."""
        score = await judged_in_time(search, self._verifier, _so_far(search, state))
        return None if score is None else ValueEstimate(self._scale * score - earned(search, state))

    async def estimate_end(self, search: Search, state: int) -> ValueEstimate | None:
        """Where the environment has paid something, that is what the end is worth; else as for any other state."""
        return ValueEstimate(0.0) if earned(search, state) else await self.estimate(search, state)


async def _so_far(search: Search, state: int) -> Trajectory:
    return episode_so_far(search, state, {})
