"""What training a policy and training a verifier share: settings, episodes, processes, progress and publishing."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from openhands_rl_plugin.cli.options.ending import ENDING
from openhands_rl_plugin.cli.options.fields import settings_from
from openhands_rl_plugin.cli.options.stored import filter_of
from openhands_rl_plugin.cli.options.stores import open_store
from openhands_rl_plugin.cli.options.versions import publish
from openhands_rl_plugin.config.engines import engine_named
from openhands_rl_plugin.config.rl import RLSettings, TrainingSettings
from openhands_rl_plugin.config.toml import load_settings
from openhands_rl_plugin.core.errors import MissingExtraError, TrainingError

if TYPE_CHECKING:
    from openhands_rl_plugin.core.protocols import TrajectoryStorage
    from openhands_rl_plugin.core.types import Adapter, Probe
    from openhands_rl_plugin.training.distributed.ranks import Ranks
    from openhands_rl_plugin.training.trainer.memory_estimate import MemoryEstimate
    from openhands_rl_plugin.training.trainer.metrics import TrainProgress

VERIFIER_TRAINING = TrainingSettings(
    algorithm="sft",
    learning_rate=2e-4,
    num_epochs=2,
    lora_rank=64,
    lora_alpha=64,
    warmup_steps=15,
    weight_decay=0.01,
    schedule="linear",
)
"""Those of SWE-Gym's verifier of 32B, which also had batches of 8: the defaults of --verifier without --config."""


class TrainingRun:
    """One ``openhands-rl train``, in one of its processes."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks | None, config: RLSettings) -> None:
        from openhands_rl_plugin.models.adapters.store import AdapterStore, check_name

        self._args = args
        self._config = config
        self._ranks = ranks
        self._leads = ranks is None or ranks.rank == 0
        self._training = settings_from(args, config.training)
        self._name = check_name(args.adapter)
        self._where = filter_of(args).model_copy(update={"adapter": None})
        self._adapters = AdapterStore(args.adapters)
        self._run_directory = self._adapters.root / f"{self._name}.training"
        self._parent: Adapter | None = None

    @property
    def _start(self) -> str:
        return self._parent.name if self._parent else "the base model"

    @asynccontextmanager
    async def _open_store(self) -> AsyncIterator[TrajectoryStorage]:
        """The store; ``--tasks`` limits the filter to episodes of its tasks.

        Raises ``ConfigError`` when the tasks did not pass the quality gate, ``TrainingError`` when none has an episode.
        """
        async with open_store(self._args.store, skip_damaged=self._args.skip_damaged) as storage:
            if suite := self._args.tasks:
                from openhands_rl_plugin.evals.tasks.gate import require_checked
                from openhands_rl_plugin.evals.tasks.packages import tasks_file

                known = {task.instance_id for task in require_checked(tasks_file(suite))}
                ids = tuple([each.id async for each in storage.summaries(self._where) if each.task_id in known])
                if not ids:
                    raise TrainingError(
                        f"no stored episode is of a task of {suite}: roll out on it first (openhands-rl evaluate)"
                    )
                self._where = self._where.model_copy(update={"ids": ids})
            yield storage

    def _from_rank_0[T](self, kind: TypeAdapter[T], make: Callable[[], T]) -> T:
        """The value that rank 0 makes. So all ranks have the same one, even if the store is being written to."""
        if self._ranks is None:
            return make()
        return kind.validate_json(self._ranks.broadcast_text(kind.dump_json(make()).decode() if self._leads else ""))

    def _publish(self, adapter: Adapter, probe: Probe) -> None:
        if self._args.publish:
            ENDING.run(publish(self._args.publish, self._adapters, adapter, probe))


def config_of(args: argparse.Namespace) -> RLSettings:
    """The settings of ``--config``, or the defaults. Raises ``ConfigError``."""
    if args.config:
        return load_settings(args.config)
    return RLSettings(training=VERIFIER_TRAINING) if args.verifier else RLSettings()


@contextmanager
def join_processes() -> Iterator[Ranks | None]:
    """This process among those of ``torchrun`` or ``accelerate launch``; ``None`` if alone. Only rank 0 prints."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    try:
        from openhands_rl_plugin.models.generator.threads import prepare_threads

        prepare_threads()
        from openhands_rl_plugin.training.distributed.ranks import join_ranks
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "torch", "train") from error
    with join_ranks() as ranks:
        if ranks.rank == 0:
            yield ranks
            return
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield ranks


@contextmanager
def training_progress() -> Iterator[Callable[[TrainProgress], None]]:
    """A bar with the step's metrics on stderr, where that is a terminal."""
    from openhands_rl_plugin.trajectories.view.terminal import progress_bar

    with progress_bar("training") as bar:

        def advanced(at: TrainProgress) -> None:
            metrics = f"loss {at.loss:.4f}, entropy {at.entropy:.3f}, KL {at.approx_kl:.4f}, ratio {at.ratio:.3f}"
            bar.update(at.done, at.total, what=f"training, {metrics}", note="")

        yield advanced


def print_note(line: str) -> None:
    """One of the lines that say how training will be done."""
    print(f"  {line}", flush=True)


def memory_line(model: Path, settings: TrainingSettings, longest: int, *, free: int | None = None) -> str:
    """The estimated memory of training on sequences of at most ``longest`` tokens, and the ``free`` bytes."""
    from openhands_rl_plugin.training.trainer.memory_estimate import estimate_memory

    if not engine_named(settings.engine).here:
        return "  memory: none here, the Tinker service trains"
    memory = estimate_memory(model, settings, longest)
    here = "" if free is None else f"; free: {free / 1e9:.2f} GB" + (", too little" if memory.total > free else "")
    return f"  memory: {memory_words(memory)}{here}"


def memory_words(memory: MemoryEstimate) -> str:
    """An estimate in words, in GB (1e9 bytes)."""
    return f"about {memory.total / 1e9:.2f} GB ({memory.weights / 1e9:.2f} of them weights and optimiser)"
