"""Headers and reassembled trajectories agree with the trajectories that they are made from."""

from __future__ import annotations

import pytest
from stored_samples import trajectory

from openhands_rl_plugin.core.errors import StorageError
from openhands_rl_plugin.core.records import EpisodeEnd, EpisodeStart, NodeMark
from openhands_rl_plugin.core.types import (
    Failure,
    FailureKind,
    Message,
    Node,
    Score,
    StopReason,
    Times,
    Trajectory,
    Usage,
)
from openhands_rl_plugin.trajectories.storages.header import EpisodeHeader, Spine, marked, so_far, whole


def header_of(trajectory: Trajectory) -> EpisodeHeader:
    spine = Spine(trajectory.nodes)
    return EpisodeHeader.begun(EpisodeStart.of(trajectory)).ended(spine, EpisodeEnd.of(trajectory))


SAMPLE = trajectory("a", turns=3, reward=0.1)
FAILED = trajectory(
    "b",
    stop=StopReason.ERROR,
    failure=Failure(kind=FailureKind.MODEL, message="refused", boundary="engine"),
)


def node(parent: int | None, reward: float | None = None) -> Node:
    return Node(parent=parent, message=Message(role="assistant", content="x"), sampled=True, reward=reward)


@pytest.mark.parametrize("sample", [SAMPLE, FAILED, trajectory("c", version=None)])
def test_a_header_says_what_the_trajectory_says(sample) -> None:
    summary = header_of(sample).summary(0.25)
    assert summary.id == sample.id and summary.policy == sample.policy and summary.stop is sample.stop
    assert summary.failure == (sample.failure and sample.failure.kind)
    assert (summary.nodes, summary.turns) == (len(sample.nodes), len(list(sample.sampled())))
    assert summary.episode_return == (None if sample.failure else sample.episode_return) == sample.known_return
    assert (summary.usage, summary.times, summary.reward) == (sample.usage, sample.times, 0.25)


def test_the_reward_to_sort_by_is_the_newest_score_or_the_return() -> None:
    header = header_of(SAMPLE)
    assert header.sorting_reward(None) == 0.1
    assert header.sorting_reward(Score(trajectory_id="a", reward=None, reward_version="1")) is None
    assert header.sorting_reward(Score(trajectory_id="a", reward=0.75, reward_version="1")) == 0.75


def test_a_failed_episode_has_no_reward_whoever_scored_it() -> None:
    header = header_of(FAILED)
    assert header.episode_return is None and header.sorting_reward(None) is None
    assert header.sorting_reward(Score(trajectory_id="b", reward=0.75, reward_version="1")) is None


def test_parts_make_the_whole_again() -> None:
    assert whole(EpisodeStart.of(SAMPLE), SAMPLE.nodes, EpisodeEnd.of(SAMPLE)) == SAMPLE


def test_an_unfinished_episode_is_told_apart() -> None:
    start = EpisodeStart.of(SAMPLE)
    part = so_far(start, SAMPLE.nodes[:3], 2, 50.0)
    assert (part.stop, part.head, part.usage, part.evidence) == (StopReason.UNFINISHED, 2, Usage(), {})
    assert part.times == Times(started=start.started, finished=50.0)
    header = EpisodeHeader.begun(start).grown(Spine(part.nodes), 2, 50.0)
    assert (header.stop, header.nodes, header.turns, header.finished) == ("unfinished", 3, 1, 50.0)
    with pytest.raises(StorageError, match="unfinished"):
        header_of(part)


def test_only_the_acted_path_counts() -> None:
    spine = Spine([node(None, 1.0), node(0, 0.25), node(0, 0.5)])
    assert spine.along(1) == (2, 1.25)
    assert spine.along(2) == (2, 1.5)
    assert spine.along(None) == (0, None)
    spine.mark([NodeMark(index=2, reward=None), NodeMark(index=0, reward=2.0)])
    assert spine.along(2) == (2, 2.0)
    spine.mark([NodeMark(index=0, reward=0.0)])
    assert spine.along(2) == (2, 0.0)
    spine.mark([NodeMark(index=0)])
    assert spine.along(2) == (2, None)


def test_what_is_no_tree_is_refused() -> None:
    for parent in (1, 7, -1):
        with pytest.raises(StorageError, match="parent"):
            Spine([node(None), node(parent)])
    with pytest.raises(StorageError, match="marked"):
        Spine([node(None)]).mark([NodeMark(index=1)])
    for head in (1, -1):
        with pytest.raises(StorageError, match="head"):
            Spine([node(None)]).along(head)


def test_marks_replace_what_a_node_said_and_the_last_one_holds() -> None:
    nodes = [node(None, 1.0), node(0)]
    marks = [NodeMark(index=1, reward=0.5, value=0.1), NodeMark(index=1, reward=0.75, visits=3, simulated=True)]
    first, second = marked(nodes, marks)
    assert first == nodes[0]
    assert (second.reward, second.value, second.visits, second.simulated) == (0.75, None, 3, True)
    assert second.message == nodes[1].message


def test_a_newer_schema_is_refused_with_the_remedy() -> None:
    start = EpisodeStart.of(SAMPLE).model_copy(update={"schema_version": 99})
    with pytest.raises(StorageError, match=r"schema version 99.*upgrade"):
        whole(start, SAMPLE.nodes, EpisodeEnd.of(SAMPLE))
