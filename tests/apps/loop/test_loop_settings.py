"""What a loop can train on and go on with, checked before anything begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openhands_rl_plugin.apps.loop.checks import check_trainable, claim, identity_of
from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError

SEARCH = {"rollout_strategy": "BestOfN", "strategy": {"value": "none", "temperature": 1.0}}
PROPOSALS = {"training": {"algorithm": "grpo", "tree": "proposals"}, "loop": {"samples_per_task": 1}}


def settings(**sections: Any) -> RLSettings:
    return RLSettings.model_validate({"training": {"algorithm": "grpo"}, **sections})


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"reward": {"name": "human"}}, "nobody labels while a loop runs"),
        ({"training": {"algorithm": "dpo"}}, '"dpo" learns from pairs, which a loop does not make'),
        ({"loop": {"samples_per_task": 1}}, 'samples_per_task = 1: algorithm = "grpo" compares the episodes of a task'),
        (PROPOSALS, "samples_per_task = 1: algorithm = .* compares the episodes of a task"),  # nothing is searched
        (SEARCH, "chooses among what the policy sampled"),
    ],
)
def test_what_a_loop_would_train_wrongly_is_refused(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check_trainable(settings(**sections))
    check_trainable(settings(**PROPOSALS, **SEARCH))


def test_a_folder_is_bound_to_the_settings_of_its_run(tmp_path: Path) -> None:
    for _ in range(2):
        claim(tmp_path, identity_of(settings(), tasks={}, timeout=1.0, model=None))
    other = settings(training={"gradient_checkpointing": True})
    with pytest.raises(ConfigError, match=r"other options \(.*rl.training.gradient_checkpointing; see"):
        claim(tmp_path, identity_of(other, tasks={}, timeout=1.0, model=None))
