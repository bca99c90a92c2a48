"""Reads the verifier scores of attempts from the store of their episodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import TrajectoryFilter
from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.evals.report.run_records import RunRecord

VERIFIER = "verifier"
"""The prefix of the ``reward_version`` of verifiers' scores."""

_AT_ONCE = 200


async def with_verifier(
    runs: Sequence[RunRecord], storage: TrajectoryStorage, version: str = VERIFIER
) -> tuple[RunRecord, ...]:
    """The runs with every attempt's newest score whose version begins with ``version``. Raises ``StorageError``."""
    ids = sorted({outcome.trajectory_id for run in runs for outcome in run.outcomes if outcome.trajectory_id})
    scores: dict[str, float] = {}
    for start in range(0, len(ids), _AT_ONCE):
        where = TrajectoryFilter(ids=tuple(ids[start : start + _AT_ONCE]))
        async for trajectory, found in storage.find(where):
            if (score := _newest(found, version)) is not None:
                scores[trajectory.id] = score
    return tuple(
        run.model_copy(
            update={
                "outcomes": tuple(
                    outcome.model_copy(update={"verifier": scores.get(outcome.trajectory_id, outcome.verifier)})
                    for outcome in run.outcomes
                )
            }
        )
        for run in runs
    )


def _newest(scores: Iterable[Score], version: str) -> float | None:
    own = [score.reward for score in scores if score.reward_version.startswith(version) and score.reward is not None]
    return own[-1] if own else None
