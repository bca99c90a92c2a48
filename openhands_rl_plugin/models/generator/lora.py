"""Load a PEFT LoRA adapter, check it against the served model, and convert it for the fused layers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from openhands_rl_plugin.core.errors import CaughtFailure, boundary
from openhands_rl_plugin.core.files import is_file
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.models.adapters.store import CONFIG_FILE, UNSUPPORTED_OPTIONS, WEIGHTS_FILE
from openhands_rl_plugin.models.generator.errors import NotFound, ServingError

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


_PREFIX = "base_model.model."


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """One loaded adapter version. Immutable: requests in flight keep the version they started with.

    ``layers``: fused layer name -> its low-rank pair. Compared and hashed by identity.
    """

    name: str
    path: str
    layers: dict[str, LoRAWeights] = field(repr=False)


def read_adapter(
    name: str,
    path: Path,
    *,
    base_model: str,
    projections: Mapping[str, Projection],
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedAdapter:
    """Load the adapter in ``path`` for a model whose linear layers are ``projections`` (by module name).

    ``base_model`` is the served model's path or name, compared with the one the adapter was trained on. Raises
    ``NotFound`` when there is no adapter, ``ServingError`` when it does not fit the model; messages have one line.
    """
    try:
        # peft takes fields of any type, and fails where it uses them.
        with boundary(FailureKind.MODEL, "adapter"):
            config = _read_config(name, path)
            _check_config(name, config, base_model)
            pairs = _read_pairs(name, path, projections)
            layers: dict[str, LoRAWeights] = {}
            for projection in {id(p): p for p in projections.values()}.values():
                members = {n: pairs[n] for n in projection.names if n in pairs}
                if members:
                    scalings = {n: _scaling(config, n) for n in members}
                    layers[projection.key] = _fuse(projection, members, scalings, dtype, device)
    except CaughtFailure as caught:
        raise _load_error(name, f"it cannot be used: {caught.failure.message}") from caught
    return LoadedAdapter(name, str(path), layers)


def _read_config(name: str, path: Path) -> LoraConfig:
    if not is_file(path / CONFIG_FILE):
        raise NotFound(f"Loading lora {name} failed: No adapter found for {str(path)[:200]}", param="lora_path")
    if not is_file(path / WEIGHTS_FILE):
        raise _load_error(name, f"{path} has no {WEIGHTS_FILE} (pickled weights are not loaded)")
    try:
        raw = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
            raise _load_error(name, f"{CONFIG_FILE} is not that of a LoRA adapter")
        config = LoraConfig.from_pretrained(str(path))
    except (ValueError, TypeError) as error:
        raise _load_error(name, f"{CONFIG_FILE} cannot be read: {str(error).splitlines()[0]}") from error
    assert isinstance(config, LoraConfig)
    return config


def _check_config(name: str, config: LoraConfig, base_model: str) -> None:
    trained_on = config.base_model_name_or_path
    if trained_on and not same_model(trained_on, base_model):
        raise _load_error(name, f"it was trained on {trained_on}, but this server serves {base_model}")
    for option in UNSUPPORTED_OPTIONS:
        if getattr(config, option, None):
            raise _load_error(name, f"{option} is not supported")
    if config.bias != "none":
        raise _load_error(name, f"bias={config.bias!r} is not supported")


def same_model(trained_on: str, served: str) -> bool:
    """Whether two names or paths may mean one model: equal, the same directory, or an equal last component.

    Shapes are always checked later; this detects a different model with the same shapes.
    """
    if trained_on == served:
        return True
    first, second = Path(trained_on), Path(served)
    if first.exists() and second.exists():
        return first.resolve() == second.resolve()
    return first.name == second.name


def _read_pairs(name: str, path: Path, projections: Mapping[str, Projection]) -> dict[str, tuple[Tensor, Tensor]]:
    try:
        weights = load_file(path / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise _load_error(name, f"{WEIGHTS_FILE} cannot be read: {error}") from error
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in weights.items():
        module, _, half = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if half not in ("lora_A", "lora_B") or tensor.dim() != 2:
            raise _load_error(name, f"unexpected weight {key}")
        if module not in projections:
            raise _load_error(name, f"the model has no linear layer {module}")
        halves.setdefault(module, {})[half] = tensor
    if not halves:
        raise _load_error(name, f"{WEIGHTS_FILE} has no weights")
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for module, both in halves.items():
        if len(both) != 2:
            raise _load_error(name, f"{module} must have both lora_A and lora_B")
        pairs[module] = _check_shapes(name, module, both["lora_A"], both["lora_B"], projections[module])
    return pairs


def _check_shapes(name: str, module: str, a: Tensor, b: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
    out = projection.out_sizes[projection.names.index(module)]
    if a.shape[1] != projection.in_features or b.shape[0] != out or a.shape[0] != b.shape[1]:
        raise _load_error(
            name,
            f"{module} is {projection.in_features} -> {out} in the model, "
            f"but {a.shape[1]} -> {a.shape[0]}, {b.shape[1]} -> {b.shape[0]} in the adapter",
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise _load_error(name, f"{module} has weights that are not finite")
    return a, b


def _scaling(config: LoraConfig, module: str) -> float:
    rank_pattern, alpha_pattern = config.rank_pattern or {}, config.alpha_pattern or {}
    rank = rank_pattern.get(get_pattern_key(list(rank_pattern), module), config.r)
    alpha = alpha_pattern.get(get_pattern_key(list(alpha_pattern), module), config.lora_alpha)
    return alpha / rank**0.5 if config.use_rslora else alpha / rank


def _fuse(
    projection: Projection,
    members: Mapping[str, tuple[Tensor, Tensor]],
    scalings: Mapping[str, float],
    dtype: torch.dtype,
    device: torch.device,
) -> LoRAWeights:
    rank = sum(a.shape[0] for a, _ in members.values())
    down = torch.cat([members[n][0].float() for n in projection.names if n in members])
    up = torch.zeros(sum(projection.out_sizes), rank)
    row = column = 0
    for member, size in zip(projection.names, projection.out_sizes, strict=True):
        if member in members:
            b = members[member][1].float() * scalings[member]
            up[row : row + size, column : column + b.shape[1]] = b
            column += b.shape[1]
        row += size
    fused = LoRAWeights(down.to(device, dtype), up.to(device, dtype))
    if not (fused.lora_a.isfinite().all() and fused.lora_b.isfinite().all()):
        raise ValueError(f"{projection.key} has weights that {dtype} cannot hold")
    return fused


def _load_error(name: str, cause: str) -> ServingError:
    return ServingError(f"Loading lora {name} failed: {cause}", param="lora_path")
