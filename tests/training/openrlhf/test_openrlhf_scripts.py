"""The launch scripts say what OpenRLHF 0.11 understands: their flags go through its own parser and its own checks."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_openrlhf_bases import FILE, NEEDED, openrlhf_file

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


def understood(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """OpenRLHF's ``main`` up to where it would train: its parser, then its checks."""
    tree = ast.parse(openrlhf_file("cli/train_ppo_ray.py").read_text(encoding="utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.If))
    # Modules such as ray and vllm are imported above ``main``, and are not needed by it.
    light = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom) and _is_light(n)]
    assert ast.unparse(main.body[-1]) == "train(args)"
    namespace: dict[str, Any] = {}
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray", *arguments])
    exec(compile(ast.Module([*light, *main.body[:-1]], []), "train_ppo_ray", "exec"), namespace)
    return namespace["args"]


def _is_light(node: ast.Import | ast.ImportFrom) -> bool:
    module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
    return (module or "").split(".")[0] in sys.stdlib_module_names


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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_openrlhf_understands_them(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("openrlhf") is None:
        pytest.skip(NEEDED)
    arguments, _ = arguments_of(script, tmp_path)
    args = understood(arguments, monkeypatch)
    expected = "reinforce_baseline" if "baseline" in script.stem else "reinforce"
    assert args.algo.advantage.estimator == expected and args.critic.model_name_or_path is None
    assert args.reward.remote_url == ["agent"] and "Qwen3" in args.actor.model_name_or_path
    with pytest.raises(SystemExit):
        understood([*arguments, "--advantage_estimator", "reinforce"], monkeypatch)
