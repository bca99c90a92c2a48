"""Staleness: the number of versions between a run's newest weights and those that sampled a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from openhands_rl_plugin.core.types import PolicyRef, Trajectory
from openhands_rl_plugin.training.loop.plan import LoopState


@dataclass(frozen=True)
class Staleness:
    """Versions between the newest weights and those that sampled a token: mean over tokens, and maximum."""

    mean: float
    largest: int


class PolicyLineage:
    """The weights of a run, or of a chain of versions, in order of publication, the base model first.

    The number in a version's name is not enough: a killed stage may have left a version from which no training
    continued.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """``names``: as servers know them, the base model's first."""
        names = tuple(dict.fromkeys(names))
        self._ages = {name: len(names) - 1 - at for at, name in enumerate(names)}

    @classmethod
    def of_run(cls, base_model: str, state: LoopState) -> Self:
        """That of a loop."""
        return cls((base_model, *(record.adapter for record in state.records if record.adapter is not None)))

    def age(self, policy: PolicyRef) -> int | None:
        """Number of versions after ``policy``; ``None`` for weights that are not of this run."""
        return self._ages.get(policy.served_name)

    def is_too_stale(self, trajectory: Trajectory, most: int) -> bool:
        """Whether a token was sampled more than ``most`` versions ago, or by weights that are not of this run."""
        return any(age is None or age > most for age, _ in self._sampled(trajectory))

    def staleness(self, trajectories: Sequence[Trajectory]) -> Staleness:
        """The staleness of all sampled tokens; 0 where none was sampled."""
        ages = [(age, tokens) for each in trajectories for age, tokens in self._sampled(each) if age is not None]
        total = sum(tokens for _, tokens in ages)
        return Staleness(
            mean=sum(age * tokens for age, tokens in ages) / total if total else 0.0,
            largest=max((age for age, _ in ages), default=0),
        )

    def _sampled(self, trajectory: Trajectory) -> Iterator[tuple[int | None, int]]:
        """Age and number of tokens of every sampled node, including the branches of a search."""
        for node in trajectory.nodes:
            if node.sampled:
                tokens = len(node.tokens.sampled_ids) if node.tokens is not None else 0
                yield self.age(node.policy or trajectory.policy), tokens
