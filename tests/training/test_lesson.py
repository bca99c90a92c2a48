"""Which stored episodes an algorithm learns from, and as what the others are counted."""

from __future__ import annotations

import pytest
from test_credit import episode, settings

from openhands_rl_plugin.agent_lesson import Episodes, ExcludedEpisodes, Lesson, lesson_of, make_lesson
from openhands_rl_plugin.errors import TrainingError
from openhands_rl_plugin.types import StopReason, Task, Trajectory

COMPARING = ("dpo", "grpo", "reinforce++", "reinforce++-baseline", "rloo")


def played(number: int, reward: float, stop: StopReason = StopReason.TERMINATED) -> Trajectory:
    task = Task(id="task", environment="shop")
    return episode(number, reward, stop=stop).model_copy(update={"task": task})


def stored(*trajectories: Trajectory) -> Episodes:
    returns = tuple(trajectory.episode_return for trajectory in trajectories)
    return Episodes(trajectories, returns, ExcludedEpisodes())


def ids(lesson: Lesson) -> set[str]:
    return {sample.trajectory_id for sample in lesson.samples}


@pytest.mark.parametrize("algorithm", COMPARING)
def test_an_episode_that_ran_out_of_time_is_compared_with_none(algorithm: str) -> None:
    episodes = stored(played(0, 1.0), played(1, 0.5), played(2, 0.0, StopReason.TIMEOUT))
    lesson = lesson_of(episodes, settings(algorithm=algorithm))
    assert (lesson.used, lesson.excluded) == (2, ExcludedEpisodes(unfinished=1))
    assert ids(lesson) == {"0", "1"}
    alone = lesson_of(stored(played(0, 1.0), played(2, 0.0, StopReason.TIMEOUT)), settings(algorithm="dpo"))
    assert (alone.used, alone.excluded) == (0, ExcludedEpisodes(unfinished=1, no_signal=1))


@pytest.mark.parametrize("stop", [StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.TRUNCATED])
@pytest.mark.parametrize("algorithm", [*COMPARING, "sft", "rejection-sampling"])
def test_what_a_limit_cut_short_is_left_out_of_every_algorithm(algorithm: str, stop: StopReason) -> None:
    episodes = stored(played(0, 1.0), played(1, 0.5), played(2, 2.0, stop))
    left_out = lesson_of(episodes, settings(algorithm=algorithm, overlong="leave-out"))
    assert "2" not in ids(left_out) and left_out.excluded.overlong == 1
    kept = lesson_of(episodes, settings(algorithm=algorithm))
    assert "2" in ids(kept) and kept.excluded.overlong == 0
    assert kept.used + kept.excluded.no_signal == 3


def test_a_success_is_imitated_though_its_time_ran_out() -> None:
    episodes = stored(played(0, 1.0, StopReason.TIMEOUT), played(1, 0.0), played(2, 1.0, StopReason.UNFINISHED))
    for algorithm in ("sft", "rejection-sampling"):
        lesson = lesson_of(episodes, settings(algorithm=algorithm))
        assert ids(lesson) == {"0"}
        assert lesson.excluded.in_words() == "1 unfinished, 1 no signal"


def test_who_can_learn_nothing_is_told_what_was_left_out() -> None:
    episodes = stored(played(0, 1.0, StopReason.MAX_TURNS), played(1, 0.0))
    with pytest.raises(TrainingError, match="left out: 1 overlong, 1 no signal"):
        make_lesson(episodes, settings(algorithm="grpo", overlong="leave-out"))
