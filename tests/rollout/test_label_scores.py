"""Labels change no reward until somebody asks for it; then they are what more than half of the labellers gave."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openhands_rl_plugin.core.judgements import majority, newest_outcome, opinions, verdicts
from openhands_rl_plugin.core.records import Label, LabelKind, TrajectoryFilter, TrajectoryOrder
from openhands_rl_plugin.core.types import Score
from openhands_rl_plugin.rewards.outcome import HumanReward, RecordedReward, ReturnReward
from openhands_rl_plugin.rollout.scoring import add_label, give_score, rescore, stored_rewards, withdraw
from openhands_rl_plugin.testing import sample_episode
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

IDS = ("paid", "graded", "silent")
_PEOPLE = st.sampled_from(["ann", "bob", "cay"])
_VALUES = st.sampled_from([0.0, 0.5, 1.0])
_LABELS = st.tuples(st.sampled_from(list(LabelKind)), st.sampled_from(IDS), _PEOPLE, _VALUES, st.booleans())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("labels")

    async def fill() -> None:
        async with FileTrajectoryStorage(made) as storage:
            await storage.add(sample_episode("paid", environment="shop", reward=0.25))
            for identity in ("graded", "silent"):
                await storage.add(sample_episode(identity, environment="workspace", reward=0.0))
            await storage.add_scores([Score(trajectory_id="graded", reward=0.75, reward_version="tests-1")])

    asyncio.run(fill())
    return made


async def rewards_of(storage: FileTrajectoryStorage) -> object:
    """What every reader of rewards sees."""
    by_reward = TrajectoryFilter(sort=TrajectoryOrder.REWARD, descending=True)
    listed = [(each.id, each.reward, each.episode_return) async for each in storage.summaries(by_reward)]
    good = [each.id async for each in storage.summaries(TrajectoryFilter(reward_at_least=0.2))]
    found = [pair async for pair in storage.find()]
    outcomes = [newest_outcome(scores) for _, scores in found]
    trajectories = [trajectory for trajectory, _ in found]
    trained = [await stored_rewards(storage, each, trajectories) for each in (ReturnReward(), RecordedReward())]
    return listed, good, outcomes, trained


@settings(max_examples=15, deadline=None)
@given(added=st.lists(_LABELS, min_size=1, max_size=12))
def test_labels_change_no_reward(folder: Path, added: list[tuple[LabelKind, str, str, float, bool]]) -> None:
    async def label() -> None:
        async with FileTrajectoryStorage(folder) as storage:
            before = await rewards_of(storage)
            for kind, identity, author, value, taken_back in added:
                other = next(each for each in IDS if each != identity) if kind is LabelKind.PREFERENCE else None
                made = await add_label(storage, identity, kind, value=value, other=other, author=author, text="so")
                if taken_back:
                    await withdraw(storage, made, author=author)
            assert await rewards_of(storage) == before
            await rescore(storage, HumanReward())
            assert await rewards_of(storage) == before, "what people think stands in a column of its own"
            labels, scores = await storage.labels(IDS), await storage.scores(IDS)
            for identity in IDS:
                given_ = verdicts(label for label in labels if label.trajectory_id == identity)
                assert opinions(scores.get(identity, ())).get("human") == majority([*given_.values()])
            assert (await rescore(storage, HumanReward())).scored == 0, "the same again changes nothing"

    asyncio.run(label())


@pytest.mark.parametrize(
    ("values", "together"),
    [([1, 1, 0], 1), ([1, 0], None), ([1, 1, 0, 0.5], None), ([], None), ([0.5], 0.5), ([None, None, 1], None)],
)
def test_more_than_half_have_to_agree(values: list[float | None], together: float | None) -> None:
    assert majority(values) == together


def label(at: int, author: str, **fields: object) -> Label:
    fields_given = {"id": str(at), "trajectory_id": "a", "kind": "verdict", "author": author, "at": float(at)}
    return Label.model_validate({**fields_given, **fields}, strict=False)


def test_of_one_author_the_last_word_counts() -> None:
    labels = [label(1, "ann", value=0.0), label(2, "bob", value=0.0), label(3, "ann", value=1.0)]
    assert verdicts(labels) == {"bob": 0.0, "ann": 1.0}
    assert verdicts([*labels, label(4, "ann", value=0.0, node=2)]) == {"bob": 0.0, "ann": 1.0}, "of a step, not of all"
    assert verdicts([*labels, label(4, "ann", withdraws="3")]) == {"ann": 0.0, "bob": 0.0}
    assert verdicts([*labels, label(4, "ann", value=None)]) == {"bob": 0.0}


async def test_a_score_by_hand_counts_and_is_a_verdict_too(tmp_path: Path) -> None:
    async with FileTrajectoryStorage(tmp_path) as storage:
        await storage.add(sample_episode("one", environment="workspace"))
        await add_label(storage, "one", LabelKind.VERDICT, value=1.0, author="ann")
        await give_score(storage, "one", 0.0, author="ann")
        (summary,) = [each async for each in storage.summaries()]
        assert summary.reward == 0.0
        await give_score(storage, "one", 0.5, author="bob")
        assert verdicts(await storage.labels(["one"])) == {"ann": 0.0, "bob": 0.5}
        of_ann, of_bob = [each for each in await storage.labels(["one"]) if each.value in (0.0, 0.5)]
        await withdraw(storage, of_ann, author="ann")
        (summary,) = [each async for each in storage.summaries()]
        assert (summary.reward, verdicts(await storage.labels(["one"]))) == (0.5, {"ann": 1.0, "bob": 0.5})
        await withdraw(storage, of_bob, author="bob")
        (summary,) = [each async for each in storage.summaries()]
        assert summary.reward is None
