"""The auxiliary loss of a mixture's routers: experts that all tokens are sent to make it larger."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from openhands_rl_plugin.core.errors import TrainingError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class RouterLoss:
    """Load balancing loss (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6), computed by transformers.

    1 where tokens are spread evenly, times the experts a token. Raises ``TrainingError`` for a model whose
    configuration has no such loss.
    """

    def __init__(self, model: PreTrainedModel, decoder: nn.Module, coefficient: float) -> None:
        config = model.config.get_text_config()
        found = [getattr(config, name) for name in _EXPERTS if getattr(config, name, None)]
        recorded: dict[str, Any] = getattr(decoder, "_can_record_outputs", None) or {}
        if not found or not hasattr(config, "router_aux_loss_coef") or "router_logits" not in recorded:
            raise TrainingError(
                f"{config.model_type} has no auxiliary loss of routers: set [rl.training] router_aux_loss_coef = 0"
            )
        self._coefficient, self._experts, self._chosen = coefficient, found[0], config.num_experts_per_tok
        self._values: list[Tensor] = []

    def add(self, router_logits: tuple[Tensor, ...]) -> None:
        """Note the logits of one forward pass: for each layer [N, experts]."""
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        value = load_balancing_loss_func(router_logits, self._experts, self._chosen)  # pyright: ignore[reportArgumentType]
        assert isinstance(value, Tensor)
        self._values.append(value)

    def take(self) -> Tensor | float:
        """Coefficient times the mean over the passes since the last call, with gradient."""
        values, self._values = self._values, []
        return self._coefficient * sum(values) / len(values) if values else 0.0
