"""Which ways of sampling a loop can train on, said before anything begins."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from openhands_rl_plugin.apps.loop.checks import check_trainable
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.rollout.strategies.base import StandardReActStrategy


def settings(**sections: Any) -> RLSettings:
    return RLSettings.model_validate({"training": {"algorithm": "grpo"}, **sections})


class Choosy(StandardReActStrategy):
    """A strategy that cannot be without an option."""

    class Options(BaseModel):
        taste: str


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"sampling": {"temperature": 0.7}},
        {"sampling": {"temperature": 1.3, "top_k": 0}},
        {"strategy": {"sampling": {"temperature": 0.5}}},
        {
            "sampling": {"temperature": 0.7},
            "training": {"algorithm": "grpo", "correction": "truncate"},
            "serving": {"base_url": "http://127.0.0.1:8100/v1"},
        },
    ],
)
def test_any_temperature_above_zero_can_be_trained(sections: dict[str, Any]) -> None:
    check_trainable(settings(**sections))


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"reward": {"name": "human"}},
            r"\[rl.reward\]: human-1 is what people labelled, and nobody labels while a loop",
        ),
        ({"sampling": {"temperature": 0.0}}, r"\[rl.sampling\] temperature = 0: greedy answers"),
        ({"sampling": {"top_p": 0.9}}, r"\[rl.sampling\] top_p = 0.9: .* set 1"),
        ({"sampling": {"top_k": 20}}, r"\[rl.sampling\] top_k = 20: .* set -1"),
        ({"strategy": {"sampling": {"min_p": 0.1}}}, r"\[rl.strategy\] sampling.min_p = 0.1: .* set 0"),
    ],
)
def test_other_sampling_is_refused_in_one_line(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_trainable(settings(**sections))


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"training": {"algorithm": "dpo"}}, '"dpo" learns from pairs, which a loop does not make'),
        ({"loop": {"samples_per_task": 1}}, 'samples_per_task = 1: algorithm = "grpo" compares the episodes of a task'),
        (
            {"loop": {"evaluation_strategy": "test_sampling_of_a_loop:Choosy"}},
            "taste",
        ),
    ],
)
def test_what_a_loop_cannot_learn_from_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_trainable(settings(**sections))


def test_the_proposals_of_a_tree_are_a_group_of_their_own() -> None:
    training = {"algorithm": "grpo", "tree": "proposals"}
    best = {"rollout_strategy": "BestOfN", "strategy": {"value": "none", "temperature": 1.0}}
    check_trainable(settings(training=training, loop={"samples_per_task": 1}, **best))
    with pytest.raises(ConfigError, match=r"samples_per_task = 1: algorithm = .* compares the episodes of a task"):
        check_trainable(settings(training=training, loop={"samples_per_task": 1}))  # nothing is searched
