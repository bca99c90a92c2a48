"""Which of an episode's scores says how it turned out: graders, the gateway's end, imports and people do.

What a verifier thinks of an episode is an opinion: it is stored as a score, and never takes the place of an outcome.
"""

from __future__ import annotations

from collections.abc import Iterable

from openhands_rl_plugin.core.types import Score

OPINION = "verifier-"
"""How the reward versions of verifiers begin."""

VERDICT = "verdict-1"
"""The reward version of a person's verdict."""

UNJUDGED = "say one: openhands-rl score STORE --id ID --value 1, or go through them: openhands-rl label STORE"
"""The remedy where nobody judged an episode, in place of a grader's reason."""


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
