"""A ``weight_transfer`` of TRL's ``AsyncGRPOTrainer`` that publishes what is trained as versions of an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.core.concurrency import LoopThread
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.models.adapters.publisher import AdapterPublisher, publisher_for
from openhands_rl_plugin.models.adapters.store import AdapterStore


class TRLAdapterPublisher:
    """Each version of the adapter that TRL trains becomes one of ``[rl.serving] adapter``, loaded into all its servers.

    ``attach`` the trainer before its ``train``. A version that is being published is loaded beside those in use,
    so that nothing is paused. For one process, or several with a whole adapter each. Raises ``ConfigError``.
    """

    def __init__(self, serving: ServingSettings) -> None:
        self._serving = serving
        self._store = AdapterStore(serving.adapters_directory.resolve())
        self._trainer: Any = None
        self._thread: LoopThread | None = None
        self._publisher: AdapterPublisher | None = None
        self._served: list[str] = []

    def attach(self, trainer: Any) -> None:
        """The trainer whose adapter is published. Raises ``ConfigError`` for one without, or with one in parts."""
        if not hasattr(trainer.model, "peft_config"):
            raise ConfigError("what is published is an adapter: give the trainer a peft_config")
        self._trainer = trainer

    def served(self, version: int) -> str:
        """What the servers call TRL's version; 0 is the base model."""
        return self._served[version - 1] if version else self._serving.model

    def init_weight_transfer(self) -> None:
        """Ask the servers whether they are there. Raises ``PublishError``."""
        if self._trainer is None:
            raise ConfigError("which adapter is published? call attach(trainer) before trainer.train()")
        self._thread = LoopThread("trl-publisher")
        self._publisher = publisher_for(self._serving, self._store)
        self._thread.wait_for(self._publisher.require_servers())

    def pause(self) -> None:
        """Nothing has to wait."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publish the adapter as it is; the merged weights are not read. Raises ``PublishError``, ``StorageError``."""
        assert self._thread is not None and self._publisher is not None  # TRL begins with init_weight_transfer
        model = self._trainer.model
        if any(hasattr(each, "full_tensor") for each in model.parameters() if each.requires_grad):
            raise ConfigError("an adapter in parts (FSDP) is published by TRL itself: leave weight_transfer out")
        parent = self._store.current(self._serving.adapter)
        adapter = self._store.create(
            self._serving.adapter,
            lambda target: model.save_pretrained(target, save_embedding_layers=False),
            base_model=self._serving.model,
            parent=parent.name if parent is not None else None,
            step=self._trainer.state.global_step,
        )
        self._thread.wait_for(self._publisher.publish(adapter))
        self._served.append(self._thread.wait_for(self._publisher.served_model(adapter)))

    def resume(self) -> None:
        """Nothing has waited."""

    def destroy(self) -> None:
        """Close the connections; what is loaded stays. Idempotent."""
        if self._thread is not None and self._publisher is not None:
            self._thread.wait_for(self._publisher.aclose())
            self._thread.close()
        self._thread = self._publisher = None
