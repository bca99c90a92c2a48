from __future__ import annotations

import json
from pathlib import Path

import pytest

from openhands_rl_plugin.apps.loop.checks import OPTIONS, claim, identity_of
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.types import JsonObject


def test_a_run_of_an_older_version_with_renamed_keys_is_resumed(tmp_path: Path) -> None:
    former = {"rl": {"training": {"max_tokens_per_pass": 64, "batch_order": "alike", "seed": 0}}}
    (tmp_path / OPTIONS).write_text(json.dumps(former))
    claim(tmp_path, {"rl": {"training": {"max_tokens_per_micro_batch": 64, "batch_order": "prefix", "seed": 0}}})
    with pytest.raises(ConfigError, match=r"other options \(rl.training.max_tokens_per_micro_batch: 64, now 65\)"):
        claim(tmp_path, {"rl": {"training": {"max_tokens_per_micro_batch": 65, "batch_order": "prefix", "seed": 0}}})


def test_a_run_of_a_version_without_a_setting_had_its_default(tmp_path: Path) -> None:
    def identity(**training: object) -> JsonObject:
        settings = RLSettings(training=TrainingSettings.model_validate(training))
        return identity_of(settings, tasks={}, timeout=1.0, model=None)

    former = json.loads(json.dumps(identity()))
    del former["rl"]["training"]["gradient_checkpointing"]
    (tmp_path / OPTIONS).write_text(json.dumps(former))
    claim(tmp_path, identity())
    with pytest.raises(ConfigError, match=r"rl\.training\.gradient_checkpointing: false, now true"):
        claim(tmp_path, identity(gradient_checkpointing=True))
