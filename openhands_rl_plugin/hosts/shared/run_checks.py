"""What a run without a runner needs of its model server and its strategy, checked before the run begins."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from openhands_rl_plugin.config.build import make_strategy
from openhands_rl_plugin.config.rl import AUTO, RLSettings, ServingSettings
from openhands_rl_plugin.core.errors import ConfigError, InfrastructureError
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.environments.workspace.sandbox import check_bubblewrap
from openhands_rl_plugin.hosts.shared.litellm_calls import OPENAI_COMPATIBLE, key_of, missing_keys, named_in
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.server_models import ListedModel, check_model_server, listed_models
from openhands_rl_plugin.rollout.strategies.base import SearchStrategy

_SECONDS = 10.0
_WANTED_CONTEXT = 16_384
_START = (
    "start one with `openhands-rl serve --model DIR --served-model-name model`, and name it in config.toml: [llm] "
    'model = "openai/model", base_url = "http://127.0.0.1:8100/v1"'
)

# OpenHands' own logger, by its name: nothing here imports OpenHands.
log = logging.getLogger("openhands")


def check_workspace_strategy(settings: RLSettings) -> None:
    """Raises ``ConfigError`` for a sandbox that cannot be made here, and a strategy that cannot search in it."""
    isolated = settings.workspace.isolation != "none"
    if isolated:
        check_bubblewrap()
    if isinstance(strategy := make_strategy(settings), SearchStrategy):
        strategy.check_world(EnvInfo(emits_rewards=False) if isolated else None)


def check_model(settings: RLSettings, llm: Mapping[str, object]) -> tuple[str, str, str | None] | None:
    """The model of ``[llm]`` by its server's name, the URL of that server, which answers, and its key; ``None`` where
    another one is asked.

    ``llm``: ``model``, ``base_url``, ``api_key`` and ``custom_llm_provider`` of ``[llm]``, by litellm's names. Raises
    ``ConfigError`` or ``InfrastructureError`` when no completion can be expected from the model.
    """
    if settings.engine not in (AUTO, "openai"):
        return None
    provider, model = named_in(llm)
    url, key = str(llm.get("base_url") or "").rstrip("/"), str(llm.get("api_key") or "") or None
    if url and provider in OPENAI_COMPATIBLE:
        key = key or key_of(provider)
        check_model_server(url, model, key, named_by="[llm] base_url")
        return model, url, key
    # Without [llm] OpenHands asks for a model of a vendor that nobody named.
    if not url and not key and (missing := missing_keys(str(llm["model"]))):
        raise ConfigError(f"[llm] names no server, and {llm['model']} needs a key ({', '.join(missing)}): {_START}")
    return None


def adapter_in_use(serving: ServingSettings, model: str, url: str, key: str | None) -> str | None:
    """The served name of the version that ``[rl.serving]`` points to, if the server has it on this model. Blocks.

    ``url``: where ``[rl.serving]`` names no server, that of the LLM. ``None``: sample from ``model``, because nothing
    was published there, or the server lists nothing: whether it is away the first completion will say.
    """
    current = AdapterStore(serving.adapters_directory).current(serving.adapter)
    if current is None or (not serving.base_url and current.base_model != model):
        return None
    listed: Sequence[ListedModel] = ()
    with suppress(ConfigError, InfrastructureError):
        listed = listed_models(url, key, _SECONDS) or ()
    for each in listed:
        if each.id in (current.name, f"{model}:{current.name}") and each.parent in (None, model):
            return each.id
    if listed:
        log.warning(
            "%s is not loaded on %s at %s, so that model itself is sampled; load it with: openhands-rl adapters "
            "publish --adapters %s --adapter %s --version %s --base-url %s",
            *(current.name, model, url, serving.adapters_directory, serving.adapter, current.version, url),
        )
    return None


def too_long(settings: RLSettings) -> str:
    """What is wrong with a first prompt that the model's context has no room for, and what to do."""
    return (
        f"OpenHands' first prompt and [rl] max_response_length = {settings.max_response_length:,} are longer than the "
        f"model's context; serve a model with a context of {_WANTED_CONTEXT:,} or more (vLLM: --max-model-len), or set "
        '[rl.workspace] prompt = "compact"'
    )
