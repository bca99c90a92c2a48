"""One-file checkpoints: safetensors with the counters in the header, replaced atomically."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from openhands_rl_plugin.core.errors import StorageError, TrainingError, describe
from openhands_rl_plugin.core.files import PRIVATE, replacing

STATE_FILE = "trainer_state.safetensors"


def save_checkpoint(directory: Path, tensors: dict[str, Tensor], counters: dict[str, str]) -> None:
    """Write ``directory/STATE_FILE``; at any moment it is either the old or the new one. Raises ``StorageError``."""
    target = directory / STATE_FILE
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(target, PRIVATE) as draft:
            save_file(state, draft, counters)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"cannot write {target}: {describe(error)}; free some space or choose another path"
        ) from error


def load_checkpoint(directory: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and counters that ``save_checkpoint`` wrote. Raises ``TrainingError``."""
    source = directory / STATE_FILE
    try:
        with safe_open(source, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"cannot read the training state {source}: {describe(error)}") from error


def load_counters(directory: Path) -> dict[str, str]:
    """What ``load_checkpoint`` gives, without the tensors. Raises ``TrainingError``."""
    source = directory / STATE_FILE
    try:
        with safe_open(source, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"cannot read the training state {source}: {describe(error)}") from error
