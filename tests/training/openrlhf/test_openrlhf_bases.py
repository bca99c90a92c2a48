"""The agent under OpenRLHF's own classes, loaded as OpenRLHF loads it; its launch scripts.

OpenRLHF wants a vLLM and a flash-attn of its own, so it is not in the ordinary environment; there this is skipped:

    pip install --no-deps openrlhf==0.11.2 pylatexenc
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf_world import ScriptedVllm, VllmParams, write_config
from test_openrlhf_rollouts import TASK, WALK
from tiny_model import write_tokenizer

from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import ConfigError

FILE = Path(__file__).parents[3] / "openhands_rl_plugin" / "training" / "openrlhf" / "agent.py"
NEEDED = "OpenRLHF is not installed: pip install --no-deps openrlhf==0.11.2 pylatexenc, in an environment of its own"


def openrlhf_file(name: str) -> Path:
    """A file of OpenRLHF's, whose package cannot be imported without vLLM."""
    spec = importlib.util.find_spec("openrlhf")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / name


def function_of(name: str, file: str, **names: Any) -> Any:
    """One function of OpenRLHF's source, with the ``names`` that it uses."""
    tree = ast.parse(openrlhf_file(file).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    namespace = dict(names)
    exec(compile(ast.Module(found, []), file, "exec", 0x1000000), namespace)  # annotations are not evaluated
    return namespace[name]


@pytest.fixture
def bases() -> Any:
    return pytest.importorskip("openrlhf.utils.agent", reason=NEEDED)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return write_tokenizer(tmp_path / "tokenizer")


@pytest.fixture
def executor(bases: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OPENHANDS_RL_CONFIG", str(write_config(tmp_path / "config.toml", "max_turns = 6")))
    load = function_of("_load_agent_executor", "trainer/ray/vllm_engine.py", AgentExecutorBase=bases.AgentExecutorBase)
    return load(str(FILE))


@pytest.mark.slow
async def test_openrlhf_loads_the_file_and_makes_an_experience_of_a_rollout(
    executor: Any, bases: Any, tokenizer: Any
) -> None:
    assert isinstance(executor, bases.AgentExecutorBase)

    async def execute(script: list[str]) -> Any:
        params = VllmParams()
        # The keywords of RolloutRayActor.generate_responses.
        found = await executor.execute(
            prompt=TASK,
            label="",
            sampling_params=params,
            max_length=1000,
            hf_tokenizer=tokenizer,
            llm_engine=ScriptedVllm(tokenizer, script),
            images=None,
        )
        assert params == VllmParams()
        return found

    found = await execute(WALK)
    assert found["reward"] == 1.0 and found["truncated"] is False
    process = function_of(
        "_process_response_into_experience",
        "trainer/ppo_utils/samples_generator.py",
        torch=torch,
        Experience=SimpleNamespace,
    )
    limited = await execute(["up"])
    experience = process(None, limited, max_len=1000)
    assert experience.sequences.tolist() == [limited["observation_tokens"]]
    assert int(experience.action_mask.sum()) == sum(end - start for start, end in limited["action_ranges"])
    assert experience.rollout_log_probs.shape == experience.action_mask.shape
    assert bool(experience.truncated) and experience.rewards.item() == 0.0
    assert experience.info["agent_turns"].item() == len(limited["action_ranges"]) == 6.0


def test_without_openrlhf_the_error_names_what_to_install() -> None:
    if importlib.util.find_spec("openrlhf") is not None:
        pytest.skip("OpenRLHF is installed")
    with pytest.raises(ConfigError, match=r"pip install openrlhf\[vllm\]==0.11.2"):
        importlib.import_module("openhands_rl_plugin.training.openrlhf.agent")


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
