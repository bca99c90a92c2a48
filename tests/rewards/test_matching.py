"""MatchingReward: an answer against its label."""

from __future__ import annotations

from typing import Any

import pytest

from openhands_rl_plugin.config import registry
from openhands_rl_plugin.core.errors import GraderError
from openhands_rl_plugin.rewards.matching import MatchingOptions, MatchingReward
from openhands_rl_plugin.testing import check_reward, example_trajectory


def played(answer: Any, label: Any, at: int = 0) -> Any:
    return example_trajectory(at).model_copy(update={"evidence": {"answer": answer, "label": label}})


@pytest.mark.parametrize(
    ("mode", "answer", "label", "reward"),
    [
        ("exact", "Paris", "Paris", 1.0),
        ("exact", "paris", "Paris", 0.0),
        ("normalised", "  paris.\n", "Paris", 1.0),
        ("normalised", "New   York", "new york!", 1.0),
        ("normalised", "\N{LATIN SMALL LIGATURE FI}ne", "Fine", 1.0),
        ("normalised", "-5", "5", 0.0),
        ("normalised", "London", ["Paris", "London"], 1.0),
        ("normalised", None, "42", 0.0),
        ("number", "17 and 25 make 42.", "42", 1.0),
        ("number", "It is 1,234.50", 1234.5, 1.0),
        ("number", "-3", 3, 0.0),
        ("number", "0.33333333", 1 / 3, 1.0),
        ("number", "20-25", 25, 1.0),
        ("number", "between 3, 4, and .5", 0.5, 1.0),
    ],
)
async def test_what_matches(mode: Any, answer: Any, label: Any, reward: float) -> None:
    score = await MatchingReward(MatchingOptions(mode=mode))(played(answer, label))
    assert score.reward == reward and score.detail == {"answered": answer is not None}


@pytest.mark.parametrize("label", [None, [], [None], True, {"a": 1}])
async def test_without_a_label_there_is_no_score(label: Any) -> None:
    with pytest.raises(GraderError, match="has no label"):
        await MatchingReward()(played("x", label))


async def test_it_is_a_reward_and_each_mode_is_a_version() -> None:
    assert isinstance(registry.build("rewards", "matching"), MatchingReward)
    versions = {registry.build("rewards", "matching", {"mode": m}).version for m in ("exact", "normalised", "number")}
    assert len(versions) == 3
    answered = [played("3", "3", at) for at in range(3)]
    failed = played("3", "3", 3)
    await check_reward(MatchingReward(), answered)
    with pytest.raises(GraderError, match="failed"):
        await MatchingReward()(failed)
