"""``openhands-rl loop`` in the shop with ``engine = "trl"``, killed and continued, by the command line.

.ci/peers trl
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from shopper_model import SHOP
from shopping_loop import MODEL, write_talker

from openhands_rl_plugin.contrib.webshop import running_webshop
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.generator.config import ServerConfig
from openhands_rl_plugin.models.server.server import running_server
from openhands_rl_plugin.training.loop.plan import LoopState

pytest.importorskip("trl", reason="TRL is not installed: .ci/peers trl")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STAGES = ["evaluate-base", "iteration-000", "iteration-001", "iteration-002", "evaluate-final"]
CONFIG = """
[rl]
env_name = "webshop"
env_server_base = "{shop}"
react_format = false
max_turns = 2
max_prompt_length = 3500
max_response_length = 8
max_workers = 6
[rl.reward]
name = "counted_reward:CountedReward"
[rl.storage]
path = "{folder}/trajectories"
durable = false
[rl.training]
engine = "trl"
algorithm = "grpo"
dtype = "float32"
lora_rank = 4
lora_alpha = 8
batch_size = 6
num_epochs = 1
learning_rate = 1e-2
[rl.loop]
iterations = 3
tasks_per_iteration = 2
samples_per_task = 4
held_out = 2
[rl.serving]
base_url = "{server}/v1"
model = "{model}"
adapter = "shopper"
adapters_path = "{folder}/adapters"
"""


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talker(tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture(scope="module")
def served(talker: Path) -> Iterator[tuple[str, str]]:
    config = ServerConfig(
        model=str(talker), served_model_name=MODEL, port=0, dtype="float32", max_batch=8, max_adapters=8, threads=1
    )
    with running_webshop(SHOP) as web, running_server(config) as server:
        yield web, server


def test_a_loop_trains_by_trl_and_goes_on_after_a_kill(served: tuple[str, str], talker: Path, tmp_path: Path) -> None:
    """Each iteration's adapter, as TRL trained it, passes its probe at the server and plays the next one."""
    config, state_file = tmp_path / "config.toml", tmp_path / "run" / "state.json"
    config.write_text(CONFIG.format(folder=tmp_path, model=MODEL, shop=served[0], server=served[1]))
    where = ["--model", str(talker), "--run-dir", str(tmp_path / "run"), "--processes", "0", "--tasks", "6"]
    command = [sys.executable, "-m", "openhands_rl_plugin.cli", "loop", "environment", "--config", str(config), *where]
    helpers = str(Path(__file__).parents[2] / "helpers")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")])}
    said = tmp_path / "said.txt"
    with said.open("w") as file, subprocess.Popen(command, env=environ, stdout=file, stderr=file) as first:
        while first.poll() is None and LoopState.load(state_file).record("iteration-000") is None:
            time.sleep(0.05)
        first.kill()
    assert first.returncode < 0, said.read_text()
    before = LoopState.load(state_file).records
    assert [record.name for record in before][:2] == STAGES[:2] and len(before) < len(STAGES)

    again = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=600)
    assert again.returncode == 0, again.stderr
    assert "trained by TRL's GRPOTrainer" in said.read_text() and "After RL against the base model: " in again.stdout
    state = LoopState.load(state_file)
    assert state.records[: len(before)] == before and [record.name for record in state.records] == STAGES
    for record in state.records[1:-1]:
        assert record.metrics["steps"] >= 1 and record.metrics["grad_norm"] > 0
        print(record.name, record.metrics)
    assert state.adapter is not None and AdapterStore(tmp_path / "adapters").get(state.adapter).base_model == MODEL
    assert state.adapter in httpx.get(f"{served[1]}/v1/models").text
