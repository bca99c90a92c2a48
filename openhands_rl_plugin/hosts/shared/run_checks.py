"""What a run without a runner needs of its model server and its strategy, checked before the run begins."""

from __future__ import annotations

import os
from collections.abc import Mapping

from openhands_rl_plugin.config.build import make_strategy
from openhands_rl_plugin.config.rl import AUTO, RLSettings
from openhands_rl_plugin.core.errors import ConfigError
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.environments.workspace.sandbox import check_bubblewrap
from openhands_rl_plugin.hosts.shared.litellm_calls import (
    KEY_VARIABLES,
    OPENAI_COMPATIBLE,
    missing_keys,
    split_provider,
)
from openhands_rl_plugin.hosts.shared.standalone_run import adapter_in_use
from openhands_rl_plugin.models.engines.server_models import check_model_server
from openhands_rl_plugin.rollout.strategies.base import SearchStrategy

_WANTED_CONTEXT = 16_384
_START = (
    "start one with `openhands-rl serve --model DIR --served-model-name model`, and name it in config.toml: [llm] "
    'model = "openai/model", base_url = "http://127.0.0.1:8100/v1"'
)


def check_workspace_strategy(settings: RLSettings) -> None:
    """Raises ``ConfigError`` for a sandbox that cannot be made here, and a strategy that cannot search in it."""
    isolated = settings.workspace.isolation != "none"
    if isolated:
        check_bubblewrap()
    if isinstance(strategy := make_strategy(settings), SearchStrategy):
        strategy.check_world(EnvInfo(emits_rewards=False) if isolated else None)


class ModelServer:
    """The server that one agent asks.

    ``llm``: ``model``, ``base_url``, ``api_key`` and ``custom_llm_provider`` of ``[llm]``, by litellm's names.
    """

    def __init__(self, settings: RLSettings, llm: Mapping[str, object]) -> None:
        self._settings = settings
        self._full_name = str(llm["model"])
        provider, self._model = split_provider(self._full_name)
        self._provider = str(llm.get("custom_llm_provider") or provider)
        self._url = str(llm.get("base_url") or "").rstrip("/")
        self._key = str(llm.get("api_key") or "") or None
        served = settings.engine in (AUTO, "openai")
        self._asks = served and bool(self._url) and self._provider in OPENAI_COMPATIBLE
        if self._asks:
            self._key = self._key or os.environ.get(KEY_VARIABLES.get(self._provider, "OPENAI_API_KEY"))

    def check(self) -> None:
        """Raises ``ConfigError`` or ``InfrastructureError`` when no completion can be expected from the model."""
        if self._asks:
            check_model_server(self._url, self._model, self._key, named_by="[llm] base_url")
        elif not self._url and self._settings.engine in (AUTO, "openai"):
            self._check_vendor()

    def adapter_in_use(self) -> str | None:
        """The served name of the adapter version that ``[rl.serving]`` points to, if the server has it on this model.

        ``None``: sample from the model of ``[llm]``, because nothing was published there.
        """
        serving = self._settings.serving
        return adapter_in_use(serving, model=self._model, url=self._url, key=self._key) if self._asks else None

    def _check_vendor(self) -> None:
        """A hosted model needs its key; without ``[llm]`` OpenHands asks for one of a vendor that nobody named."""
        if self._key:
            return
        missing = missing_keys(self._full_name)
        if missing and not any(os.environ.get(name) for name in missing):
            keys = ", ".join(missing)
            raise ConfigError(f"[llm] names no server, and {self._full_name} needs a key ({keys}): {_START}")


def too_long(settings: RLSettings) -> str:
    """What is wrong with a first prompt that the model's context has no room for, and what to do."""
    return (
        f"OpenHands' first prompt and [rl] max_response_length = {settings.max_response_length:,} are longer than the "
        f"model's context; serve a model with a context of {_WANTED_CONTEXT:,} or more (vLLM: --max-model-len), or set "
        '[rl.workspace] prompt = "compact"'
    )
