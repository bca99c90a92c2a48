"""Whether a model computes packed sequences as it computes each of them alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_PREFIX, _SUFFIX, _OTHER = 24, 28, 41  # tokens; the prefix is long enough to be shared, all are longer than a window
_LARGEST_ID = 200
"""Ids above are left out: they may be those of images and other special tokens."""

# (mean, largest) difference in nats. On unlikely text bfloat16 alone moves logprobs by 0.1 nats on average.
_TOLERANCE = {torch.bfloat16: (0.3, 2.0), torch.float32: (1e-3, 1e-2)}
_TF32_TOLERANCE = (2e-2, 2e-1)
"""Of float32 on a GPU, whose products have factors of 10 bits: eight times as fine as those of bfloat16."""

# In nats, when only other sequences of the pack change: then attention models give the same bits. Experts do not, where
# other tokens are sent to them: sums are then made in other shapes.
_LEAK_TOLERANCE = {torch.bfloat16: 0.01, torch.float32: 1e-4}

Sequences = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Packing:
    """How a model computes several sequences. ``reason``: why they are not packed."""

    packed: bool
    reason: str = ""


PACKED = Packing(True)


def sequences_of(vocabulary: int, suffixes: Sequence[int] = (1, 2), other: int = 3) -> list[tuple[int, ...]]:
    """Two with a common prefix, whose suffixes differ from it and from each other, and an unrelated one.

    Other seeds (of the two suffixes and of the third) change the tokens, but neither the lengths nor the order in which
    the sequences are laid out.
    """
    prefix = _ids(0, _PREFIX, vocabulary)
    first, second = ((at, *_ids(seed, _SUFFIX - 1, vocabulary)) for at, seed in zip((5, 6), suffixes, strict=True))
    return [prefix + first, prefix + second, (prefix[0] + 1, *_ids(other, _OTHER - 1, vocabulary))]


def problem_of_packing(
    logprobs: Callable[[Sequences], list[Tensor]],
    plain: Sequence[Tensor],
    vocabulary: int,
    dtype: torch.dtype,
    depends: Callable[[Sequences], bool],
) -> str:
    """What is wrong with packed ``logprobs`` of ``sequences_of``, in one clause; empty when they are right.

    ``plain``: those of the unchanged model, one sequence at a time. Besides the comparison with these, other sequences
    of the pack are changed, which must not change the rest: that shows a leak as small as a rounding error. Where they
    do change, ``depends`` tells rounding from a leak: whether a gradient reaches tokens of other sequences.
    """
    found = logprobs(sequences_of(vocabulary))
    changed = logprobs(sequences_of(vocabulary, (11, 2), 13))[1], *logprobs(sequences_of(vocabulary, (1, 12)))[::2]
    same = zip((found[1], found[0], found[2]), changed, strict=True)
    leak = max((mine - theirs).abs().max().item() for mine, theirs in same)
    if not leak <= _LEAK_TOLERANCE[dtype] and (
        not leak <= _tolerance(plain[0], dtype)[1] or depends(sequences_of(vocabulary))
    ):
        return f"its layers carry state from one packed sequence to the next ({leak:.2g} nats)"
    return problem_of_logprobs(found, plain, dtype)


def problem_of_logprobs(found: Sequence[Tensor], plain: Sequence[Tensor], dtype: torch.dtype) -> str:
    """How logprobs differ from those of the unchanged model, in one clause; empty when they do not."""
    differences = torch.cat([(mine - theirs).abs() for mine, theirs in zip(found, plain, strict=True)])
    mean, largest = _tolerance(differences, dtype)
    if differences.mean().item() <= mean and differences.max().item() <= largest:
        return ""
    return (
        f"its logprobs differ from those of the unchanged model by {differences.max().item():.2g} nats, "
        f"{differences.mean().item():.2g} on average"
    )


def problem_of_positions(model: PreTrainedModel) -> str:
    """Why the positions of a sequence depend on the others of its pack, in one clause; empty when they do not."""
    found = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    each = [found, *(value for value in found.values() if isinstance(value, dict))]
    kinds = {str(one.get("rope_type", "")) for one in each}
    if kinds & {"dynamic", "longrope"}:
        return "its rotary positions depend on the longest sequence of a pack"
    return ""


def _tolerance(found: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """The largest accepted mean and maximum of differences on the device of ``found``, in nats."""
    exact = torch.get_float32_matmul_precision() == "highest"
    return _TF32_TOLERANCE if dtype == torch.float32 and found.is_cuda and not exact else _TOLERANCE[dtype]


def drop_nothing(model: nn.Module) -> None:
    """Set every dropout to zero: some layers read theirs, and gradient checkpointing puts layers into training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _ids(seed: int, count: int, vocabulary: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(7, min(vocabulary, _LARGEST_ID)) for _ in range(count))
