"""The base model's weights on this machine, which training needs: given, or where its server says they are."""

from __future__ import annotations

from pathlib import Path

from openhands_rl_plugin.config.rl import RLSettings
from openhands_rl_plugin.core.errors import ConfigError


def at_server(settings: RLSettings, given: Path | None) -> tuple[RLSettings, Path]:
    """The settings with the name of the server's base model, and its weights: ``given``, or as the server says.

    Raises ``ConfigError``, and ``InfrastructureError`` when the server does not answer.
    """
    from openhands_rl_plugin.models.engines.server_models import served_base

    serving = settings.serving
    base = served_base(serving.base_url, serving.model, serving.api_key(), serving.request_timeout)
    model = given_weights(given) if given is not None else base.weights
    if model is None:
        raise ConfigError(
            f"the weights of {base.name!r} are not on this machine (its server names no local directory as root): give "
            "the model's directory with --model"
        )
    return settings.model_copy(update={"serving": serving.model_copy(update={"model": base.name})}), model


def given_weights(model: Path | None) -> Path:
    """The model's directory. Raises ``ConfigError`` where none is given, or that is none."""
    from openhands_rl_plugin.apps.demo_model import named_model
    from openhands_rl_plugin.models.engines.server_models import local_weights

    if model is None:
        raise ConfigError("no model is given: give its folder with --model, or its server as base_url in [rl.serving]")
    if (weights := local_weights(named_model(model))) is None:
        raise ConfigError(f"--model {model}: this is not the folder of a model (it has no config.json)")
    return weights
