"""What can go wrong with processes that a trainer starts: each is said in one line, and nothing is left behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from made_samples import EXACT, make_samples

from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.training.launched import trainer as launched
from openhands_rl_plugin.training.launched.trainer import LaunchedTrainer

TWO = EXACT.model_copy(update={"nproc_per_node": 2})
GSPO = TWO.model_copy(update={"algorithm": "gspo"})


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


@pytest.mark.slow
def test_a_process_without_memory_says_what_to_set(model: Path) -> None:
    trainer = LaunchedTrainer(model, GSPO)
    pid = trainer._processes[1].pid
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 2**21
    resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
    full = r"process 1 of 2 that train .*; lower max_tokens_per_micro_batch, or set"
    with pytest.raises(TrainingError, match=full) as ended:
        trainer.reinforce(make_samples(6, length=480))
    assert "\n" not in str(ended.value)


def test_an_answer_that_was_cut_off_is_an_end() -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    program = """print('{"result": 1}'); print('{"result": {"val', end='')"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        launched._hear(0, process, answers)
    assert [answers.get_nowait(), answers.get_nowait()] == [(0, {"result": 1}), (0, None)]


@pytest.mark.slow
def test_a_command_that_was_cut_off_ends_a_process() -> None:
    worker = [sys.executable, "-m", "openhands_rl_plugin.training.launched"]
    found = subprocess.run(worker, input=b'{"meeting": "fi', capture_output=True, timeout=200, check=False)
    assert found.returncode == 1 and not found.stdout


def test_processes_that_do_not_end_are_waited_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "_SECONDS_TO_END", 1.5)
    processes = [subprocess.Popen(["sleep", "100"], stdin=subprocess.PIPE) for _ in range(4)]
    begun = time.monotonic()
    launched._end(processes, tmp_path / "none")
    assert time.monotonic() - begun < 4 and all(each.returncode == -signal.SIGKILL for each in processes)


def test_a_process_that_cannot_be_started_is_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(TrainingError, match=r"process 0 of 2 cannot be started: .*No such file"):
        LaunchedTrainer(model, TWO)
    assert not list(tmp_path.iterdir())


def test_more_processes_than_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cores = os.cpu_count() or 1
    (said,) = launched._crowd(cores + 1)
    assert said.startswith(f"{cores + 1} processes share {cores} cores") and not launched._crowd(cores)
