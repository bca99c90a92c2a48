"""Load a PEFT LoRA adapter, check it against the served model, and convert it for the fused layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from openhands_rl_plugin.core.errors import CaughtFailure, boundary
from openhands_rl_plugin.core.files import is_file
from openhands_rl_plugin.core.types import FailureKind
from openhands_rl_plugin.models.adapters.peft_format import CONFIG_FILE, UNSUPPORTED_OPTIONS, WEIGHTS_FILE
from openhands_rl_plugin.models.generator.errors import NotFound, ServingError
from openhands_rl_plugin.models.generator.linear import LoRAWeights, Projection

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
