"""How far behind the newest weights of a run something was sampled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openhands_rl_plugin.core.types import PolicyRef, Trajectory
from openhands_rl_plugin.training.loop.plan import LoopState


@dataclass(frozen=True)
class Staleness:
    """Versions between the newest weights and those that sampled a token: the mean over tokens, and the most."""

    mean: float
    largest: int


class Lineage:
    """The weights of a run in the order in which they came, the base model first.

    The number in a version's name does not tell: a stage that was killed may have left a version that nobody went on
    from.
    """

    def __init__(self, base_model: str, state: LoopState) -> None:
        adapters = (record.adapter for record in state.records if record.adapter is not None)
        names = tuple(dict.fromkeys((base_model, *adapters)))
        self._ages = {name: len(names) - 1 - at for at, name in enumerate(names)}

    def age(self, policy: PolicyRef) -> int | None:
        """Versions that came after ``policy``; ``None`` for weights that are no part of this run."""
        return self._ages.get(policy.served_name)

    def is_too_stale(self, trajectory: Trajectory, most: int) -> bool:
        """Whether any of it was sampled more than ``most`` versions ago, or by weights that are no part of this run."""
        return any(age is None or age > most for age, _ in self._sampled(trajectory))

    def staleness(self, trajectories: Sequence[Trajectory]) -> Staleness:
        """Of all sampled tokens together; nothing sampled is not stale."""
        ages = [(age, tokens) for each in trajectories for age, tokens in self._sampled(each) if age is not None]
        total = sum(tokens for _, tokens in ages)
        return Staleness(
            mean=sum(age * tokens for age, tokens in ages) / total if total else 0.0,
            largest=max((age for age, _ in ages), default=0),
        )

    def _sampled(self, trajectory: Trajectory) -> Iterator[tuple[int | None, int]]:
        """Age and number of tokens of everything that was sampled, branches of a search too."""
        for node in trajectory.nodes:
            if node.sampled:
                tokens = len(node.tokens.sampled_ids) if node.tokens is not None else 0
                yield self.age(node.policy or trajectory.policy), tokens
