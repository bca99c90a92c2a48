"""Which adapter version a run without a runner samples from: the one that was published last."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import httpx
from pydantic import ValidationError

from openhands_rl_plugin.config.rl import ServingSettings
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.server_models import ListedModel, ListedModels, models_answer

# OpenHands' own logger, by its name: nothing here imports OpenHands.
log = logging.getLogger("openhands")

_SECONDS = 10.0


def adapter_in_use(serving: ServingSettings, listed: Sequence[ListedModel], *, model: str, url: str) -> str | None:
    """The served name of the version that ``[rl.serving]`` points to, if the server has it on this model.

    ``listed``: the models of the server at ``url``. ``None``: sample from ``model``, nothing was published there.
    """
    if not (serving.base_url and listed):
        return None
    current = AdapterStore(serving.adapters_directory).current(serving.adapter)
    if current is None:
        return None
    for each in listed:
        if each.id in (current.name, f"{model}:{current.name}") and each.parent in (None, model):
            return each.id
    log.warning(
        "%s is not loaded on %s at %s, so that model itself is sampled; load it with: openhands-rl adapters publish "
        "--adapters %s --adapter %s --version %s --base-url %s",
        *(current.name, model, url, serving.adapters_directory, serving.adapter, current.version, url),
    )
    return None


def listed_models(url: str, key: str | None) -> Sequence[ListedModel]:
    """What the server lists; empty where it does not or is away, which the first completion will say. Blocks."""
    try:
        answer = models_answer(url, key, _SECONDS)
        return ListedModels.model_validate_json(answer.content).data if answer.is_success else ()
    except (httpx.TransportError, ValidationError):
        return ()
