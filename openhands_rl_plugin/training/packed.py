"""Runs a causal language model over a ``Layout``: no padding, shared beginnings computed once, sequences isolated."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from openhands_rl_plugin.training.layout import Layout

ATTENTION_NAME = "openhands_rl_packed"


@dataclass
class RunTensors:
    """A layout on a device, with what the attention of all layers needs."""

    layout: Layout
    device: torch.device
    ids: Tensor = field(init=False)
    positions: Tensor = field(init=False)
    before: tuple[Tensor | None, ...] = field(init=False)
    masks: dict[tuple[int, int | None], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.ids = torch.tensor([self.layout.ids], device=self.device)
        self.positions = torch.tensor([self.layout.positions], device=self.device)
        before: list[Tensor | None] = []
        for run in self.layout.runs:
            rows: list[int] = []
            above = run.parent
            while above is not None:
                rows[:0] = range(self.layout.runs[above].start, self.layout.runs[above].stop)
                above = self.layout.runs[above].parent
            before.append(torch.tensor(rows, device=self.device) if rows else None)
        self.before = tuple(before)

    def mask(self, index: int, window: int | None) -> Tensor | None:
        """[queries, keys] true where run ``index`` may look; ``None`` where plain causal attention does it."""
        run = self.layout.runs[index]
        count, total = run.stop - run.start, run.depth + run.stop - run.start
        if run.depth == 0 and (window is None or total <= window):
            return None
        if (index, window) not in self.masks:
            query = torch.arange(run.depth, total, device=self.device)[:, None]
            at = torch.arange(total, device=self.device)[None]
            visible = at <= query if window is None else (at <= query) & (at > query - window)
            assert visible.shape == (count, total)
            self.masks[index, window] = visible
        return self.masks[index, window]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    runs: RunTensors,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer.

    query: [1, heads, rows, dim]; key, value: [1, kv_heads, rows, dim] -> ([1, rows, heads, dim], None).
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with score caps or sinks")
    outputs = []
    for index, run in enumerate(runs.layout.runs):
        own = slice(run.start, run.stop)
        keys, values = key[:, :, own], value[:, :, own]
        if (before := runs.before[index]) is not None:
            keys = torch.cat([key.index_select(2, before), keys], dim=2)
            values = torch.cat([value.index_select(2, before), values], dim=2)
        mask = runs.mask(index, sliding_window)
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, own], keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def hidden_states(model: PreTrainedModel, runs: RunTensors) -> Tensor:
    """[rows, width] last hidden states of a model whose attention is ``ATTENTION_NAME``."""
    decoder = model.get_decoder()
    return decoder(input_ids=runs.ids, position_ids=runs.positions, use_cache=False, runs=runs).last_hidden_state[0]


AttentionInterface.register(ATTENTION_NAME, attend)
