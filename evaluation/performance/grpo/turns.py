"""Two generators for TRL's side of ``grpo``: each samples one turn of many episodes as one batch.

Both are transformers' ``generate`` on left-padded rows, with the generation settings that ``GRPOTrainer`` made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

Kind = Literal["cached", "plain"]


class Turns(Protocol):
    """Samples the turns of one batch of episodes."""

    def answers(self, rows: Sequence[int], prompts: Sequence[list[int]]) -> list[list[int]]:
        """Sample a turn for each unfinished episode.

        ``rows`` are the episodes' numbers; one that is left out does not come again. ``prompts`` are their whole
        prompts. Returns the sampled ids of each row, with the end of turn.
        """
        ...


class PlainTurns:
    """TRL's own generator, which computes the whole prompt again at every turn."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def answers(self, rows: Sequence[int], prompts: Sequence[list[int]]) -> list[list[int]]:
        """See ``Turns``."""
        sampled, _ = self._trainer._generate_single_turn(list(prompts), None, {}, 1)
        return sampled


class CachedTurns:
    """Keeps the keys and values of earlier turns, which TRL itself does not, and computes only new tokens.

    Padding, and columns after the end of a row's completion, stay in the cache and are masked.
    """

    def __init__(self, trainer: Any) -> None:
        import torch
        from transformers import DynamicCache

        self._trainer = trainer
        self._cache = DynamicCache()
        self._rows: list[int] = []
        self._ids = torch.empty((0, 0), dtype=torch.long)
        self._mask = torch.empty((0, 0), dtype=torch.long)

    def answers(self, rows: Sequence[int], prompts: Sequence[list[int]]) -> list[list[int]]:
        """See ``Turns``."""
        import torch
        from trl.models.utils import unwrap_model_for_generation

        self._keep(rows)
        self._append(prompts)
        trainer, width = self._trainer, self._ids.shape[1]
        unwrapped: Any = unwrap_model_for_generation(
            trainer.model_wrapped, trainer.accelerator, generation_kwargs=trainer.generation_kwargs
        )
        with unwrapped as model, torch.no_grad():
            self._ids = model.generate(
                input_ids=self._ids,
                attention_mask=self._mask,
                past_key_values=self._cache,
                generation_config=trainer.generation_config,
            )
        sampled = self._ids[:, width:]
        ends = torch.isin(sampled, torch.tensor(trainer.eos_token_ids)).long()
        own = ends.cumsum(1) - ends == 0
        self._mask = torch.cat([self._mask, own.long()], 1)
        return [row[mine].tolist() for row, mine in zip(sampled, own, strict=True)]

    def _keep(self, rows: Sequence[int]) -> None:
        import torch

        if not self._rows:
            self._ids, self._mask = self._ids.new_empty((len(rows), 0)), self._mask.new_empty((len(rows), 0))
        elif list(rows) != self._rows:
            kept = torch.tensor([self._rows.index(row) for row in rows])
            self._ids, self._mask = self._ids[kept], self._mask[kept]
            self._cache.batch_select_indices(kept)
        self._rows = list(rows)

    def _append(self, prompts: Sequence[list[int]]) -> None:
        import torch

        known = self._mask.sum(1).tolist()
        fresh = [prompt[count:] for prompt, count in zip(prompts, known, strict=True)]
        longest = max(map(len, fresh))
        pad = self._trainer.generation_config.pad_token_id
        ids = [[pad] * (longest - len(each)) + each for each in fresh]
        mask = [[0] * (longest - len(each)) + [1] * len(each) for each in fresh]
        self._ids = torch.cat([self._ids, torch.tensor(ids)], 1)
        self._mask = torch.cat([self._mask, torch.tensor(mask)], 1)


def make_turns(kind: Kind, trainer: Any) -> Turns:
    """Make a generator for one batch of episodes."""
    return CachedTurns(trainer) if kind == "cached" else PlainTurns(trainer)
