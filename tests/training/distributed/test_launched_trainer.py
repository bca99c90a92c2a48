"""Processes that a trainer starts: they end where one process does, with an error in one line, and with their owner."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from made_samples import EXACT, assert_same, make_samples
from safetensors.torch import load_file

from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, StorageError, TrainingError
from openhands_rl_plugin.core.types import Adapter, PolicyRef
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE
from openhands_rl_plugin.training.data.imitation import PreferencePair
from openhands_rl_plugin.training.distributed.launched import LaunchedTrainer
from openhands_rl_plugin.training.learn import make_trainer
from openhands_rl_plugin.training.trainer import old_logprobs
from openhands_rl_plugin.training.trainer.local_trainer import LoraTrainer

GRPO = EXACT.model_copy(update={"algorithm": "grpo", "correction": "truncate", "kl": "k3", "batch_size": 3})
SFT = EXACT.model_copy(update={"algorithm": "sft"})
LONGER = GRPO.model_copy(update={"num_epochs": 4, "checkpoint_steps": 1})


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def launched(model: Path, settings: TrainingSettings, adapter: Adapter | None = None, **changes: Any) -> Any:
    chosen = settings.model_copy(update={"nproc_per_node": 2, **changes})
    made = make_trainer(model, chosen, RLSettings(), "tiny", adapter)
    assert isinstance(made, LaunchedTrainer)
    return made


def ids_of(trainer: LaunchedTrainer) -> list[int]:
    return [each.pid for each in trainer._processes]


def gone(pids: list[int]) -> bool:
    for _ in range(200):
        if not any(Path(f"/proc/{pid}").exists() and not _defunct(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _defunct(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


SPLIT = {"sharding": "layers", "gradient_checkpointing": True}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"sharding": "none"}, SPLIT], ids=["replicated", "sharded"])
def test_a_course_of_calls_ends_where_one_process_ends(model: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """As a loop makes it: train, save, probe, go on from what was saved, in another trainer."""
    samples = make_samples(7)
    found: list[Any] = []
    for trainer in (LoraTrainer(model, GRPO), launched(model, GRPO, **changes)):
        steps: list[int] = []
        name = type(trainer).__name__
        first = trainer.reinforce(samples, lambda at, steps=steps: steps.append(at.done), run=tmp_path / name / "run")
        trainer.became(None)
        trainer.save_state(tmp_path / name / "state")
        trainer.finish()
        second = trainer.reinforce(samples[:4])
        trainer.save_adapter(tmp_path / name / "adapter")
        probe = trainer.probe(samples[0].input_ids)
        found.append((steps, first, second, probe, trainer.step, trainer.servers))
    (steps, *one, step, servers), (steps_2, *two, step_2, servers_2) = found
    assert (steps, step, servers) == (steps_2, step_2, servers_2)
    for alone, together in zip(one[:2], two[:2], strict=True):
        expected, actual = alone.as_floats(), together.as_floats()
        for each in ("seconds", "tokens_per_second"):
            del expected[each], actual[each]
        for each in ("ratio", "approx_kl"):  # exponentials of sums that are made in another order
            assert actual.pop(each) == pytest.approx(expected.pop(each), rel=1e-4)
        assert actual == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert two[2].logprobs == pytest.approx(one[2].logprobs, abs=1e-3)
    weights = [load_file(tmp_path / name / "adapter" / WEIGHTS_FILE) for name in ("LoraTrainer", "LaunchedTrainer")]
    assert_same(*weights, tolerance=2e-3)
    assert trainer.notes[0].startswith("trained in 2 processes of this machine (1 threads; 1 threads)")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        trainer.save_state(tmp_path / "file" / "state")
    assert gone(ids_of(trainer))


@pytest.mark.slow
def test_a_saved_state_is_gone_on_from(model: Path, tmp_path: Path) -> None:
    samples, first = make_samples(7), launched(model, GRPO)
    first.reinforce(samples)
    first.save_state(tmp_path / "state")
    expected = first.reinforce(samples[:4])
    resumed = launched(model, GRPO)
    resumed.load_state(tmp_path / "state")
    assert resumed.reinforce(samples[:4]).loss == pytest.approx(expected.loss, abs=1e-6) and resumed.step == first.step


@pytest.mark.slow
def test_other_ways_of_learning_are_the_same_calls_and_two_trainers_at_once_do_not_meet(model: Path) -> None:
    samples = make_samples(6)
    pairs = [PreferencePair((samples[at],), (samples[at + 1],)) for at in (0, 2, 4)]
    alone, trainers = LoraTrainer(model, SFT), [launched(model, SFT) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda trainer: trainer.sft(samples).loss, trainers)
    assert one == two == pytest.approx(alone.sft(samples).loss, rel=1e-5)
    assert trainers[0].prefer(pairs).loss == pytest.approx(alone.prefer(pairs).loss, rel=1e-5)
    with pytest.raises(TrainingError, match="does not reinforce"):
        trainers[1].reinforce(samples)


class CancelledError(Exception):
    pass


def cancel(at: Any) -> None:
    raise CancelledError


@pytest.mark.slow
def test_a_killed_process_is_one_line_and_the_next_trainer_goes_on_until_it_is_cancelled(
    model: Path, tmp_path: Path
) -> None:
    samples, run = make_samples(7), tmp_path / "run"
    expected = LoraTrainer(model, LONGER).reinforce(samples)
    trainer = launched(model, LONGER)
    pids = ids_of(trainer)

    def kill(at: Any) -> None:
        if at.done == 4:
            os.kill(pids[1], signal.SIGKILL)

    killed = r"process 1 of 2 that train was ended by SIGKILL; the system does so where the memory is full; start the"
    with pytest.raises(TrainingError, match=killed) as ended:
        trainer.reinforce(samples, kill, run=run)
    assert "\n" not in str(ended.value) and gone(pids)
    with pytest.raises(TrainingError, match="the processes that train have ended: TrainingError: process"):
        trainer.reinforce(samples, run=run)
    steps: list[int] = []
    second = launched(model, LONGER)
    metrics = second.reinforce(samples, lambda at: steps.append(at.done), run=run)
    assert steps[0] > 1, "it goes on from a checkpoint"
    assert metrics.loss == pytest.approx(expected.loss, rel=1e-5) and metrics.steps == expected.steps
    with pytest.raises(CancelledError):
        second.reinforce(samples, cancel)
    assert gone(ids_of(second))


@pytest.mark.slow
def test_errors_are_those_of_the_trainer(model: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as alone:
        LoraTrainer(tmp_path / "none", GRPO)
    with pytest.raises(TrainingError) as together:
        launched(tmp_path / "none", GRPO)
    assert str(together.value) == str(alone.value)


@pytest.mark.slow
def test_what_they_log_is_logged_here_and_they_end_with_the_trainer(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = PolicyRef(base_model="tiny", version=3)
    stale = [each.model_copy(update={"policy": older}) for each in make_samples(4)]
    trainer = launched(model, EXACT, algorithm="gspo")
    with caplog.at_level(logging.INFO):
        trainer.reinforce(stale)
    (said,) = (each for each in caplog.records if "samples are of other versions" in each.getMessage())
    assert (said.levelname, said.name) == ("WARNING", old_logprobs.__name__)
    pids, folder = ids_of(trainer), trainer._close.peek()[2][1]
    del trainer
    gc.collect()
    assert gone(pids) and not folder.exists()


@pytest.mark.slow
def test_they_end_with_a_process_that_is_killed(model: Path) -> None:
    program = """
