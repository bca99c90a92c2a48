"""The rows against the classes of the trainers themselves, each in its own environment (``make test-peers``)."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from segment_samples import ONE, played

from openhands_rl_plugin.contrib.trainers.rows import agent_loop_rows, batch_columns, datums

pytestmark = pytest.mark.slow

TINKER = """
import json, sys
from tinker.types import Datum, ModelInput
row = json.load(sys.stdin)
datum = Datum(model_input=ModelInput.from_ints(row["model_input"]), loss_fn_inputs=row["loss_fn_inputs"])
said = {name: [tensor.dtype, tensor.to_numpy().tolist()] for name, tensor in datum.loss_fn_inputs.items()}
print(json.dumps({"ids": datum.model_input.to_ints(), **said}))
"""
SKYRL = """
import json, sys
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.utils.trainer_utils import validate_generator_output
columns = json.load(sys.stdin)
columns["trajectory_ids"] = [TrajectoryID(each, 0) for each in columns["trajectory_ids"]]
validate_generator_output(2, columns, step_wise=True)
print(json.dumps(columns["rewards"]))
"""
VERL = """
import json, sys
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
rows = [AgentLoopOutput(**row).as_dict() for row in json.load(sys.stdin)]
print(json.dumps([[row["responses"].tolist(), row["rollout_log_probs"].tolist()] for row in rows]))
"""


def told(peer: str, program: str, rows: object) -> object:
    """What a program prints in the environment of ``peer``; without one the test is skipped."""
    variable = f"OPENHANDS_RL_{peer}_PYTHON"
    if not (python := os.environ.get(variable)):
        pytest.skip(f"{variable} is not set: make test-peers")
    words = [python, "-c", program]
    done = subprocess.run(words, input=json.dumps(rows), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_tinker():
    (row,) = datums([ONE], weights=True)
    said = told("TINKER", TINKER, row)
    assert said == {
        "ids": [1, 2, 3, 4, 5],
        "target_tokens": ["int64", [2, 3, 4, 5, 6]],
        "logprobs": ["float32", [0.0, -0.5, -0.25, 0.0, -1.0]],
        "advantages": ["float32", [0.0, 0.5, 0.5, 0.0, 0.5]],
        "weights": ["float32", [0.0, 1.0, 1.0, 0.0, 1.0]],
    }


def test_skyrl():
    columns = batch_columns([played(ONE, ONE), played(ONE)], ["a", "b"], ["a", "b"])
    assert told("SKYRL", SKYRL, columns) == [0.0, 1.0, 1.0]


def test_verl():
    rows = agent_loop_rows(played(ONE), longest_prompt=9, longest_response=9)
    assert told("VERL", VERL, rows) == [[[3, 4, 5, 6], [-0.5, -0.25, 0.0, -1.0]]]
