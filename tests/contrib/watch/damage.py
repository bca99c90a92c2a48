"""Damage to the files of an adapter version after it was trained: functions of the version's directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from openhands_rl_plugin.models.adapters.store import MANIFEST, WEIGHTS_FILE, weights_sha256

type Tensors = dict[str, Tensor]
type Damage = Callable[[Path], None]


def signed(version: Path) -> None:
    """The manifest names the weights as they are now, as if they had been written so."""
    manifest = json.loads((version / MANIFEST).read_text())
    (version / MANIFEST).write_text(json.dumps({**manifest, "sha256": weights_sha256(version)}))


def weights(change: Callable[[Tensors], Tensors]) -> Damage:
    """Other tensors under a valid checksum."""

    def damage(version: Path) -> None:
        changed = change(load_file(version / WEIGHTS_FILE))
        save_file({name: each.contiguous() for name, each in changed.items()}, version / WEIGHTS_FILE)
        signed(version)

    return damage


def each(of: Callable[[str, Tensor], Tensor]) -> Damage:
    """The same done to every tensor."""
    return weights(lambda tensors: {name: of(name, tensor) for name, tensor in tensors.items()})


def config(**values: object) -> Damage:
    """Other values in ``adapter_config.json``."""

    def damage(version: Path) -> None:
        file = version / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return damage


def cut(version: Path) -> None:
    """Half of the file."""
    file = version / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def cut_and_signed(version: Path) -> None:
    """Half of the file, under a checksum of that half."""
    cut(version)
    signed(version)


def flipped(version: Path) -> None:
    """One bit."""
    content = bytearray((version / WEIGHTS_FILE).read_bytes())
    content[-100] ^= 0x40
    (version / WEIGHTS_FILE).write_bytes(content)


def _swapped(tensors: Tensors) -> Tensors:
    other = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    names = {name: next((name.replace(a, b) for a, b in other.items() if a in name), name) for name in tensors}
    return {names[name]: tensor for name, tensor in tensors.items()}


DAMAGE: dict[str, Damage] = {
    "a bit is flipped": flipped,
    "the file is gone": lambda version: (version / WEIGHTS_FILE).unlink(),
    "cut short before it was signed": cut_and_signed,
    "not a number": each(lambda name, tensor: torch.full_like(tensor, float("nan"))),
    "the other way round": each(lambda name, tensor: -tensor if "lora_B" in name else tensor),
    "a hundred times as large": each(lambda name, tensor: 100 * tensor if "lora_B" in name else tensor),
    "two layers exchanged": weights(_swapped),
    "of a wider base model": each(lambda name, tensor: torch.cat([tensor, tensor], dim=1 if "lora_A" in name else 0)),
    "of another base model's layers": weights(
        lambda tensors: {name.replace("layers.0", "layers.70"): tensor for name, tensor in tensors.items()}
    ),
    "a rank that is not its own": config(r=64),
    "no adapter_config.json": lambda version: (version / "adapter_config.json").unlink(),
}
"""What the checksum, the server's loading, or its logprobs tell: whatever is not what was trained."""
