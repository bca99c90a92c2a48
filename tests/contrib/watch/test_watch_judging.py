"""Who judges an episode, and what a candidate can be trained on then: labels, rewards, verifiers, groups, pairs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from train_store import episode

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.contrib.watch.gathering import (
    Judged,
    Judgement,
    Material,
    candidates,
    check_calibrated,
    judge,
    material,
)
from openhands_rl_plugin.contrib.watch.journal import State
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.records import Label, LabelKind
from openhands_rl_plugin.core.types import PolicyRef, Score, Task, Trajectory
from openhands_rl_plugin.rewards.verifier.card import Calibration, VerifierCard
from openhands_rl_plugin.rollout.scoring import UNLABELLED
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage


class Opinion:
    """A verifier as far as a watch sees it: it repeats the episode's return."""

    version = "verifier-1@test/9/2,0"

    async def __call__(self, trajectory: Trajectory) -> Score:
        return Score(trajectory_id=trajectory.id, reward=trajectory.episode_return, reward_version=self.version)


def settings(algorithm: str = "sft", reward: str = "recorded", **watch: object) -> RLSettings:
    return RLSettings.model_validate(
        {
            "serving": {"model": "tiny"},
            "training": {"algorithm": algorithm},
            "reward": {"name": reward},
            "watch": {"min_used": 2, **watch},
        }
    )


def label(identity: str, kind: LabelKind, value: float, author: str = "ann", other: str | None = None) -> Label:
    name = f"{identity}/{author}/{other}"
    return Label(id=name, trajectory_id=identity, kind=kind, value=value, author=author, other=other, at=time.time())


async def judged(store: FileTrajectoryStorage, chosen: RLSettings) -> Judged:
    return await judge(chosen, store, await candidates(store, chosen, State(), ()))


async def found(
    store: FileTrajectoryStorage, chosen: RLSettings, lineage: tuple[str, ...] = ()
) -> tuple[Material | None, str]:
    ids = await candidates(store, chosen, State(), lineage)
    return await material(store, chosen, await judge(chosen, store, ids), lineage)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileTrajectoryStorage]:
    async with FileTrajectoryStorage(tmp_path, durable=False) as opened:
        for number, rewarded in enumerate((1.0, 0.0, 0.5, 1.0)):
            await opened.add(episode(number, rewarded))
        yield opened


async def test_people_come_first_and_contradictions_wait(store: FileTrajectoryStorage) -> None:
    names = [f"episode-tiny-{number}" for number in range(4)]
    votes = [(names[0], 0.0, "ann"), (names[1], 1.0, "ann"), (names[3], 1.0, "ann"), (names[3], 0.0, "bob")]
    await store.add_labels([label(name, LabelKind.VERDICT, value, who) for name, value, who in votes])
    answer = await judged(store, settings())
    assert answer.known == {
        names[0]: Judgement(0.0, False, "people"),
        names[1]: Judgement(1.0, True, "people"),
        names[2]: Judgement(0.5, False, "recorded-1"),
    }
    assert answer.open == {"labels contradict each other": 1}
    only = await judged(store, settings(reward="human"))
    assert only.known.keys() == {names[0], names[1]}
    assert only.open == {"labels contradict each other": 1, UNLABELLED: 1}


async def test_a_verifier_counts_where_it_is_certain(store: FileTrajectoryStorage) -> None:
    answer = await judged(store, settings(reward=f"{__name__}:Opinion"))
    assert [(each.value, each.good) for each in answer.known.values()] == [(1.0, True), (0.0, False), (1.0, True)]
    assert answer.open == {"the verifier is not certain": 1}


def test_a_verifier_without_calibration_lets_nothing_in(tmp_path: Path) -> None:
    card = VerifierCard(model="m", sha256="0" * 64, max_length=10, yes=1, no=2, trained_on=())
    card.save(tmp_path)
    given = {"name": "verifier", "options": {"adapter": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"no calibrated probabilities.*verifier.calibration=platt"):
        check_calibrated(RLSettings.model_validate({"reward": given}))
    card.model_copy(update={"calibration": Calibration(slope=2.0)}).save(tmp_path)
    check_calibrated(RLSettings.model_validate({"reward": given}))


async def test_what_is_learnt_from_is_of_the_lineage_and_not_held_out(store: FileTrajectoryStorage) -> None:
    ours, dropped = PolicyRef(base_model="tiny", adapter="policy", version=1), "policy-v000002"
    await store.add(episode(10, 1.0, policy=ours, id="ours"))
    await store.add(episode(11, 1.0, policy=ours.model_copy(update={"version": 2}), id="dropped"))
    await store.add(episode(12, 1.0, base_model="another"))
    await store.add(episode(13, 1.0, task=Task(id="t", environment="shop", split="heldout"), id="measured"))
    learnt = State(learnt={"episode-tiny-0"})
    ids = await candidates(store, settings(), learnt, ("policy-v000001",))
    assert set(ids) == {"episode-tiny-1", "episode-tiny-2", "episode-tiny-3", "ours"}
    assert dropped not in ids
    assert await candidates(store, settings(), learnt, (), {("shop", "task")}) == (), "users may give those, too"


async def test_the_algorithm_follows_from_what_is_there(store: FileTrajectoryStorage) -> None:
    imitated, why = await found(store, settings())
    assert imitated is not None and imitated.settings.algorithm == "sft" and not why
    assert imitated.episodes == {"episode-tiny-0": 1.0, "episode-tiny-3": 1.0}

    compared, _ = await found(store, settings("grpo"))
    assert compared is not None and compared.settings.algorithm == "grpo"
    assert list(compared.episodes.values()) == [1.0, 0.0, 0.5, 1.0] and compared.because.startswith("4 episodes")

    few, why = await found(store, settings("grpo", min_used=5))
    assert few is None and "4 episodes can be compared with others of their task; 2 successes can be imitated" in why

    other = "episode-tiny-2"
    await store.add_labels([label("episode-tiny-1", LabelKind.PREFERENCE, 0.0, other=other)])
    await store.add_labels([label("episode-tiny-3", LabelKind.PREFERENCE, 1.0, other="episode-tiny-0")])
    preferred, _ = await found(store, settings("dpo"))
    assert preferred is not None and preferred.settings.algorithm == "dpo"
    assert preferred.because == "2 pairs in which people preferred one", "not what rewards say"

    lineage = tuple(f"policy-v{number:06d}" for number in (3, 2, 1))
    stale, why = await found(store, settings("grpo", min_used=3), lineage)
    assert stale is None and "0 episodes can be compared" in why, "of three versions before"
