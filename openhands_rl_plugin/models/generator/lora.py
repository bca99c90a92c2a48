"""The linear layers of a served model, and the LoRA adapters that are added to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, boundary
from openhands_rl_plugin.core.files import is_file
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.models.adapters.adapter_config import CONFIG_FILE, AdapterConfig, read_adapter_config
from openhands_rl_plugin.models.adapters.store import WEIGHTS_FILE
from openhands_rl_plugin.models.generator.errors import NotFound, ServingError

# The batch size that oneDNN optimises the packed layout for: a typical decoding batch. Other sizes work, too.
PACK_ROWS = 16


@dataclass(frozen=True)
class LoRAWeights:
    """The weights of one adapter in one layer.

    ``lora_a``: [rank, in]; ``lora_b``: [out, rank], already multiplied by the adapter's scaling.
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
    """``y = x W^T + b`` plus the low-rank terms of the adapters in use; replaces the ``nn.Linear`` of that ``name``."""

    def __init__(self, name: str, linear: nn.Linear, lora_mapping: LoRAMapping) -> None:
        super().__init__()
        self.name = name
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._lora_mapping = lora_mapping
        weight = linear.weight.detach()
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._packed = can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if self._packed else weight

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in] -> [..., out]; the leading dimensions, flattened, are the token rows of the step."""
        if self._packed:
            y = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            y = F.linear(x, self._weight, self._bias)
        for segment in self._lora_mapping.segments:
            pair = segment.layers.get(self.name)
            if pair is not None:
                self._add_low_rank(x, y, segment, pair)
        return y

    @staticmethod
    def _add_low_rank(x: Tensor, y: Tensor, segment: LoRASegment, pair: LoRAWeights) -> None:
        rows = slice(segment.start, segment.stop)
        hidden = F.linear(x.view(-1, x.shape[-1])[rows], pair.lora_a)
        y.view(-1, y.shape[-1])[rows].addmm_(hidden, pair.lora_b.t())


def replace_linears(model: nn.Module, lora_mapping: LoRAMapping) -> dict[str, Projection]:
    """Replace every ``nn.Linear`` of ``model`` in place; returns replaced module name -> its projection.

    Subclasses of ``nn.Linear`` (quantised layers) are not replaced.
    """
    projections: dict[str, Projection] = {}
    for parent_name, parent in list(model.named_modules()):
        prefix = f"{parent_name}." if parent_name else ""
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear:
                projections[prefix + name] = projection = Projection(prefix + name, linear, lora_mapping)
                setattr(parent, name, projection)
    return projections


_PREFIX = "base_model.model."


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """One loaded adapter version. Immutable: requests in flight keep the version they started with.

    ``layers``: layer name -> its low-rank pair. Compared and hashed by identity.
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
        with boundary(FailureKind.MODEL, "adapter"):
            config = _read_config(name, path, base_model)
            pairs = _read_pairs(name, path, projections, config)
            layers = {at: _scaled(at, *pair, config.scaling(at), dtype, device) for at, pair in pairs.items()}
    except CaughtFailure as caught:
        raise _load_error(name, f"it cannot be used: {caught.failure.message}") from caught
    return LoadedAdapter(name, str(path.absolute()), layers)


def _read_config(name: str, path: Path, base_model: str) -> AdapterConfig:
    if not is_file(path / CONFIG_FILE):
        raise NotFound(f"Loading lora {name} failed: No adapter found for {str(path)[:200]}", param="lora_path")
    if not is_file(path / WEIGHTS_FILE):
        raise _load_error(name, f"{path} has no {WEIGHTS_FILE} (pickled weights are not loaded)")
    try:
        config = read_adapter_config(path)
    except ConfigError as error:
        raise _load_error(name, str(error)) from error
    if refusal := config.refusal():
        raise _load_error(name, refusal)
    trained_on = config.base_model_name_or_path
    if trained_on and not same_model(trained_on, base_model):
        raise _load_error(name, f"it was trained on {trained_on}, but this server serves {base_model}")
    return config


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


def _read_pairs(
    name: str, path: Path, projections: Mapping[str, Projection], config: AdapterConfig
) -> dict[str, tuple[Tensor, Tensor]]:
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
        if not config.adapts(module):
            raise _load_error(name, f"{module} has weights, but is none of its target_modules")
        pairs[module] = _check_shapes(name, module, both["lora_A"], both["lora_B"], projections[module])
        if (rank := config.rank(module)) != len(both["lora_A"]):
            raise _load_error(name, f"{module} has the rank {len(both['lora_A'])}, but {rank} in its {CONFIG_FILE}")
    return pairs


def _check_shapes(name: str, module: str, a: Tensor, b: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
    out = projection.out_features
    if a.shape[1] != projection.in_features or b.shape[0] != out or a.shape[0] != b.shape[1]:
        raise _load_error(
            name,
            f"{module} is {projection.in_features} -> {out} in the model, "
            f"but {a.shape[1]} -> {a.shape[0]}, {b.shape[1]} -> {b.shape[0]} in the adapter",
        )
    if not (a.isfinite().all() and b.isfinite().all()):
        raise _load_error(name, f"{module} has weights that are not finite")
    return a, b


def _scaled(module: str, a: Tensor, b: Tensor, scaling: float, dtype: torch.dtype, device: torch.device) -> LoRAWeights:
    made = LoRAWeights(a.float().to(device, dtype), (b.float() * scaling).to(device, dtype))
    if not (made.lora_a.isfinite().all() and made.lora_b.isfinite().all()):
        raise ValueError(f"{module} has weights that {dtype} cannot hold")
    return made


def _load_error(name: str, cause: str) -> ServingError:
    return ServingError(f"Loading lora {name} failed: {cause}", param="lora_path")
