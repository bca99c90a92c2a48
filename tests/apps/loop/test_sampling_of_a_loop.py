"""What a loop can train on, checked before anything begins."""

from __future__ import annotations

from typing import Any

import pytest

from openhands_rl_plugin.apps.loop.checks import check_trainable
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError


def settings(**sections: Any) -> RLSettings:
    return RLSettings.model_validate({"training": {"algorithm": "grpo"}, **sections})


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"reward": {"name": "human"}}, "nobody labels while a loop runs"),
        ({"training": {"algorithm": "dpo"}}, '"dpo" learns from pairs, which a loop does not make'),
        ({"loop": {"samples_per_task": 1}}, 'samples_per_task = 1: algorithm = "grpo" compares the episodes of a task'),
        (
            {"rollout_strategy": "BestOfN", "strategy": {"value": "none", "temperature": 1.0}},
            "chooses among what the policy sampled",
        ),
    ],
)
def test_what_a_loop_would_train_wrongly_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_trainable(settings(**sections))


def test_the_proposals_of_a_tree_are_a_group_of_their_own() -> None:
    training = {"algorithm": "grpo", "tree": "proposals"}
    best = {"rollout_strategy": "BestOfN", "strategy": {"value": "none", "temperature": 1.0}}
    check_trainable(settings(training=training, loop={"samples_per_task": 1}, **best))
    with pytest.raises(ConfigError, match=r"samples_per_task = 1: algorithm = .* compares the episodes of a task"):
        check_trainable(settings(training=training, loop={"samples_per_task": 1}))  # nothing is searched
