"""A trainer in several processes of this machine, which it starts: a GPU each, where there are any."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from functools import partial, partialmethod
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, RLError, TrainingError, boundary, describe
from openhands_rl_plugin.core.types import Adapter, FailureKind
from openhands_rl_plugin.training.distributed.ranks import join_ranks
from openhands_rl_plugin.training.trainer.local_trainer import LoraTrainer
from openhands_rl_plugin.training.trainer.metrics import TrainMetrics
from openhands_rl_plugin.training.trainer.trainer import OnProgress

_SECONDS_TO_MISS = 2.0
"""How long the other processes need to notice that one has died."""

_AGAIN = "start the command again to go on from the last checkpoint"


class LaunchedTrainer:
    """``LoraTrainer`` in ``nproc_per_node`` processes; the calls and their results are the same.

    Any error ends all of the processes, and every later call raises ``TrainingError``: the weights of a half-finished
    collective are nobody's. A call with ``run`` is resumed by the next trainer. They end with this object and with its
    process, however that ends. Raises ``ConfigError`` for more processes than GPUs, and as ``LoraTrainer`` does.
    """

    is_main_process = True

    def __init__(self, model_path: str | Path, settings: TrainingSettings, *, adapter: Adapter | None = None) -> None:
        size = settings.nproc_per_node
        _check_place(size)
        self.settings, self._ended = settings, ""
        self.step = 0
        """Optimiser steps so far, over all calls."""
        folder = Path(tempfile.mkdtemp(prefix="openhands-rl-training-"))
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._close = weakref.finalize(self, _end, self._processes, folder)
        level = logging.getLogger("openhands_rl_plugin").getEffectiveLevel()
        parts = (level, str(model_path), settings.model_copy(update={"nproc_per_node": 1}), adapter)
        context = multiprocessing.get_context("spawn")
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, folder, theirs, *parts), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        found = self._do("")
        places = "; ".join(place for place, _, _ in found)
        self.notes: list[str] = [f"trained in {size} processes of this machine ({places})", *found[0][1]]
        """What a user should know before training begins, a line each."""
        self.servers: tuple[str, ...] = found[0][2]
        """Which servers can load the adapter."""

    def _train(
        self, name: str, data: Sequence[Any], on_progress: OnProgress | None = None, *, run: Path | None = None
    ) -> TrainMetrics:
        return self._do(name, list(data), on_progress=on_progress, run=None if run is None else run.absolute())[0]

    def _first(self, name: str, *arguments: Any) -> Any:
        return self._do(name, *arguments)[0]

    # As those of ``Trainer``.
    sft = partialmethod(_train, "sft")
    reinforce = partialmethod(_train, "reinforce")
    prefer = partialmethod(_train, "prefer")
    probe = partialmethod(_first, "probe")
    save_adapter = partialmethod(_first, "save_adapter")
    hand_over = partialmethod(_first, "hand_over")
    became = partialmethod(_first, "became")
    finish = partialmethod(_first, "finish")
    save_state = partialmethod(_first, "save_state")
    load_state = partialmethod(_first, "load_state")

    def _do(self, name: str, *arguments: Any, on_progress: OnProgress | None = None, **named: Any) -> list[Any]:
        """What every rank returns. Raises what one of them raised."""
        if self._ended:
            raise TrainingError(self._ended)
        try:
            for connection in self._connections if name else ():
                connection.send((name, arguments, named))
            found: dict[int, Any] = {}
            while len(found) < len(self._connections):
                waiting = [each for rank, each in enumerate(self._connections) if rank not in found]
                for connection in wait(waiting):
                    assert isinstance(connection, Connection)
                    kind, value = connection.recv()
                    if kind == "result":
                        found[self._connections.index(connection)], self.step = value
                    elif kind == "log":
                        logging.getLogger(value.name).handle(value)
                    elif kind == "error":
                        raise value
                    elif on_progress is not None:
                        on_progress(value)
            return [found[rank] for rank in sorted(found)]
        except (EOFError, OSError) as error:
            died = self._died()
            self._ended = f"the processes that train have ended: {describe(died)}"
            self._close()
            raise died from error
        except BaseException as error:  # a cancelled call, too
            self._ended = f"the processes that train have ended: {describe(error)}"
            self._close()
            raise

    def _died(self) -> TrainingError:
        """Of the processes that have ended, one that was killed: the others only missed it."""
        for process in self._processes:
            process.join(_SECONDS_TO_MISS / len(self._processes))
        codes = [process.exitcode or 0 for process in self._processes]
        rank = min(range(len(codes)), key=codes.__getitem__)
        code = codes[rank] or max(codes)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        why = "; the system does so where the memory is full" if code == -signal.SIGKILL else ""
        return TrainingError(f"process {rank} of {len(codes)} that train {how}{why}; {_AGAIN}")


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


def _end(processes: Sequence[BaseProcess], folder: Path) -> None:
    """Their memory is free when this returns."""
    for process in processes:
        process.kill()
        process.join()
    shutil.rmtree(folder, ignore_errors=True)


def _work(
    rank: int,
    size: int,
    folder: Path,
    owner: Connection,
    level: int,
    model: str,
    settings: TrainingSettings,
    adapter: Adapter | None,
) -> None:
    """One of the processes: the calls of its owner. Every rank gets every call, because most are collectives."""
    os.setsid()  # Ctrl-C is the owner's, which ends this process
    os.dup2(2, 1)
    threading.Thread(target=_end_with_owner, args=(folder,), daemon=True).start()
    alone = "lo" if sys.platform == "linux" else "lo0"  # nobody else's process joins, or listens
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"GLOO_SOCKET_IFNAME": alone, "NCCL_SOCKET_IFNAME": alone}
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or size) // size))
    lock = threading.Lock()

    def send(kind: str, value: object) -> None:
        with lock:
            owner.send((kind, value))

    disable_progress_bar()
    if rank == 0:
        _forward_logs(partial(send, "log"), level)
    with join_ranks(meeting=(folder / "meeting").as_uri()):
        try:
            with boundary(FailureKind.INFRASTRUCTURE, "training"):
                place = _place()
                trainer = LoraTrainer(model, settings, adapter=adapter)
                send("result", ((place, trainer.notes, trainer.servers), 0))
                while True:
                    name, arguments, named = owner.recv()
                    if "run" in named:
                        named["on_progress"] = None if rank else partial(send, "progress")
                    skipped = rank and name in ("save_adapter", "save_state")  # rank 0 alone writes files
                    value = None if skipped else getattr(trainer, name)(*arguments, **named)
                    send("result", (value, trainer.step))
        except CaughtFailure as caught:
            why = caught.failure.message
            full = "lower max_tokens_per_micro_batch, or set gradient_checkpointing or sharding, and "
            remedy = f"{full if 'emory' in why else ''}{_AGAIN}"
            send("error", TrainingError(f"process {rank} of {size} that train: {why}; {remedy}"))
        except RLError as error:
            send("error", error)
        os._exit(1)  # before the group is left, which waits for those that are in a collective


def _end_with_owner(folder: Path) -> None:
    owner = multiprocessing.parent_process()
    assert owner is not None
    owner.join()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _forward_logs(send: Any, level: int) -> None:
    """What this package logs is the owner's, as it is in one process."""

    class Forwarded(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            record.msg, record.args, record.exc_info = record.getMessage(), None, None
            send(record)

    own = logging.getLogger("openhands_rl_plugin")
    own.setLevel(level)
    own.addHandler(Forwarded())
    own.propagate = False


def _place() -> str:
    if not torch.cuda.is_available():
        return f"{torch.get_num_threads()} threads"
    free, _ = torch.cuda.mem_get_info()
    return f"cuda:{torch.cuda.current_device()}, {free / 1e9:.1f} GB free"
