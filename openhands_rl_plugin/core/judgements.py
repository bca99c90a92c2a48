"""Which of an episode's scores says how it turned out: graders, the gateway's end, imports and people do.

What a verifier thinks of an episode is an opinion: it is stored as a score, and never takes the place of an outcome.
Which of two episodes is better is a label, and no score.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import batched

from openhands_rl_plugin.core.protocols import TakesLabels, TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.core.types import Frozen, Score, StopReason, Task, pays_rewards

Preferences = dict[frozenset[str], str | None]
"""Two episodes' ids -> that of the better one, or ``None`` where somebody found them equally good."""

ALIKE = 0.5
"""A preference's value where neither episode is better."""
_AT_ONCE = 1000
# Sums of step rewards, such as 10 x 0.1, must not miss a bound by a rounding error.
_ROUNDING = 1e-9

OPINION = "verifier-"
"""How the reward versions of verifiers begin."""

VERDICT = "verdict-1"
"""The reward version of a person's verdict."""

UNJUDGED = "say one: openhands-rl score STORE --id ID --value 1, or go through them: openhands-rl label STORE"
"""The remedy where nobody judged an episode, in place of a grader's reason."""


class SuccessRule(Frozen):
    """``at``: the least return of a success (``None``: any). ``ended``: only if the environment ended the episode."""

    at: float | None = 1.0
    ended: bool = False

    def holds(self, reward: float, stop: StopReason) -> bool:
        """Whether an episode with this return is a success."""
        return (self.at is None or reward >= self.at - _ROUNDING) and (not self.ended or stop is StopReason.TERMINATED)

    def __str__(self) -> str:
        parts = [] if self.at is None else [f"a return of at least {self.at:g}"]
        return " and ".join([*parts, *(["an end that the environment made"] if self.ended else [])])


def is_opinion(reward_version: str) -> bool:
    """Whether scores of this version are opinions, not outcomes."""
    return reward_version.startswith(OPINION)


def newest_outcome(scores: Iterable[Score]) -> Score | None:
    """The newest judgement of the outcome, of ``scores`` oldest first.

    Opinions are passed over, and so is a version whose newest score is ``None``: it withdrew what it said.
    """
    last: dict[str, Score] = {}
    for score in scores:
        # Put at the end, so that the order is that in which the newest ones came.
        last.pop(score.reward_version, None)
        last[score.reward_version] = score
    known = [score for score in last.values() if score.reward is not None and not is_opinion(score.reward_version)]
    return known[-1] if known else None


def standing(labels: Iterable[Label]) -> tuple[Label, ...]:
    """The labels that hold, in order: neither withdrawn nor withdrawals."""
    known = tuple(labels)
    withdrawn = {label.withdraws for label in known}
    return tuple(label for label in known if label.withdraws is None and label.id not in withdrawn)


def preferences(labels: Iterable[Label]) -> Preferences:
    """What was said last of each two episodes."""
    said: Preferences = {}
    for label in sorted(standing(labels), key=lambda label: label.at):
        first, second, value = label.trajectory_id, label.other, label.value
        if label.kind is LabelKind.PREFERENCE and value is not None and second is not None and second != first:
            said[frozenset((first, second))] = None if value == ALIKE else first if value > ALIKE else second
    return said


async def labels_of(storage: TrajectoryStorage, trajectory_ids: Sequence[str]) -> tuple[Label, ...]:
    """The labels of these episodes, none where the storage takes none. Raises ``StorageError``."""
    if not isinstance(storage, TakesLabels):
        return ()
    parts = [await storage.labels(part) for part in batched(trajectory_ids, _AT_ONCE)]
    return tuple(label for part in parts for label in part)


def asked_in_common(task: Task) -> tuple[str, str, str]:
    """What attempts at one task have in common, and others have not."""
    # The task of a session is named after the session: what it was asked is what it has in common with others.
    name = task.id if pays_rewards(task.environment, {}) or not task.instruction else ""
    return task.environment, name, task.instruction
