"""The launch scripts of OpenRLHF name our agent and a valid configuration."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from test_openrlhf_bases import FILE

from openhands_rl_plugin.config.toml import load_settings

FOLDER = Path(__file__).parents[3] / "evaluation" / "configs" / "openrlhf"
SCRIPTS = sorted(FOLDER.glob("*.sh"))


def arguments_of(script: Path, tmp_path: Path, *more: str) -> tuple[list[str], dict[str, str]]:
    """What a script calls OpenRLHF with, and the variables that it sets; nothing is trained."""
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"if sys.argv[1] == '-c': os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])\n"
        "print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith('OPENHANDS_RL_')}]))\n"
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    environ = {**os.environ, "PYTHON": str(python), "TASKS": "tasks.jsonl"}
    done = subprocess.run(
        ["bash", str(script), *more], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    arguments, variables = json.loads(done.stdout)
    assert arguments[:2] == ["-m", "openrlhf.cli.train_ppo_ray"]
    return arguments[2:], variables


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_name_our_agent_and_a_configuration_that_is_valid(script: Path, tmp_path: Path) -> None:
    arguments, variables = arguments_of(script, tmp_path, "--train.num_episodes", "1")
    assert arguments[arguments.index("--train.agent_func_path") + 1] == str(FILE)
    assert arguments[-2:] == ["--train.num_episodes", "1"]
    assert "--data.apply_chat_template" not in arguments
    settings = load_settings(Path(variables["OPENHANDS_RL_CONFIG"]))
    longest = int(arguments[arguments.index("--data.max_len") + 1])
    assert settings.max_prompt_length + settings.max_response_length <= longest
    assert len(SCRIPTS) == 2
