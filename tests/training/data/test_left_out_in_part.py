"""Episodes of which a part is trained, and imports of which nobody said how they turned out: counted, and said."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.records import SUB_AGENT, TrajectoryFilter, sub_agents_run
from openhands_rl_plugin.core.types import (
    Message,
    Node,
    PolicyRef,
    Score,
    StopReason,
    StrategySpec,
    Task,
    Times,
    Tokens,
    Trajectory,
)
from openhands_rl_plugin.rollout.scoring import rescore
from openhands_rl_plugin.training.data.dataset import (
    Episodes,
    ExcludedEpisodes,
    TrainingDataset,
    build_dataset,
    load_episodes,
)
from openhands_rl_plugin.trajectories.sqlite.storage import FileTrajectoryStorage

POLICY = PolicyRef(base_model="m")
REWRITTEN = {"history_rewritten": True}


def said(parent: int | None, content: str) -> Node:
    return Node(parent=parent, message=Message(role="user", content=content))


def answer(parent: int, content: str, *, tokens: bool = True, length: int = 2, **more: Any) -> Node:
    ids = Tokens(prompt_ids=(1, 2), sampled_ids=(3,) * length, logprobs=(-0.1,) * length) if tokens else None
    message = Message(role="assistant", content=content)
    return Node(parent=parent, message=message, sampled=True, policy=POLICY, tokens=ids, **more)


def episode(nodes: Sequence[Node], *, strategy: str = "react", **more: Any) -> Trajectory:
    given = {"id": "a", "run_id": "r", "group_id": "g", "task": Task(id="t", environment="swe"), **more}
    return Trajectory(
        strategy=StrategySpec(name=strategy),
        policy=POLICY,
        nodes=tuple(nodes),
        head=len(nodes) - 1,
        stop=StopReason.TERMINATED,
        times=Times(started=0, finished=1),
        **given,
    )


def fine_tuned(trajectory: Trajectory) -> TrainingDataset:
    return build_dataset(Episodes((trajectory,), (1.0,), ExcludedEpisodes()), TrainingSettings(algorithm="sft"))


class Opinion:
    version = "verifier-1@abc"

    async def __call__(self, trajectory: Trajectory) -> Score:
        return Score(trajectory_id=trajectory.id, reward=0.02, reward_version=self.version)


class Stored:
    def __init__(self, trajectory: Trajectory, scores: Sequence[Score]) -> None:
        self.found = trajectory, tuple(scores)

    async def find(self, where: TrajectoryFilter) -> AsyncIterator[tuple[Trajectory, tuple[Score, ...]]]:
        yield self.found

    async def labels(self, ids: Sequence[str]) -> tuple[()]:
        return ()


def score(version: str, reward: float | None) -> Score:
    return Score(trajectory_id="a", reward=reward, reward_version=version)


@pytest.mark.parametrize(
    ("scores", "presume", "returns", "presumed"),
    [
        ([score("verifier-1@abc", 0.02)], True, (0.02,), 0),
        ([score("imported-1", 0.0), score("verifier-1@abc", 0.02)], True, (0.02,), 0),
        ([score("verdict-1", 0.0), score("verdict-1", None)], True, (0.02,), 0),
        ([score("imported-1", 0.0)], True, (0.0,), 0),
        ([], True, (1.0,), 1),
        ([], False, (0.02,), 0),
    ],
)
async def test_an_import_is_worth_what_was_said_of_it(
    scores: list[Score], presume: bool, returns: tuple[float, ...], presumed: int
) -> None:
    imported = episode([said(None, "q"), answer(0, "x", tokens=False)], strategy="imported")
    storage: Any = Stored(imported, scores)
    loaded = await load_episodes(
        storage, TrajectoryFilter(), base_model="m", adapter="z", reward=Opinion(), demonstrations=True, presume=presume
    )
    assert (loaded.returns, loaded.excluded.presumed) == (returns, presumed)
    assert bool(presumed) == any("judged by nobody" in cause for cause in loaded.excluded.causes())


async def test_a_sub_agent_is_trained_on_only_where_somebody_scored_it(tmp_path: Path) -> None:
    """A reward that is made for the parent's task does not judge the sub-agent's, and that is said."""
    nodes = [said(None, "q"), answer(0, "x"), said(1, "o")]
    task = Task(id="s", environment="swe", data={SUB_AGENT: {"parent": "a", "kind": "researcher"}})
    begun = [episode(nodes, id=name, task=task, run_id=sub_agents_run("r"), group_id=name) for name in ("b", "c")]
    async with FileTrajectoryStorage(tmp_path) as storage:
        for each in (episode(nodes), *begun):
            await storage.add(each)
        await storage.add_scores([score("verifier-1@abc", 0.7).model_copy(update={"trajectory_id": "c"})])
        report = await rescore(storage, Opinion(), sub_agents=False)
        assert (report.scored, report.already_scored) == (1, 1)
        loaded = await load_episodes(storage, TrajectoryFilter(), base_model="m", adapter="z", reward=Opinion())
        assert [each.id for each in loaded.trajectories] == ["a", "c"] and loaded.returns == (0.02, 0.7)
        assert loaded.excluded == ExcludedEpisodes(sub_agents=1)
        assert loaded.excluded.in_words().startswith("1 of sub-agents (")
        assert (await rescore(storage, Opinion())).scored == 1, "who asks for all of them gets them"
