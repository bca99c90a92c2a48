"""``openhands-rl train`` under torchrun and ``accelerate launch``: two processes make one version."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launchers import ACCELERATE, free_port
from train_store import TINY, episode, store_of
from verifier_store import store_of as judged_store
from verifier_store import tiny_judge, toy_episodes

from openhands_rl_plugin import cli
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.rewards.verifier.card import VerifierReport

pytestmark = pytest.mark.slow

LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--master-port"],
    # With --cpu it would start a single process, whatever --num_processes says.
    "accelerate": ["accelerate.commands.launch", *ACCELERATE, "--num_processes", "2", "--main_process_port"],
}


def launch(launcher: str, command: list[str], adapters: Path) -> str:
    """What two processes print, which keep a part of the layers each."""
    launched = [sys.executable, "-m", *LAUNCHERS[launcher], str(free_port()), "-m", "openhands_rl_plugin.cli", *command]
    launched += ["--adapters", str(adapters), "--set", "training.sharding=layers"]  # which a process alone refuses
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(launched, env=environment, capture_output=True, text=True, timeout=200)
    assert printed.returncode == 0, printed.stderr
    return printed.stdout


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_trains_one_version(model: Path, tmp_path: Path, launcher: str) -> None:
    episodes = [episode(number, float(number % 2)) for number in range(6)]
    command = ["train", str(store_of(tmp_path / "store", *episodes)), "--model", str(model), *TINY]
    command += ["--set", "training.batch_size=4", "training.max_tokens_per_micro_batch=64"]
    printed = launch(launcher, command, tmp_path / "two")
    assert printed.count("policy-v000001:") == 1, "rank 0 speaks for all"
    torch.set_num_threads(1)
    assert cli.main([*command, "--adapters", str(tmp_path / "one")]) == 0
    two, one = (AdapterStore(tmp_path / each).versions("policy") for each in ("two", "one"))
    assert len(two) == len(one) == 1
    clock = {"seconds", "tokens_per_second"}
    metrics = [{name: value for name, value in each[0].metrics.items() if name not in clock} for each in (two, one)]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-5)


def test_a_launcher_trains_one_verifier(tmp_path: Path) -> None:
    store, model = judged_store(tmp_path / "store", *toy_episodes(6)), tiny_judge(tmp_path / "model")
    command = ["train", str(store), "--verifier", "--model", str(model), "--set", "training.dtype=float32"]
    command += ["verifier.held_out=0.4", "training.learning_rate=5e-3", "training.lora_rank=8", "training.num_epochs=2"]
    printed = launch("torchrun", command, tmp_path / "two")
    assert printed.count("verifier-v000001:") == 1
    torch.set_num_threads(1)
    assert cli.main([*command, "--adapters", str(tmp_path / "one")]) == 0
    files = [tmp_path / each / "verifier-v000001" / "verifier_report.json" for each in ("two", "one")]
    two, one = (VerifierReport.model_validate_json(file.read_bytes()) for file in files)
    assert (two.episodes, two.tasks) == (one.episodes, one.tasks)
    assert (two.raw_brier, two.label_mass) == pytest.approx((one.raw_brier, one.label_mass), rel=1e-3)
    assert list((tmp_path / "two").glob(".verifier-*")) == []
