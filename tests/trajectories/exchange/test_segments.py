"""Training sequences under the names of trainers: what would be trained wrongly is refused."""

from __future__ import annotations

import pytest
from segment_samples import ONE, played, sample_of

from openhands_rl_plugin.core.types import Failure, FailureKind
from openhands_rl_plugin.trajectories.exchange.foreign import ExchangeError
from openhands_rl_plugin.trajectories.exchange.segments import observed_tokens, outcome, segments


def test_a_row_has_the_names_of_its_trainer() -> None:
    other = sample_of([([9, 9], [(7, -0.5)])], 0.5)
    assert segments([ONE, other], "TRL") == [
        {
            "prompt_ids": [1, 2],
            "completion_ids": [3, 4, 5, 6],
            "logprobs": [-0.5, -0.25, 0.0, -1.0],
            "env_mask": [1, 1, 0, 1],
        },
        {"prompt_ids": [9, 9], "completion_ids": [7], "logprobs": [-0.5], "env_mask": [1]},
    ]
    (row,) = segments([ONE], "SkyRL")
    assert row["prompt_token_ids"] == [1, 2] and row["loss_masks"] == [1, 1, 0, 1]


def test_openrlhf_takes_one_sequence() -> None:
    assert observed_tokens([ONE]) == {
        "observation_tokens": [1, 2, 3, 4, 5, 6],
        "action_ranges": [(2, 4), (5, 6)],
        "rollout_log_probs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.0],
    }
    with pytest.raises(ExchangeError, match="OpenRLHF takes one"):
        observed_tokens([ONE, ONE])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": 0.7}, "sampled at temperature 0.7, and TRL trains at 1"),
        ({"token_temperatures": (1.0, 1.0, 1.0, 0.5, 1.0, 1.0)}, "temperature 0.5, 1"),
        ({"count": 2}, "it stands for 2 equal samples"),
        ({"token_advantages": (0.0,) * 6}, "one advantage for a sequence"),
        ({"mask": (True,) * 6}, "begins with a sampled token"),
        ({"mask": (False,) * 6}, "nothing in it was sampled"),
        ({"logprobs": (0.0,)}, "different lengths"),
    ],
)
def test_what_would_be_trained_wrongly_is_refused(change: dict[str, object], said: str):
    with pytest.raises(ExchangeError, match=said):
        segments([ONE.model_copy(update=change)], "TRL")


def test_an_episode_that_failed_has_no_reward() -> None:
    failure = Failure(kind=FailureKind.INFRASTRUCTURE, message="the server went away", boundary="x")
    for lost in (played(failure=failure, reward=None, segments=()), played(ONE, reward=None), played()):
        with pytest.raises(ExchangeError, match="task: no episode to train on"):
            outcome(lost)
    assert outcome(played(ONE, reward=0.25)) == 0.25
