"""SWE-bench predictions: what was changed, by which model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from openhands_rl_plugin.core.tree import EpisodeTree
from openhands_rl_plugin.core.types import JsonObject, Score, StopReason, Task, Trajectory
from openhands_rl_plugin.trajectories.exchange.episodes import SWE, Ending, Imported, Origin, finished, patch_of
from openhands_rl_plugin.trajectories.exchange.foreign import Foreign, LeftOutError, parse
from openhands_rl_plugin.trajectories.exchange.writing import Columns

COLUMNS: Columns = {"instance_id": "string", "model_patch": "string", "model_name_or_path": "string"}


class Prediction(Foreign):
    """A row of a predictions file; an absent patch is an empty one."""

    instance_id: str
    model_patch: str = ""
    model_name_or_path: str | None = None


def rows(trajectory: Trajectory, scores: Sequence[Score]) -> Iterator[JsonObject]:
    """One prediction. Raises ``LeftOutError`` for an episode without a recorded patch; an empty patch is one."""
    patch = patch_of(trajectory)
    if patch is None:
        raise LeftOutError("its evidence has no patch")
    yield {
        "instance_id": trajectory.task.id,
        "model_patch": patch,
        "model_name_or_path": trajectory.policy.served_name,
    }


def read(row: JsonObject) -> Imported:
    """An episode of which only the patch is known. Raises ``ExchangeError``."""
    record = parse(Prediction, row)
    origin = Origin("predictions", Task(id=record.instance_id, environment=SWE), record.model_name_or_path)
    return finished(EpisodeTree(), origin, Ending(StopReason.TERMINATED, {"git_patch": record.model_patch}))
