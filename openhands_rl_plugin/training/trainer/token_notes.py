"""Keeps what training computes for each trained token, as ``keep_token_notes`` says, and never stops training."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
from torch import Tensor

from openhands_rl_plugin.config.training import TrainingSettings
from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.training.losses.losses import MicroBatch, MicroBatchLoss
from openhands_rl_plugin.training.losses.micro_batches import TrainingSample
from openhands_rl_plugin.training.trainer.note_files import (
    MOST_FILE_BYTES,
    NOTES_FOLDER,
    NotedSample,
    NotedTraining,
    NoteFile,
    frame_bytes,
)

log = logging.getLogger(__name__)


class TokenNotes:
    """The notes of one call of a trainer.

    ``run``: its directory, without which nothing is kept. ``steps``: the optimiser steps of all epochs; ``done``: of
    them, those of a killed call that is resumed. Each rank writes a file of its own, so that no rank waits for another.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        run: Path | None,
        fingerprint: str,
        version: int,
        rank: int,
        *,
        steps: int,
        done: int,
    ) -> None:
        self._keep = settings.keep_token_notes
        self._folder = None if run is None or self._keep == "none" else run / NOTES_FOLDER
        self._about = NotedTraining(
            fingerprint=fingerprint,
            algorithm=settings.algorithm,
            version=version,
            epochs=settings.num_epochs,
            at=time.time(),
        )
        self._steps_per_epoch = max(1, steps // settings.num_epochs)
        self._done, self._rank = done, rank
        self._number, self._epoch, self._wanted = 0, 0, False
        self._file: NoteFile | None = None

    def begin_step(self, number: int) -> None:
        """Optimiser step ``number``, from 1 on, is next."""
        self._number, self._epoch = number, (number - 1) // self._steps_per_epoch + 1
        self._wanted = self._folder is not None and (self._keep == "all" or self._epoch == self._about.epochs)

    @torch.no_grad()
    def take(self, one: MicroBatch, loss: MicroBatchLoss) -> None:
        """Keep the numbers of a micro-batch; a failure to write is a warning, and ends the notes of this call."""
        if not self._wanted or self._folder is None or not any(item.sample.spans for item in one.items):
            return
        known = {"trainer": one.logprobs, "entropy": one.entropies, **loss.notes(one)}
        table = torch.stack([each.detach().float() for each in known.values()]).cpu()
        parts = torch.split(table, [len(item.positions) for item in one.items], dim=1)
        try:
            self._file = self._file or NoteFile(self._folder, self._about, self._done, self._rank)
            noted = [(item, part) for item, part in zip(one.items, parts, strict=True) if item.sample.spans]
            # Written at once: a step whose notes are half there is truncated when it is repeated.
            whole = self._file.append(b"".join(self._frame(item, part, tuple(known)) for item, part in noted))
            if not whole:
                self._give_up(f"they have {MOST_FILE_BYTES >> 20} MiB")
        except OSError as error:
            self._give_up(describe(error))

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()

    def _frame(self, item: TrainingSample, numbers: Tensor, columns: tuple[str, ...]) -> bytes:
        about = NotedSample(
            step=self._number,
            epoch=self._epoch,
            episode=item.sample.trajectory_id,
            nodes=tuple((node, stop - start) for node, start, stop in item.sample.spans),
            columns=columns,
        )
        return frame_bytes(about, numbers.tolist())

    def _give_up(self, why: str) -> None:
        log.warning("no more token notes are kept in %s (%s); training goes on without them", self._folder, why)
        self._folder, self._wanted = None, False
