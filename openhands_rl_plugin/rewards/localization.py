"""The reward of a localization task: F1 of the files, modules and functions that the agent found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, ValidationError, model_validator

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.records import LocatedPlaces
from openhands_rl_plugin.core.types import Frozen, JsonObject, Score, Trajectory

_LEVELS = ("file", "module", "function")


class LocalizationOptions(Frozen):
    """The weights of the three levels. Only what they are to each other counts."""

    file: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    module: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    function: float = Field(default=1.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _weighs_something(self) -> Self:
        if not self.file:
            raise ValueError("the weight of files must be above 0: it is the one level that every fix has")
        return self


class LocalizationReward:
    """The weighted mean over the levels of F1 = 2 |P ∩ G| / (|P| + |G|), P the places that the agent named, G those of
    the fix: from 0 to 1. A level of which the fix has no place does not count.

    The levels are CodeScout's (arXiv 2603.17829), whose reward is their sum. The places are resolved when the episode
    is graded, into ``evidence["test_result"]["verdict"]["places"]``.
    """

    Options = LocalizationOptions

    def __init__(self, options: LocalizationOptions | None = None) -> None:
        self.options = options or LocalizationOptions()

    @property
    def version(self) -> str:
        """The name of the reward with its weights."""
        weights = (self.options.file, self.options.module, self.options.function)
        return f"localization-1@{'/'.join(f'{each:g}' for each in weights)}"

    async def __call__(self, trajectory: Trajectory) -> Score:
        """Score the episode. Raises ``GraderError`` for a failed one, and for one that is not graded."""
        if trajectory.failure is not None:
            raise GraderError(f"{trajectory.id} failed ({trajectory.failure.kind}): {trajectory.failure.message}")
        verdict, places = _graded(trajectory)
        reward, detail = self._mean(places)
        return Score(
            trajectory_id=trajectory.id,
            reward=reward,
            detail={**detail, "by": places.by, "verdict": verdict},
            reward_version=self.version,
        )

    def _mean(self, places: LocatedPlaces) -> tuple[float, JsonObject]:
        named, fix = places.named, places.fix
        levels = zip(
            _LEVELS,
            (self.options.file, self.options.module, self.options.function),
            ((named.files, fix.files), (named.modules, fix.modules), (named.functions, fix.functions)),
            strict=True,
        )
        counted = {level: (weight, f1(*sides)) for level, weight, sides in levels if sides[1]}
        total = sum(weight for weight, _ in counted.values())
        reward = sum(weight * score for weight, score in counted.values()) / total
        return reward, {"f1": {level: score for level, (_, score) in counted.items()}, "resolved": named == fix}


def f1(named: Sequence[str], fix: Sequence[str]) -> float:
    """The harmonic mean of precision and recall, 0 where nothing was named."""
    return 2 * len(set(named) & set(fix)) / (len(set(named)) + len(set(fix)))


def _graded(trajectory: Trajectory) -> tuple[JsonObject, LocatedPlaces]:
    held = trajectory.evidence.get("test_result")
    verdict = held.get("verdict") if isinstance(held, dict) else None
    if not isinstance(verdict, dict) or verdict.get("places") is None:
        raise GraderError(f"{trajectory.id} has no places in its evidence: grade it first, as a localization task")
    try:
        places = LocatedPlaces.model_validate(verdict["places"])
    except ValidationError as error:
        raise GraderError(f"{trajectory.id} has places in its evidence that cannot be read") from error
    if not places.fix.files:
        raise GraderError(f"{trajectory.id}: its fix touches no file, so there is nothing to find")
    return verdict, places
