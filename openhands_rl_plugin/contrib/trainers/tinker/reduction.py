"""Finds a server that averages where it should sum, before anything is trained.

One sequence, and the same one cut into two beside an equal one without advantages, have the same gradient, if the
server reduces as the rows were made for. Their norms are compared, on an adapter of the check's own, at a learning
rate of 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openhands_rl_plugin.contrib.trainers.tinker.rows import Reduction, policy_rows
from openhands_rl_plugin.contrib.trainers.tinker.service import RemoteAdapter, StepOptions
from openhands_rl_plugin.core.errors import TrainingError
from openhands_rl_plugin.core.redaction import redacting_logger
from openhands_rl_plugin.training.losses.micro_batches import TrainingSample

log = redacting_logger(__name__)

_TOLERANCE = 0.05
"""Of the ratio of two norms, which are equal but for rounding; another reduction moves it by a quarter at least."""


def check_reduction(adapter: RemoteAdapter, items: Sequence[TrainingSample], reduction: Reduction) -> float | None:
    """The ratio of the two norms, ``None`` where the server says no norms, which is logged.

    ``items``: of the first batch. Raises ``TrainingError`` where the server reduces otherwise.
    """
    item = max(items, key=lambda each: len(each.positions))
    ones = torch.ones(len(item.positions))
    first = (torch.arange(len(ones)) < max(1, len(ones) // 2)).float()
    parts = [first, ones - first] if len(ones) > 1 else [ones]
    whole = _norm(adapter, [(item, ones)], reduction)
    split = _norm(adapter, [*((_only(item, part), part[part > 0]) for part in parts), (item, ones * 0)], reduction)
    if whole is None or split is None or not whole:
        log.warning(
            "the server does not say the norm of a gradient, so that nothing shows whether it reduces by %r, as "
            "[rl.tinker] reduction says",
            reduction,
        )
        return None
    ratio = split / whole
    if abs(ratio - 1) > _TOLERANCE:
        other = "sequence-mean" if reduction == "sum" else "sum"
        raise TrainingError(
            f'[rl.tinker] reduction = "{reduction}": the server reduces a batch otherwise (the norm of a gradient is '
            f'{ratio:.2f} times what it should be); nothing was trained: set "{other}"'
        )
    return ratio


def _norm(adapter: RemoteAdapter, parts: Sequence[tuple[TrainingSample, Tensor]], reduction: Reduction) -> float | None:
    rows = policy_rows([item for item, _ in parts], [factors for _, factors in parts], reduction)
    adapter.forward_backward(rows, "importance_sampling", {})
    return adapter.step(StepOptions(learning_rate=0.0))


def _only(item: TrainingSample, part: Tensor) -> TrainingSample:
    """The same sequence with a part ([K], 0 or 1) of its trained tokens."""
    kept = {at for at, own in zip(item.positions, part.tolist(), strict=True) if own}
    mask = tuple(at in kept for at in range(len(item.sample.mask)))
    cut = TrainingSample(item.sample.model_copy(update={"mask": mask, "spans": ()}), item.unit)
    cut.temperatures = None if item.temperatures is None else item.temperatures[part > 0]
    return cut
