"""Which of an episode's scores is its outcome: graders, the gateway's end, imports and ``score --value`` do.

What a verifier thinks of an episode, and what people who label think of it (``score --reward human``), is an opinion:
it is stored as a score, has a column of its own, and never takes the place of an outcome. Labels are no scores at all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.core.messages import json_object
from openhands_rl_plugin.core.protocols import TrajectoryStorage
from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.core.types import Frozen, JsonObject, Score, StopReason, Task, Trajectory, rewards_steps

Preferences = dict[frozenset[str], str | None]
"""Two episodes' ids -> that of the better one, or ``None`` where somebody found them equally good."""

GOOD, BAD = "good", "bad"
"""The names of verdicts in lists."""

ALIKE = 0.5
"""A preference's value where neither episode is better."""
# Sums of step rewards, such as 10 x 0.1, must not miss a bound by a rounding error.
_ROUNDING = 1e-9

OPINION = "verifier-"
"""How the reward versions of verifiers begin."""

HUMAN = "human-"
"""How the reward versions of what people labelled begin."""

OPINIONS: Mapping[str, str] = {"human": HUMAN, "verifier": OPINION}
"""Columns of opinions -> how their reward versions begin."""

VERDICT = "verdict-1"
"""The reward version of a score that a person stored by hand (``score --value``)."""

UNJUDGED = (
    "say one: openhands-rl score STORE --id ID --value 1, or go through them in the studio, and take --reward human"
)
"""The remedy where nobody judged an episode, in place of a grader's reason."""


_OF_OTHERS = ("gateway", "imported")
"""Strategies of episodes that a client ended, or that a file holds."""


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


def host_evidence(trajectory: Trajectory) -> JsonObject:
    """The evidence that a reward may read: what the host that ran the episode wrote.

    Raises ``GraderError`` for a failed episode, and for one whose evidence a client or a file wrote.
    """
    if trajectory.failure is not None:
        raise GraderError(f"{trajectory.id} failed ({trajectory.failure.kind}): {trajectory.failure.message}")
    if trajectory.strategy.name in _OF_OTHERS:
        raise GraderError(f"{trajectory.id} was not run here, so its evidence proves nothing: take --reward recorded")
    return trajectory.evidence


def is_opinion(reward_version: str) -> bool:
    """Whether scores of this version are opinions, not outcomes."""
    return reward_version.startswith(tuple(OPINIONS.values()))


def newest_outcome(scores: Iterable[Score]) -> Score | None:
    """The newest judgement of the outcome, of ``scores`` oldest first.

    Opinions are passed over, and so is a version whose newest score is ``None``: it withdrew its judgement.
    """
    return next((score for score in reversed(_holding(scores)) if not is_opinion(score.reward_version)), None)


def opinions(scores: Iterable[Score]) -> dict[str, float]:
    """Column of ``OPINIONS`` -> value, from ``scores``, oldest first. Columns without a valid score are left out."""
    holding = _holding(scores)
    scored = {name: named_score(holding, name) for name in OPINIONS}
    return {name: score.reward for name, score in scored.items() if score is not None and score.reward is not None}


def named_score(scores: Iterable[Score], reward: str) -> Score | None:
    """The newest score that holds of any version of the reward ``reward`` (``tests``: ``tests-1``, ``tests-2``)."""
    return next((each for each in reversed(_holding(scores)) if each.reward_version.startswith(f"{reward}-")), None)


def _holding(scores: Iterable[Score]) -> list[Score]:
    """The newest score of each version, unless it withdraws that version's judgement; the newest is the last."""
    last: dict[str, Score] = {}
    for score in scores:
        # Put at the end, so that the order is that in which the newest ones came.
        last.pop(score.reward_version, None)
        last[score.reward_version] = score
    return [score for score in last.values() if score.reward is not None]


def standing(labels: Iterable[Label]) -> tuple[Label, ...]:
    """The labels that hold, in order: neither withdrawn nor withdrawals."""
    known = tuple(labels)
    withdrawn = {label.withdraws for label in known}
    return tuple(label for label in known if label.withdraws is None and label.id not in withdrawn)


def verdict_word(label: Label) -> str | None:
    """``good`` or ``bad`` for a verdict that is one of them."""
    if label.kind is not LabelKind.VERDICT or label.value is None:
        return None
    return GOOD if label.value >= 1 else BAD if label.value <= 0 else None


