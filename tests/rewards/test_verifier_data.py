"""Labels, and splits that no task crosses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verifier_store import episode

from openhands_rl_plugin.config.rl import VerifierSettings
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.core.types import Failure, FailureKind, Score
from openhands_rl_plugin.rewards.outcome import HumanReward, ReturnReward
from openhands_rl_plugin.rewards.verifier.card import task_digest
from openhands_rl_plugin.rewards.verifier.data import Labelled, balanced, label_of, split_by_task

SETTINGS = VerifierSettings()
EPISODES = st.lists(st.tuples(st.integers(0, 12), st.booleans()), min_size=2, max_size=60).filter(
    lambda found: len({task for task, _ in found}) > 1
)


def labelled(found: list[tuple[int, bool]]) -> list[Labelled]:
    return [Labelled(f"{at}", f"task-{task}", success) for at, (task, success) in enumerate(found)]


def test_a_task_stays_on_its_side_when_the_store_grows() -> None:
    few, many = (split_by_task(labelled([(task, True) for task in range(n)]), SETTINGS, 0) for n in (50, 200))
    for some, more in zip(few, many, strict=True):
        assert {one.task for one in some} < {one.task for one in more}
    assert 20 <= len(many[1]) <= 60, "about a fifth"
    assert split_by_task(labelled([(task, True) for task in range(50)]), SETTINGS, 1) != few


@given(EPISODES, st.floats(0.01, 0.99), st.integers(0, 5), st.sets(st.integers(0, 12)))
def test_what_taught_an_earlier_version_is_never_held_out(
    found: list[tuple[int, bool]], share: float, seed: int, known: set[int]
) -> None:
    examples, settings = labelled(found), VerifierSettings(held_out=share)
    taught = frozenset(task_digest(f"task-{number}") for number in known)
    if {number for number, _ in found} <= known:
        with pytest.raises(TrainingError, match=r"no task is left to hold out: .* --from base"):
            split_by_task(examples, settings, seed, taught)
        return
    training, held_out = split_by_task(examples, settings, seed, taught)
    assert training and held_out
    assert not {task_digest(one.task) for one in held_out} & taught
    assert not {one.task for one in training} & {one.task for one in held_out}
    assert len(training) + len(held_out) == len(examples)


@pytest.mark.parametrize(("ratio", "kept"), [(0.5, 5), (1.0, 10), (2.0, 20), (4.0, 25), (0.0, 25)])
def test_failures_are_sampled_to_the_ratio(ratio: float, kept: int) -> None:
    examples = labelled([(at, at < 10) for at in range(35)])
    settings = VerifierSettings(negatives=ratio)
    chosen = balanced(examples, settings, 0)
    assert sum(one.success for one in chosen) == 10 and len(chosen) == 10 + kept
    assert balanced(examples[::-1], settings, 0)[::-1] == chosen, "whatever the order of the store"
    assert kept == 25 or balanced(examples, settings, 1) != chosen


def score(reward: float, version: str) -> Score:
    return Score(trajectory_id="episode-1-1", reward=reward, reward_version=version)


async def test_evidence_says_it_and_verifiers_do_not() -> None:
    judged = [score(1.0, "verifier-1@0123456789abcdef/10240")]
    assert await label_of(episode(1, 1, success=False), judged, SETTINGS, None) is False
    assert await label_of(episode(1, 1, success=None), judged, SETTINGS, None) is None
    assert await label_of(episode(1, 1, success=None), [score(1.0, "tests-1"), *judged], SETTINGS, None) is True
    broken = Failure(kind=FailureKind.INFRASTRUCTURE, message="away", boundary="test")
    assert await label_of(episode(1, 1, success=True, failure=broken), judged, SETTINGS, None) is None


async def test_a_reward_says_it_from_its_threshold_on() -> None:
    settings = VerifierSettings(label="return")
    one = episode(1, 1, success=None)
    scores = [score(0.1, "return-1"), score(0.1 + 0.2 + 0.7, "return-1"), score(0.0, "other")]
    assert await label_of(one, scores, settings, ReturnReward()) is True
    assert await label_of(one, scores[:1], settings, ReturnReward()) is False
    assert await label_of(one, [], settings, ReturnReward()) is None, "its steps have no rewards"


async def test_what_people_labelled_is_the_label_of_who_asks_for_it() -> None:
    def says(author: str, value: float) -> Label:
        return Label(id=author, trajectory_id="e", kind=LabelKind.VERDICT, value=value, author=author, at=1.0)

    one, settings = episode(1, 1, success=False), VerifierSettings(label="human")
    stale = [Score(trajectory_id=one.id, reward=0.0, reward_version="human-1")]
    assert await label_of(one, stale, settings, HumanReward(), [says("ann", 1.0)]) is True, "as it is now"
    assert await label_of(one, stale, settings, HumanReward(), [says("ann", 1.0), says("bob", 0.0)]) is None
    assert await label_of(one, stale, settings, HumanReward(), []) is None
    assert await label_of(one, [], SETTINGS, None, [says("ann", 1.0)]) is False, "nobody asked for it"
