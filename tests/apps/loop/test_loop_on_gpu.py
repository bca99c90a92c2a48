"""A loop of a 7B model on a GPU for an hour: it plays, trains and publishes again and again, until it is ended."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.training.loop.plan import LoopState

MODEL_VARIABLE = "OPENHANDS_RL_GPU_LOOP_MODEL"
SECONDS_VARIABLE = "OPENHANDS_RL_GPU_LOOP_SECONDS"
SECONDS = float(os.environ.get(SECONDS_VARIABLE, "3600"))
NEEDS = f"80 GB, and the folder of a 7B chat model in {MODEL_VARIABLE} ({SECONDS_VARIABLE}: how long, 3600)"
ENDED = 143
CONFIG = """
[rl]
env_name = "webshop"
max_turns = 8
max_prompt_length = 6000
max_response_length = 256
max_workers = 16
[rl.storage]
path = "{folder}/trajectories"
[rl.training]
dtype = "bfloat16"
lora_rank = 16
batch_size = 16
num_epochs = 1
learning_rate = 2e-5
gradient_checkpointing = true
max_tokens_per_micro_batch = 16384
[rl.loop]
iterations = 1000
tasks_per_iteration = 4
samples_per_task = 8
held_out = 8
[rl.serving]
adapters_path = "{folder}/adapters"
"""


@pytest.mark.gpu(also=NEEDS)
@pytest.mark.timeout(SECONDS + 900)
def test_it_trains_for_an_hour(tmp_path: Path) -> None:
    model = os.environ.get(MODEL_VARIABLE, "")
    if not model:
        pytest.skip(f"needs {NEEDS}")
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(folder=tmp_path))
    run = tmp_path / "run"
    command = [sys.executable, "-m", "openhands_rl_plugin.cli", "loop", "webshop", "--config", str(config)]
    command += ["--model", model, "--run-dir", str(run), "--no-studio"]
    with open(tmp_path / "loop.log", "w+") as log:
        loop = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + SECONDS
        while loop.poll() is None and time.monotonic() < until:
            time.sleep(1)
        loop.send_signal(signal.SIGTERM)
        code = loop.wait(600)
        log.seek(0)
        said = log.read()[-4000:]
    print(said)
    assert code == ENDED, said
    lines = [line for file in run.glob("training/*/metrics.jsonl") for line in file.open()]
    assert lines, f"nothing was trained: {said}"
    assert all(math.isfinite(json.loads(line)["loss"]) for line in lines)
    assert LoopState.load(run / "state.json").records
    assert AdapterStore(tmp_path / "adapters").current("policy") is not None, "no version was published"
