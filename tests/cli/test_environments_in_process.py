"""``evaluate`` and ``loop`` over environments that are played in this process, by the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluation.performance.hosts.instant_model import instant_model, script
from openhands_rl_plugin.cli import main


@pytest.fixture(scope="module")
def model() -> Iterator[str]:
    with instant_model() as url:
        yield url


def acting(*actions: str) -> str:
    """A prompt that makes the instant model act so, turn by turn."""
    return script([{"text": f"Action: {action}"} for action in actions])


def write_config(folder: Path, env_name: str, *lines: str, **options: Any) -> Path:
    written = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    file = folder / "config.toml"
    rl = "\n".join((f'env_name = "{env_name}"', "max_turns = 8", *lines))
    file.write_text(f"[rl]\n{rl}\n[rl.environment]\n{written}\n")
    return file


def evaluated(config: Path, model: str, *words: str) -> list[dict[str, Any]]:
    """The rows of ``output.jsonl``."""
    out = config.parent / "out"
    agent = ["--agent", "RLAgent", "--model", "org/instant", "--base-url", model, "--set", "sampling.temperature=1"]
    bounds = ["--processes", "0", "--set", "max_turns=8", "--out", str(out)]
    assert main(["evaluate", "environment", "--config", str(config), *agent, *bounds, *words]) == 0
    return [json.loads(line) for file in out.rglob("output.jsonl") for line in file.read_text().splitlines()]


def results(rows: list[dict[str, Any]]) -> list[tuple[float, bool]]:
    return [(row["test_result"]["reward"], row["test_result"]["report"]["resolved"]) for row in rows]


def test_gymnasium_is_evaluated(model: str, tmp_path: Path):
    way = acting("1", "1", "2", "2", "1", "2")
    config = write_config(tmp_path, "gymnasium/FrozenLake-v1", arguments=None, system_prompt=way)
    config.write_text(config.read_text().replace("arguments = null", "arguments = { is_slippery = false }"))
    assert results(evaluated(config, model, "--tasks", "2")) == [(1.0, True)] * 2
