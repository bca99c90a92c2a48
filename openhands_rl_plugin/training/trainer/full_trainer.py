"""Full-parameter training: a model directory comes out, not an adapter."""

from __future__ import annotations

import os
from pathlib import Path

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import StorageError, TrainingError, describe
from openhands_rl_plugin.core.files import draft_folder, file_sha256, sync
from openhands_rl_plugin.core.types import Adapter, Frozen
from openhands_rl_plugin.models.adapters.store import weights_sha256
from openhands_rl_plugin.training.distributed.sharding import is_sharded
from openhands_rl_plugin.training.policies.adapter_shape import check_start
from openhands_rl_plugin.training.policies.full_policy import FullPolicy
from openhands_rl_plugin.training.policies.full_sharded import ShardedFullPolicy
from openhands_rl_plugin.training.trainer.local_trainer import LocalTrainer

MANIFEST = "trained.json"


class TrainedModel(Frozen):
    """The manifest of a trained model directory; ``sha256``: the digest of every weights file, by name."""

    path: str
    base_model: str
    step: int
    sha256: dict[str, str]
    metrics: dict[str, float]


class FullTrainer(LocalTrainer):
    """All weights of a model and their optimiser. Raises ``TrainingError`` when the model cannot be trained.

    There is no copy of the model that training began with, so that a KL term is refused; the logprobs that ratios and
    DPO are relative to are computed before the first step. ``adapter``: a version that is a whole model, whose weights
    are trained further instead of those in ``model_path``.
    """

    def __init__(self, model_path: str | Path, settings: TrainingSettings, *, adapter: Adapter | None = None) -> None:
        if adapter is not None:
            _check_weights(adapter)
            check_start(adapter, settings)
            model_path = adapter.path
        kind = ShardedFullPolicy if is_sharded(settings.sharding) else FullPolicy
        policy = kind(model_path, settings)
        super().__init__(policy, settings, version=adapter.version if adapter is not None else 0)
        self._model = policy
        self._optimizer.register_step_post_hook(lambda *_: policy.round())

    def hand_over(self) -> None:
        """Send this rank's shard of the weights to rank 0; called by all others while rank 0 calls ``save_model``."""
        if self._model.sharded:
            for _ in self._model.stored():
                pass

    def save_model(self, directory: Path, *, base_model: str, metrics: dict[str, float] | None = None) -> TrainedModel:
        """Write a model directory that any server can load, atomically; an existing one is refused.

        Raises ``StorageError``.
        """
        target = directory.expanduser()
        if target.exists():
            raise StorageError(f"{target} is there already: a model is never overwritten; choose another directory")
        try:
            with draft_folder(target.parent, ".new-") as fresh:
                self._model.save(fresh)
                made = TrainedModel(
                    path=str(target),
                    base_model=base_model,
                    step=self.step,
                    sha256={file.name: file_sha256(file) for file in sorted(fresh.glob("*.safetensors"))},
                    metrics=metrics or {},
                )
                (fresh / MANIFEST).write_text(made.model_dump_json(indent=1), encoding="utf-8")
                for path in (*fresh.iterdir(), fresh):
                    sync(path)
                os.rename(fresh, target)
        except OSError as error:
            raise StorageError(f"the model cannot be written to {target}: {describe(error)}") from error
        return made

    def save_adapter(self, directory: Path) -> None:
        """Write the whole model into ``directory``, in the layout of Hugging Face, as a version of its own."""
        directory.mkdir(parents=True, exist_ok=True)
        self._model.save(directory)


def _check_weights(adapter: Adapter) -> None:
    path = Path(adapter.path)
    try:
        digest = weights_sha256(path)
    except OSError as error:
        raise TrainingError(f"{adapter.name}: cannot read the weights in {path}: {error.strerror}") from error
    if digest != adapter.sha256:
        raise TrainingError(f"{adapter.name}: the weights in {path} were changed since they were made (sha256 differs)")
