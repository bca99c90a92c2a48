"""Trains a LoRA adapter, on the base model in its own dtype or quantised (QLoRA)."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.core.errors import ConfigError, TrainingError
from openhands_rl_plugin.core.files import file_sha256
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.peft_format import WEIGHTS_FILE
from openhands_rl_plugin.training.distributed.sharding import is_sharded
from openhands_rl_plugin.training.policies.adapter_shape import check_start
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.trainer.local_trainer import LocalTrainer


class LoraTrainer(LocalTrainer):
    """One adapter of one base model and its optimiser.

    ``adapter``: start from its weights instead of fresh ones. With ``method = "qlora"`` the base is quantised. Raises
    ``TrainingError`` when the model or the adapter cannot be used.
    """

    ENGINE = "local"
    """The value of ``[rl.training] engine`` that this trainer is."""

    def __init__(
        self,
        model_path: str | Path,
        settings: TrainingSettings,
        *,
        adapter: Adapter | None = None,
    ) -> None:
        if settings.engine != self.ENGINE:
            raise ConfigError(
                f'[rl.training] engine = "{settings.engine}": only `train` and `loop` train by it; set "{self.ENGINE}"'
            )
        if settings.nproc_per_node > 1:
            raise ConfigError(
                f"[rl.training] nproc_per_node = {settings.nproc_per_node}: only `train` of a policy and `loop` start "
                "processes; set 1"
            )
        if adapter is not None:
            _check_file(adapter)
            check_start(adapter, settings)
        self._adapter = self._open(model_path, settings)
        if adapter is not None:
            self._adapter.load(Path(adapter.path))
        if is_sharded(settings.sharding):
            self._adapter.shard()
        super().__init__(self._adapter, settings, version=adapter.version if adapter is not None else 0)

    def _open(self, model_path: str | Path, settings: TrainingSettings) -> TrainablePolicy:
        if settings.method != "qlora":
            return TrainablePolicy(model_path, settings)
        from openhands_rl_plugin.training.policies.quantised import QuantisedPolicy  # needs bitsandbytes

        return QuantisedPolicy(model_path, settings)

    @property
    def servers(self) -> tuple[str, ...]:
        """As far as the architecture and the adapter's layers say."""
        return self._adapter.servers

    def save_adapter(self, directory: Path) -> None:
        """Write the adapter in PEFT's format (adapter_config.json, adapter_model.safetensors)."""
        directory.mkdir(parents=True, exist_ok=True)
        self._adapter.save(directory)


def _check_file(adapter: Adapter) -> None:
    path = Path(adapter.path) / WEIGHTS_FILE
    try:
        digest = file_sha256(path)
    except OSError as error:
        raise TrainingError(f"adapter {adapter.name}: cannot read {path}: {error.strerror}") from error
    if digest != adapter.sha256:
        raise TrainingError(f"adapter {adapter.name}: {path} was changed since it was made (sha256 differs)")
