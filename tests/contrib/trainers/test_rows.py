"""Episodes as the rows of TRL, SkyRL and verl; what would be trained wrongly is refused."""

from __future__ import annotations

import pytest
from segment_samples import ONE, rollout, sample_of

from openhands_rl_plugin.contrib.trainers.rows import agent_loop_rows, batch_columns, outcome, segments
from openhands_rl_plugin.core.types import Failure, FailureKind
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError

OTHER = sample_of([([9, 9], [(7, -0.5)])], 0.5)


def test_the_reward_of_skyrl_stands_on_the_last_row() -> None:
    columns = batch_columns([rollout(ONE, OTHER), rollout(ONE)], ["a", "b"], ["a", "b"])
    assert columns["rewards"] == [0.0, 1.0, 1.0] and columns["is_last_step"] == [False, True, True]
    assert columns["trajectory_ids"] == ["a", "a", "b"] and columns["stop_reasons"] == ["stop"] * 3
    assert columns["prompt_token_ids"] == [[1, 2], [9, 9], [1, 2]]
    assert columns["loss_masks"] == [[1, 1, 0, 1], [1], [1, 1, 0, 1]]


def test_skyrl_has_no_row_of_an_episode_that_failed():
    """Prompt a: two valid episodes and a failed one; b: one is left; c: none."""
    rollouts = [rollout(ONE, ONE), None, rollout(ONE), None, rollout(ONE), None]
    names = ["a", "a", "a", "b", "b", "c"]
    columns = batch_columns(rollouts, range(6), names)
    assert columns["trajectory_ids"] == [0, 0, 2, 4, 5] and columns["is_last_step"] == [False, True, True, True, True]
    assert [any(mask) for mask in columns["loss_masks"]] == [True, True, True, False, False]
    assert columns["rewards"] == [0.0, 1.0, 1.0, 1.0, 1.0], "what stands for a prompt has the mean of the others"
    assert columns["rollout_metrics"] == {
        "openhands/turns": pytest.approx(sum(each.turns for each in rollouts if each) / 3),
        "openhands/failed": 3.0,
        "openhands/groups_without_episode": 1.0,
        "openhands/groups_of_one": 1.0,
    }
    judged = batch_columns(rollouts, range(6), names, evaluation=True)
    assert judged["trajectory_ids"] == [0, 0, 2, 4] and all(any(mask) for mask in judged["loss_masks"])
    with pytest.raises(ExchangeError, match="no episode of the batch is valid"):
        batch_columns([None, None], range(2), ["a", "a"])


def test_verl() -> None:
    first, second = agent_loop_rows(rollout(ONE, OTHER), longest_prompt=9, longest_response=9)
    assert first["reward_score"] == second["reward_score"] == 1.0 and first["num_turns"] == 4
    assert first["extra_fields"] == {"min_global_steps": 3, "max_global_steps": 3}
    assert (first["prompt_ids"], first["response_ids"]) == ([1, 2], [3, 4, 5, 6])
    assert (first["response_mask"], second["response_logprobs"]) == ([1, 1, 0, 1], [-0.5])
    with pytest.raises(ExchangeError, match=r"4 tokens are more than data\.max_response"):
        agent_loop_rows(rollout(ONE), longest_prompt=9, longest_response=3)
    with pytest.raises(ExchangeError, match="no episode to train on"):
        agent_loop_rows(rollout(), longest_prompt=9, longest_response=9)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"temperature": 0.7}, "sampled at temperature 0.7, and TRL trains at 1"),
        ({"token_temperatures": (1.0, 1.0, 1.0, 0.5, 1.0, 1.0)}, "temperature 0.5, 1"),
    ],
)
def test_what_would_be_trained_wrongly_is_refused(change: dict[str, object], expected: str):
    with pytest.raises(ExchangeError, match=expected):
        segments([ONE.model_copy(update=change)], "TRL")


def test_an_episode_that_failed_has_no_reward() -> None:
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message="the server went away", boundary="x")
    for lost in (rollout(failure=failure, reward=None, segments=()), rollout(ONE, reward=None), rollout()):
        with pytest.raises(ExchangeError, match="task: no episode to train on"):
            outcome(lost)
    assert outcome(rollout(ONE, reward=0.25)) == 0.25
