"""A trainer in several processes of this machine, which it starts: a GPU each, where there are any."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core import errors
from openhands_rl_plugin.core.errors import ConfigError, TrainingError
from openhands_rl_plugin.core.types import Adapter, JsonObject, Probe, Sample
from openhands_rl_plugin.training.data.imitation import PreferencePair
from openhands_rl_plugin.training.launched.worker import PAIRS, SAMPLES
from openhands_rl_plugin.training.trainer.metrics import TrainMetrics, TrainProgress
from openhands_rl_plugin.training.trainer.trainer import OnProgress

_MODULE = "openhands_rl_plugin.training.launched"
_SECONDS_TO_END = 10.0
_SECONDS_TO_MISS = 2.0
"""How long the other processes need to notice that one has died."""

_FULL = re.compile(r"out of memory|allocate memory|MemoryError|bad_alloc", re.IGNORECASE)
_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"

_Answer = tuple[int, dict[str, Any] | None]
"""A rank, and what it said; ``None`` at the end of its process."""


class LaunchedTrainer:
    """``LoraTrainer`` in ``nproc_per_node`` processes; the calls and their results are the same.

    Any error ends all of the processes, and every later call raises ``TrainingError``: the weights of a half-done
    collective are nobody's. A call with ``run`` is resumed by the next trainer. They end with this object and with its
    process, however that ends. Raises ``ConfigError`` for more processes than GPUs, and as ``LoraTrainer`` does.
    """

    is_main_process = True

    def __init__(self, model_path: str | Path, settings: TrainingSettings, *, adapter: Adapter | None = None) -> None:
        size = settings.nproc_per_node
        _check_place(size)
        self.settings = settings
        self.step = 0
        """Optimiser steps so far, over all calls."""
        self._ended = ""
        self._folder = Path(tempfile.mkdtemp(prefix="openhands-rl-training-"))
        self._answers: SimpleQueue[_Answer] = SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._close = weakref.finalize(self, _end, self._processes, self._folder)
        try:
            for rank in range(size):
                self._processes.append(_start(rank, size, self._folder))
        except OSError as error:
            self._close()
            raise TrainingError(f"process {len(self._processes)} of {size} cannot be started: {error}") from error
        for rank, process in enumerate(self._processes):
            threading.Thread(target=_hear, args=(rank, process, self._answers), daemon=True).start()
        parts: JsonObject = {
            "folder": str(self._folder),
            "meeting": (self._folder / "meeting").as_uri(),
            "log_level": logging.getLogger("openhands_rl_plugin").getEffectiveLevel(),
            "model": str(Path(model_path).absolute()),
            "settings": settings.model_copy(update={"nproc_per_node": 1}).model_dump(mode="json"),
            "adapter": _dumped(adapter),
        }
        said = self._tell(parts)
        places = "; ".join(str(each["place"]) for each in said)
        self._notes = [f"trained in {size} processes of this machine ({places})", *_crowd(size), *said[0]["notes"]]
        self.servers: tuple[str, ...] = tuple(said[0]["servers"])
        """Which servers can load the adapter."""

    @property
    def notes(self) -> list[str]:
        """What a user should know before training begins, a line each."""
        return self._notes

    def sft(
        self, samples: Sequence[Sample], on_progress: OnProgress | None = None, *, run: Path | None = None
    ) -> TrainMetrics:
        """As ``Trainer.sft``."""
        return self._train("sft", SAMPLES.dump_json(list(samples)), on_progress, run)

    def reinforce(
        self, samples: Sequence[Sample], on_progress: OnProgress | None = None, *, run: Path | None = None
    ) -> TrainMetrics:
        """As ``Trainer.reinforce``."""
        return self._train("reinforce", SAMPLES.dump_json(list(samples)), on_progress, run)

    def prefer(
        self, pairs: Sequence[PreferencePair], on_progress: OnProgress | None = None, *, run: Path | None = None
    ) -> TrainMetrics:
        """As ``Trainer.prefer``."""
        return self._train("prefer", PAIRS.dump_json(list(pairs)), on_progress, run)

    def probe(self, token_ids: Sequence[int], max_difference: float | None = None) -> Probe:
        """As ``Trainer.probe``."""
        asked = {"token_ids": list(token_ids), "max_difference": max_difference}
        return Probe.model_validate(self._do("probe", **asked), strict=False)

    def save_adapter(self, directory: Path) -> None:
        """As ``LoraTrainer.save_adapter``."""
        self._do("save_adapter", directory=str(directory.absolute()))

    def became(self, adapter: Adapter | None) -> None:
        """As ``Trainer.became``."""
        self._do("became", adapter=_dumped(adapter))

    def finish(self) -> None:
        """As ``Trainer.finish``."""
        self._do("finish")

    def save_state(self, directory: Path) -> None:
        """As ``Trainer.save_state``."""
        self._do("save_state", directory=str(directory.absolute()))

    def load_state(self, directory: Path) -> None:
        """As ``Trainer.load_state``."""
        self._do("load_state", directory=str(directory.absolute()))

    def _train(self, do: str, data: bytes, on_progress: OnProgress | None, run: Path | None) -> TrainMetrics:
        file = self._folder / "data.json"
        if not self._ended:
            file.write_bytes(data)
        asked = {"data": str(file), "run": None if run is None else str(run.absolute())}
        return TrainMetrics(**self._do(do, on_progress, **asked))

    def _do(self, do: str, on_progress: OnProgress | None = None, **words: Any) -> Any:
        said = self._tell({"do": do, **words}, on_progress)[0]
        self.step = int(said["step"])
        return said["value"]

    def _tell(self, message: JsonObject, on_progress: OnProgress | None = None) -> list[dict[str, Any]]:
        """What every rank answers. Raises what one of them raised."""
        if self._ended:
            raise TrainingError(self._ended)
        try:
            return self._asked(message, on_progress)
        except BaseException as error:  # a cancelled call, too
            self._ended = f"the processes that train have ended: {errors.describe(error)}"
            self._close()
            raise

    def _asked(self, message: JsonObject, on_progress: OnProgress | None) -> list[dict[str, Any]]:
        line = json.dumps(message).encode() + b"\n"
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except OSError as error:
                raise self._died(self._first_to_die(rank)) from error
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(self._processes):
            rank, said = self._answers.get()
            match said:
                case None:
                    raise self._died(self._first_to_die(rank))
                case {"progress": at}:
                    if on_progress is not None:
                        on_progress(TrainProgress(**at))
                case {"log": [name, level, text]}:
                    logging.getLogger(str(name)).log(int(level), "%s", text)
                case {"error": [name, text]}:
                    raise _error(str(name), str(text))
                case _:
                    found[rank] = said["result"]
        return [found[rank] for rank in sorted(found)]

    def _first_to_die(self, rank: int) -> int:
        """Of the processes that have ended when ``rank`` has, one that was killed: the others only missed it."""
        with suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(timeout=_SECONDS_TO_MISS / len(self._processes))
        codes = [process.poll() or 0 for process in self._processes]
        return min(range(len(codes)), key=codes.__getitem__) if min(codes) < 0 else rank

    def _died(self, rank: int) -> TrainingError:
        code = self._processes[rank].wait()
        last = _last_line(_log(self._folder, rank))
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        remedy = "start the command again to go on from the last checkpoint"
        if code == -signal.SIGKILL:  # what it wrote last says nothing of that
            why, remedy = "", f"the system does so where the memory is full; {remedy}"
        else:
            why = f": {last}" if last else ""
        if _FULL.search(why):
            remedy = (
                "lower max_tokens_per_micro_batch, or set gradient_checkpointing, or sharding "
                '= "layers", and start the command again'
            )
        return TrainingError(f"process {rank} of {len(self._processes)} that train {how}{why}; {remedy}")


def _check_place(size: int) -> None:
    launched = os.environ.get("WORLD_SIZE", "1")
    if launched != "1":
        raise ConfigError(
            f"[rl.training] nproc_per_node = {size}, and a launcher has started {launched} processes already: leave 1"
        )
    if torch.cuda.is_available() and (found := torch.cuda.device_count()) < size:
        raise ConfigError(
            f"[rl.training] nproc_per_node = {size}: every process trains on a GPU of its own, and {found} "
            f"{'is' if found == 1 else 'are'} visible; set {found}, or show more by CUDA_VISIBLE_DEVICES"
        )


def _crowd(size: int) -> list[str]:
    cores = os.cpu_count() or size
    if torch.cuda.is_available() or size <= cores:
        return []
    return [f"{size} processes share {cores} cores: {cores} of them would be as fast, and need less memory"]


def _start(rank: int, size: int, folder: Path) -> subprocess.Popen[bytes]:
    threads = str(max(1, (os.cpu_count() or size) // size))
    environment = {
        "OMP_NUM_THREADS": threads,
        **os.environ,
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)},
        # Nobody else's process joins, or listens.
        **{"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK},
    }
    with _log(folder, rank).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C is this process's, which ends them
        )


def _hear(rank: int, process: subprocess.Popen[bytes], answers: SimpleQueue[_Answer]) -> None:
    assert process.stdout is not None
    with suppress(ValueError):  # of an answer that its end cut off
        for line in process.stdout:
            answers.put((rank, json.loads(line)))
    answers.put((rank, None))


def _end(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """By the end of their stdin, and after a while by force: their memory is free when this returns."""
    for process in processes:
        assert process.stdin is not None
        with suppress(OSError):  # it has ended, and what was written to it is lost
            process.stdin.close()
    deadline = time.monotonic() + _SECONDS_TO_END
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip()[-500:] if lines else ""


def _error(name: str, text: str) -> Exception:
    kind = {"ConfigError": ConfigError, "StorageError": errors.StorageError}.get(name, TrainingError)
    return kind(text)


def _dumped(adapter: Adapter | None) -> JsonObject | None:
    return None if adapter is None else adapter.model_dump(mode="json")
