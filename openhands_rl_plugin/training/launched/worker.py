"""One of the processes that train together: a command a line on stdin, and on stdout an answer a line.

Every rank gets every command, because most are collectives; rank 0 alone writes files. It ends when stdin does, so
that nothing trains on for a loop that was killed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from pydantic import TypeAdapter

from openhands_rl_plugin.config.training import TrainingSettings
from openhands_rl_plugin.core.errors import RLError
from openhands_rl_plugin.core.types import Adapter, JsonObject, Sample
from openhands_rl_plugin.training.data.imitation import PreferencePair
from openhands_rl_plugin.training.distributed.ranks import Ranks, join_ranks
from openhands_rl_plugin.training.trainer.local_trainer import LoraTrainer
from openhands_rl_plugin.training.trainer.metrics import TrainProgress

SAMPLES, PAIRS = TypeAdapter(list[Sample]), TypeAdapter(list[PreferencePair])
Say = Callable[[str, object], None]
"""Answer: what kind of answer, and what."""

_KINDS: dict[str, TypeAdapter[Any]] = {"sft": SAMPLES, "reinforce": SAMPLES, "prefer": PAIRS}


def main() -> int:
    """Serve the trainer whose parts the first line names. The exit status is 1 after an error, which is said."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a line that a library prints is no answer
    commands: SimpleQueue[JsonObject] = SimpleQueue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()

    def say(kind: str, value: object) -> None:
        answers.write(json.dumps({kind: value}) + "\n")  # one call a line: a log record may come of another thread
        answers.flush()

    start = commands.get()
    try:
        with join_ranks(meeting=str(start["meeting"])) as ranks:
            if ranks.rank == 0:
                _tell_logs(say, int(str(start["log_level"])))
            return _serve(ranks, start, commands, say)
    except RLError as error:
        say("error", [type(error).__name__, str(error)])
        return 1


def _serve(ranks: Ranks, start: JsonObject, commands: SimpleQueue[JsonObject], say: Say) -> int:
    try:
        place = _place()
        trainer = LoraTrainer(
            str(start["model"]),
            TrainingSettings.model_validate(start["settings"]),
            adapter=_adapter(start["adapter"]),
        )
        say("result", {"place": place, "notes": trainer.notes, "servers": trainer.servers})
        while True:
            command = commands.get()
            told = None if ranks.rank else lambda at: say("progress", asdict(at))
            say("result", {"value": _obey(trainer, command, told), "step": trainer.step})
    except RLError as error:
        # Before the group is left, which waits for those that are in a collective.
        say("error", [type(error).__name__, str(error)])
        return 1


def _listen(commands: SimpleQueue[JsonObject]) -> None:
    folder = None
    try:
        for line in sys.stdin:
            message = json.loads(line)
            folder = message.get("folder", folder)
            commands.put(message)
    finally:  # also of a line that its writer did not finish
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # of an owner that was killed, with its episodes
        os._exit(1)


def _tell_logs(say: Say, level: int) -> None:
    """What this package logs is the owner's, as it is in one process."""

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            say("log", [record.name, record.levelno, record.getMessage()])

    own = logging.getLogger("openhands_rl_plugin")
    own.setLevel(level)
    own.addHandler(Told())
    own.propagate = False


def _adapter(given: object) -> Adapter | None:
    return None if given is None else Adapter.model_validate(given, strict=False)


def _place() -> str:
    if not torch.cuda.is_available():
        return f"{torch.get_num_threads()} threads"
    free, _ = torch.cuda.mem_get_info()
    return f"cuda:{torch.cuda.current_device()}, {free / 1e9:.1f} GB free"


def _obey(trainer: LoraTrainer, command: JsonObject, told: Callable[[TrainProgress], None] | None) -> Any:
    do, given = str(command["do"]), command
    if do in _KINDS:
        data = _KINDS[do].validate_json(Path(str(given["data"])).read_bytes(), strict=False)
        run = Path(str(given["run"])) if given["run"] else None
        return asdict(getattr(trainer, do)(data, told, run=run))
    if do == "probe":
        found = trainer.probe(
            TypeAdapter(list[int]).validate_python(given["token_ids"]),
            TypeAdapter(float | None).validate_python(given["max_difference"]),
        )
        return found.model_dump(mode="json")
    if do == "load_state":
        return trainer.load_state(Path(str(given["directory"])))
    if do == "became":
        return trainer.became(_adapter(given["adapter"]))
    if do == "finish":
        return trainer.finish()
    assert do in ("save_adapter", "save_state"), do
    if trainer.is_main_process:
        getattr(trainer, do)(Path(str(given["directory"])))
    return None