class Consensus(Frozen):
    """The joint verdict of the people who judged an episode. ``value``: that of more than half of them, else
    ``None``; ``labellers``: how many they are; ``agree``: how many gave the most frequent one."""

    value: float | None
    labellers: int
    agree: int


def verdicts(labels: Iterable[Label]) -> dict[str, float]:
    """Author -> the verdict that they gave last on the whole episode, of the labels of one episode."""
    by_author: dict[str, float] = {}
    for label in sorted(standing(labels), key=lambda label: label.at):
        if label.kind is LabelKind.VERDICT and label.node is None:
            by_author.pop(label.author, None)
            if label.value is not None:
                by_author[label.author] = label.value
    return by_author


def consensus(labels: Iterable[Label]) -> Consensus | None:
    """The joint verdict of the labellers of one episode; ``None`` where nobody gave a verdict."""
    given = list(verdicts(labels).values())
    if not given:
        return None
    return Consensus(value=majority(given), labellers=len(given), agree=max(Counter(given).values()))


def majority[Vote](votes: Sequence[Vote]) -> Vote | None:
    """The vote of more than half; ``None`` if there is none, as after a tie."""
    found = Counter(votes).most_common(1)
    return found[0][0] if found and 2 * found[0][1] > len(votes) else None


def preferences(labels: Iterable[Label]) -> Preferences:
    """The preferences of people between each two episodes: the last of each of them, together by ``majority``."""
    by_author: dict[frozenset[str], dict[str, str | None]] = defaultdict(dict)
    for label in sorted(standing(labels), key=lambda label: label.at):
        first, second, value = label.trajectory_id, label.other, label.value
        if label.kind is LabelKind.PREFERENCE and value is not None and second is not None and second != first:
            better = None if value == ALIKE else first if value > ALIKE else second
            by_author[frozenset((first, second))][label.author] = better
    return {both: majority([*given.values()]) for both, given in by_author.items()}


async def opinions_of(storage: TrajectoryStorage, trajectory_ids: Sequence[str]) -> dict[str, dict[str, float]]:
    """Id -> its ``opinions``, of those of which there are some. Raises ``StorageError``."""
    scores = await storage.scores(trajectory_ids)
    return {identity: known for identity, each in scores.items() if (known := opinions(each))}


FOLDER = "folder_digest"
"""Key of a workspace task's data: a digest of the folder, so that equal texts in two folders are two tasks."""


def asked_in_common(task: Task) -> tuple[str, str, str]:
    """A key that all attempts at one task share, and no other attempts."""
    # The task of a session may be named after the session: what it was asked, and where, is what it has in common.
    own = rewards_steps(task.environment, {}) or not task.instruction
    name = task.id if own else str(task.data.get(FOLDER, ""))
    return task.environment, name, task.instruction


RESOLVED_AT = 1.0


def score_of(trajectory: Trajectory, scores: Sequence[Score]) -> float | None:
    """The newest score's reward, verifiers' aside; else the return, if there is one; ``None`` after a failure."""
    if trajectory.failure is not None:
        return None
    newest = newest_outcome(scores)
    return newest.reward if newest is not None else trajectory.known_return


def resolved(trajectory: Trajectory, scores: Sequence[Score]) -> bool | None:
    """The verdict of a score by hand; else the newest score or the grader's report; else whether the score reaches 1.0;
    else unknown."""
    evidence = trajectory.evidence
    graded, by_file = json_object(evidence.get("test_result")), json_object(evidence.get("report"))
    report = json_object(graded.get("report")) or by_file
    newest = newest_outcome(scores)
    if newest is not None and newest.reward is not None and newest.reward_version == VERDICT:
        return newest.reward >= RESOLVED_AT - _ROUNDING
    judged = newest.detail.get("resolved") if newest is not None else None
    for candidate in (judged, evidence.get("resolved"), report.get("resolved")):
        if isinstance(candidate, bool):
            return candidate
    score = score_of(trajectory, scores)
    return None if score is None else score >= RESOLVED_AT - _ROUNDING


def patch_of(trajectory: Trajectory) -> str | None:
    """The change that the agent made, as a diff; ``None`` when none was recorded, not even an empty one."""
    own, tested = trajectory.evidence, json_object(trajectory.evidence.get("test_result"))
    patches = (own.get("git_patch"), tested.get("git_patch"), own.get("patch"))
    return next((patch for patch in patches if isinstance(patch, str)), None)
