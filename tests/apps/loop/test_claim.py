from __future__ import annotations

from pathlib import Path

import pytest

from openhands_rl_plugin.apps.loop.checks import claim, identity_of
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import JsonObject


def test_a_folder_is_bound_to_the_settings_of_its_run(tmp_path: Path) -> None:
    def identity(**training: object) -> JsonObject:
        settings = RLSettings(training=TrainingSettings.model_validate(training))
        return identity_of(settings, tasks={}, timeout=1.0, model=None)

    for _ in range(2):
        claim(tmp_path, identity())
    with pytest.raises(ConfigError, match=r"holds a run with other options \(see options.json"):
        claim(tmp_path, identity(gradient_checkpointing=True))
