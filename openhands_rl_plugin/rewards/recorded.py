"""The reward that was recorded: what a grader, the gateway's client, an import or a person said of the outcome."""

from __future__ import annotations

from collections.abc import Sequence

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.judgements import UNJUDGED, newest_outcome
from openhands_rl_plugin.core.types import Frozen, Score, Trajectory


class RecordedOptions(Frozen):
    """No options."""


class RecordedReward:
    """The newest judgement of the outcome (``newest_outcome``), whoever made it; else the environment's return.

    It is read anew each time and not stored again, so that a later verdict counts.
    """

    Options = RecordedOptions
    version = "recorded-1"

    def __init__(self, options: RecordedOptions | None = None) -> None:
        self.options = options or RecordedOptions()

    async def __call__(self, trajectory: Trajectory) -> Score:
        """The return of an episode without scores. Raises ``GraderError`` where there is none."""
        if trajectory.failure is not None:
            raise GraderError(f"{trajectory.id} failed ({trajectory.failure.kind}): {trajectory.failure.message}")
        if (score := self.from_record(trajectory, ())) is None:
            raise GraderError(UNJUDGED)
        return score

    def from_record(self, trajectory: Trajectory, scores: Sequence[Score]) -> Score | None:
        """The score that follows from ``scores``, oldest first; ``None`` where the reward has to judge itself."""
        newest = newest_outcome(scores)
        judge, reward = (newest.reward_version, newest.reward) if newest else ("return", trajectory.known_return)
        if reward is None or trajectory.failure is not None:
            return None
        return Score(
            trajectory_id=trajectory.id, reward=reward, detail={"judged_by": judge}, reward_version=self.version
        )
