"""Linear layers for serving: sibling projections fused, weights packed, LoRA added per segment of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The batch size that oneDNN optimises the packed layout for: a typical decoding batch. Other sizes work, too.
PACK_ROWS = 16


@dataclass(frozen=True)
class LoRAWeights:
    """The weights of one adapter in one fused layer.

    ``lora_a``: [rank, in]; ``lora_b``: [out, rank], already multiplied by the adapter's scaling. For fused projections
    the ranks are concatenated and ``lora_b`` is block-diagonal.
    """

    lora_a: Tensor
    lora_b: Tensor


@dataclass(frozen=True)
class LoRASegment:
    """Rows ``start:stop`` of the flat token batch that use one adapter (layer name -> its low-rank pair)."""

    start: int
    stop: int
    layers: dict[str, LoRAWeights]


@dataclass
class LoRAMapping:
    """The adapter of each row of the current batch; shared by all layers of one model."""

    segments: tuple[LoRASegment, ...] = field(default=())


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN's blocked layout is faster for this weight: bfloat16 on a CPU with native bfloat16."""
    return (
        weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Projection(nn.Module):
    """``y = x W^T + b`` plus the low-rank terms of the adapters in use; replaces one or more ``nn.Linear``.

    ``names`` are the replaced modules' full names, in the order of their rows in the fused output.
    """

    def __init__(self, names: Sequence[str], linears: Sequence[nn.Linear], lora_mapping: LoRAMapping) -> None:
        super().__init__()
        self.names = tuple(names)
        self.key = names[0]
        self.in_features = linears[0].in_features
        self.out_sizes = tuple(linear.out_features for linear in linears)
        self._lora_mapping = lora_mapping
        weight = linears[0].weight if len(linears) == 1 else torch.cat([linear.weight for linear in linears])
        biases = [linear.bias for linear in linears]
        self._bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self._packed = can_pack(weight)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_ROWS) if self._packed else weight.detach()
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]; the leading dimensions, flattened, are the token rows of the step."""
        if self._packed:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = F.linear(x, self._weight, self._bias)
        for segment in self._lora_mapping.segments:
            pair = segment.layers.get(self.key)
            if pair is not None:
                self._add_low_rank(x, y, segment, pair)
        return y

    @staticmethod
    def _add_low_rank(x: Tensor, y: Tensor, segment: LoRASegment, pair: LoRAWeights) -> None:
        rows = slice(segment.start, segment.stop)
        hidden = F.linear(x.view(-1, x.shape[-1])[rows], pair.lora_a)
        y.view(-1, y.shape[-1])[rows].addmm_(hidden, pair.lora_b.t())


class SharedProjection:
    """Computes a fused projection once for the members that are called with the same input tensor."""

    def __init__(self, projection: Projection) -> None:
        self.projection = projection
        self._members = len(projection.out_sizes)
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._left = 0

    def output(self, x: Tensor) -> Tensor:
        """The fused output for ``x``; released once its last member has read it."""
        if self._input is not x or self._output is None:
            self._input, self._output, self._left = x, self.projection(x), self._members
        output = self._output
        assert output is not None
        self._left -= 1
        if self._left == 0:
            self._input = self._output = None
        return output


class ProjectionMember(nn.Module):
    """One of several sibling projections (query, key, value): a slice of the shared fused output."""

    def __init__(self, shared: SharedProjection, start: int, stop: int) -> None:
        super().__init__()
        self._shared = shared
        self._start = start
        self._stop = stop

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., this member's out]."""
        return self._shared.output(x)[..., self._start : self._stop]


# Every architecture with these names calls the siblings of a group with the same input.
FUSED_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def replace_linears(model: nn.Module, lora_mapping: LoRAMapping) -> dict[str, Projection]:
    """Replace every ``nn.Linear`` of ``model`` in place; returns replaced module name -> its projection.

    Subclasses of ``nn.Linear`` (quantised layers) are not replaced.
    """
    projections: dict[str, Projection] = {}
    for parent_name, parent in list(model.named_modules()):
        linears = {n: child for n, child in parent.named_children() if type(child) is nn.Linear}
        prefix = f"{parent_name}." if parent_name else ""
        for group in FUSED_SIBLINGS:
            if all(_fits(linears, n, group[0]) for n in group):
                projection = Projection([prefix + n for n in group], [linears.pop(n) for n in group], lora_mapping)
                shared, start = SharedProjection(projection), 0
                for name, size in zip(group, projection.out_sizes, strict=True):
                    setattr(parent, name, ProjectionMember(shared, start, start + size))
                    start += size
                projections |= dict.fromkeys(projection.names, projection)
        for name, linear in linears.items():
            projection = Projection([prefix + name], [linear], lora_mapping)
            setattr(parent, name, projection)
            projections[prefix + name] = projection
    return projections


def _fits(linears: dict[str, nn.Linear], name: str, first: str) -> bool:
    linear, reference = linears.get(name), linears.get(first)
    return (
        linear is not None
        and reference is not None
        and linear.in_features == reference.in_features
        and (linear.bias is None) == (reference.bias is None)
    )