import json, sys, time
from openhands_rl_plugin.config.training import TrainingSettings
from openhands_rl_plugin.training.distributed.launched import LaunchedTrainer
made = LaunchedTrainer(sys.argv[1], TrainingSettings.model_validate_json(sys.argv[2]))
print(json.dumps([str(made._close.peek()[2][1]), *(each.pid for each in made._processes)]), flush=True)
time.sleep(600)
"""
    settings = GRPO.model_copy(update={"nproc_per_node": 2}).model_dump_json()
    with subprocess.Popen([sys.executable, "-c", program, str(model), settings], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        folder, *pids = json.loads(owner.stdout.readline())
        owner.kill()
    assert gone(pids)
    assert not Path(folder).exists(), "nor do the episodes that they were given stay"


def test_what_cannot_be_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nproc_per_node = 2 trains adapters: leave 1"):
        TrainingSettings(method="full", nproc_per_node=2)
    with pytest.raises(ConfigError, match='engine = "tinker" has no nproc_per_node'):
        TrainingSettings(engine="tinker", nproc_per_node=2).check_engine()
    with pytest.raises(ConfigError, match="nproc_per_node = 2: only `train` of a policy and `loop` start processes"):
        LoraTrainer(model, GRPO.model_copy(update={"nproc_per_node": 2}))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="a launcher has started 4 processes already: leave 1"):
        launched(model, GRPO)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="1 is visible; set 1, or show more by CUDA_VISIBLE_DEVICES"):
        launched(model, GRPO)
