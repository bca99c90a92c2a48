"""The trainers whose weights are on this machine: of an adapter, and of a whole model."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.config.rl import TrainingSettings
from openhands_rl_plugin.config.training import LOCAL
from openhands_rl_plugin.core.errors import ConfigError, TrainingError, describe
from openhands_rl_plugin.core.types import Adapter
from openhands_rl_plugin.models.adapters.store import weights_sha256
from openhands_rl_plugin.training.distributed.ranks import is_sharded
from openhands_rl_plugin.training.policies.adapter_shape import check_start
from openhands_rl_plugin.training.policies.full_policy import FullPolicy
from openhands_rl_plugin.training.policies.lora_policy import TrainablePolicy
from openhands_rl_plugin.training.trainer.trainer import Trainer


class LoraTrainer(Trainer):
    """One adapter of one base model and its optimiser.

    ``adapter``: start from its weights instead of fresh ones. With ``method = "qlora"`` the base is quantised. Raises
    ``TrainingError`` when the model or the adapter cannot be used.
    """

    def __init__(
        self,
        model_path: str | Path,
        settings: TrainingSettings,
        *,
        adapter: Adapter | None = None,
    ) -> None:
        if settings.engine != LOCAL:
            raise ConfigError(
                f'[rl.training] engine = "{settings.engine}": only `train` and `loop` train by it; set "{LOCAL}"'
            )
        _check_weights(adapter)
        check_start(adapter, settings)
        policy = TrainablePolicy(model_path, settings)
        if adapter is not None:
            policy.load(Path(adapter.path))
        if is_sharded(settings.sharding):
            policy.shard()
        super().__init__(policy, settings, version=adapter.version if adapter is not None else 0)
        self.servers = policy.servers
        """Which servers can load the adapter, as far as the architecture and the adapter's layers say."""


def _check_weights(adapter: Adapter | None) -> None:
    if adapter is None:
        return
    try:
        digest = weights_sha256(Path(adapter.path))
    except OSError as error:
        raise TrainingError(f"{adapter.name}: cannot read {describe(error)}") from error
    if digest != adapter.sha256:
        raise TrainingError(f"{adapter.name}: what is in {adapter.path} was changed since it was made (sha256 differs)")


class FullTrainer(Trainer):
    """All weights of a model and their optimiser. Raises ``TrainingError`` when the model cannot be trained.

    There is no copy of the model that training began with, so that a KL term is refused; the logprobs that ratios and
    DPO are relative to are computed before the first step. ``adapter``: a version that is a whole model, whose weights
    are trained further instead of those in ``model_path``.
    """

    def __init__(self, model_path: str | Path, settings: TrainingSettings, *, adapter: Adapter | None = None) -> None:
        _check_weights(adapter)
        check_start(adapter, settings)
        self._model = FullPolicy(model_path if adapter is None else adapter.path, settings)
        super().__init__(self._model, settings, version=adapter.version if adapter is not None else 0)
        self._optimizer.register_step_post_hook(lambda *_: self._model.round())

    def hand_over(self) -> None:
        """Send this rank's shard of the weights to rank 0; called by all others while it calls ``save_adapter``."""
        for _ in self._model.whole() if self._model.sharded else ():
            pass
