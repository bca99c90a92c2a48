from __future__ import annotations

import json
from pathlib import Path

import pytest

from openhands_rl_plugin.apps.loop.claim import OPTIONS, claim
from openhands_rl_plugin.core.errors import ConfigError


def test_a_run_of_an_older_version_with_renamed_keys_is_resumed(tmp_path: Path) -> None:
    former = {"rl": {"training": {"max_tokens_per_pass": 64, "batch_order": "alike", "seed": 0}}}
    (tmp_path / OPTIONS).write_text(json.dumps(former))
    claim(tmp_path, {"rl": {"training": {"max_tokens_per_micro_batch": 64, "batch_order": "prefix", "seed": 0}}})
    with pytest.raises(ConfigError, match=r"other options \(rl.training.max_tokens_per_micro_batch: 64, now 65\)"):
        claim(tmp_path, {"rl": {"training": {"max_tokens_per_micro_batch": 65, "batch_order": "prefix", "seed": 0}}})
