"""Is version B better than version A? Both play the same tasks, and the difference gets an interval and a p-value.

    python evaluate_two_adapters.py MODEL ADAPTERS A B     directories, and two versions: 1 2, or base 1

The tasks are a grid to walk through; put your own environment into SETTINGS.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from openhands_rl_plugin import AdapterStore
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.app import running_server

SETTINGS = """
[rl]
env_name = "openhands_rl_plugin.testing:GridEnvironment"
max_turns = 8
max_response_length = 8
react_format = false
"""
TASKS = 6


def evaluate(url: str, served_name: str) -> Path:
    """Play every task once; the folder of the run. The same command goes on with a run that was killed."""
    model = ["--model", served_name, "--base-model", "model", "--base-url", f"{url}/v1"]
    model += ["--set", "sampling.temperature=1"]
    played = ["--config", "two.toml", "--agent", "RLAgent", "--tasks", str(TASKS), "--out", "two"]
    subprocess.run(["openhands-rl", "evaluate", "environment", *played, *model, "--note", served_name], check=True)
    (run,) = Path("two").glob(f"*/RLAgent/*_N_{served_name}-run_0")
    return run


def main(model: str, adapters: str, *versions: str) -> None:
    """Serve the model with both versions, play, compare."""
    names = ["model" if version == "base" else f"policy-v{int(version):06d}" for version in versions]
    Path("two.toml").write_text(SETTINGS)
    config = ServerConfig(model=model, served_model_name="model", port=0, adapters=adapters, preload=False)
    with running_server(config) as url:
        for version in AdapterStore(adapters).versions("policy"):
            if version.name in names:
                body = {"lora_name": version.name, "lora_path": version.path}
                httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=120).raise_for_status()
        runs = [str(evaluate(url, name)) for name in names]
    subprocess.run(["openhands-rl", "evaluate", "--compare", *runs, "--out", "comparison"], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:5])
