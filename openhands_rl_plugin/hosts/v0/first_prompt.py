"""What an OpenHands run without a runner needs of its model server, checked before the run begins.

OpenHands itself would find out turn by turn: a prompt that is longer than the context is condensed until the limit of
iterations, which is all that it reports then.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from typing import NoReturn

import httpx
import litellm
from openhands.core.config import LLMConfig
from openhands.core.logger import openhands_logger
from openhands.runtime import get_runtime_cls
from pydantic import ValidationError

from openhands_rl_plugin.config.rl import RewardSettings, RLSettings
from openhands_rl_plugin.core.errors import ConfigError, RLError
from openhands_rl_plugin.core.messages import WireMessage, one_line
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.shared.litellm_calls import OPENAI_COMPATIBLE, split_provider
from openhands_rl_plugin.hosts.shared.options import check_engine_setting
from openhands_rl_plugin.hosts.shared.sessions import workspace_command
from openhands_rl_plugin.hosts.shared.standalone_run import adapter_in_use
from openhands_rl_plugin.hosts.v0.settings import under_headless_main
from openhands_rl_plugin.models.engines.server_models import (
    ListedModel,
    ListedModels,
    away,
    models_answer,
    prompt_tokens,
    uses_proxy,
)

_OWN_RUNTIME = "openhands_rl_plugin.hosts.v0.runtime.WorkspaceRuntime"

_SECONDS = 10.0
_LONG_ENOUGH = 65_536
_WANTED_CONTEXT = 16_384
_NAMED = 5
# Where litellm takes the key from when [llm] has none; a custom_openai is an openai to it.
_KEY_VARIABLES = {"hosted_vllm": "HOSTED_VLLM_API_KEY", "litellm_proxy": "LITELLM_PROXY_API_KEY"}
_START = (
    "start one with `openhands-rl serve --model DIR --served-model-name model`, and name it in config.toml: [llm] "
    'model = "openai/model", base_url = "http://127.0.0.1:8100/v1"'
)


def refuse(error: RLError) -> NoReturn:
    """End ``openhands.core.main``, which would print a traceback, with one line; other hosts get the error itself."""
    if under_headless_main():
        raise SystemExit("\n".join(f"error: {line}" for line in str(error).splitlines())) from error
    raise error


class FirstPrompt:
    """The checks of one agent: ``messages`` and ``tools`` are what OpenHands sends to begin with."""

    def __init__(self, llm: LLMConfig, settings: RLSettings) -> None:
        self._settings = settings
        self._provider, self._model = split_provider(llm.model)
        self._provider = llm.custom_llm_provider or self._provider
        self._full_name = llm.model
        self._url = (llm.base_url or "").rstrip("/")
        self._key = llm.api_key.get_secret_value() if llm.api_key else None
        if self._url and self._provider in OPENAI_COMPATIBLE:
            self._key = self._key or os.environ.get(_KEY_VARIABLES.get(self._provider, "OPENAI_API_KEY"))
        self._listed: Sequence[ListedModel] = ()

    def check_server(self) -> None:
        """Raises ``ConfigError`` or ``InfrastructureError`` when no completion can be expected from the model."""
        check_engine_setting(self._settings)
        if not self._url:
            self._check_vendor()
            return
        if self._provider not in OPENAI_COMPATIBLE:
            return
        self._listed = self._models()
        names = [listed.id for listed in self._listed]
        if names and self._model not in names:
            some = one_line(", ".join(names[:_NAMED]), 300)
            openhands_logger.warning(
                f'{self._url} lists no model {self._model!r}; set [llm] model to "openai/" and one of: {some}'
            )

    def _models(self) -> Sequence[ListedModel]:
        """What the server lists; empty where it does not, because completions need no list."""
        try:
            answer = models_answer(self._url, self._key, _SECONDS)
        except httpx.TransportError as error:
            if isinstance(error, httpx.ConnectError) and not (_of_tls(error) or uses_proxy(self._url)):
                raise away(self._url, error) from error
            return self._not_listed(type(error).__name__)
        if answer.status_code == 401 and self._key:
            raise ConfigError(f"{self._url} refuses the API key: set [llm] api_key")
        if not answer.is_success:
            return self._not_listed(f"status {answer.status_code}")
        try:
            return ListedModels.model_validate_json(answer.content).data
        except ValidationError:
            return self._not_listed("no list of models")

    def _not_listed(self, cause: str) -> Sequence[ListedModel]:
        openhands_logger.warning(
            f"{self._url}/models cannot be read ({cause}), so name and context of the model are not checked"
        )
        return ()

    def check_length(self, messages: Sequence[WireMessage], tools: Sequence[JsonObject]) -> None:
        """Raises ``ConfigError`` when prompt and answer are longer than the context, as far as the server says."""
        longest = self._context()
        if longest is None or longest >= _LONG_ENOUGH:
            return
        prompt = {"model": self._model, "messages": messages, **({"tools": tools} if tools else {})}
        count = prompt_tokens(self._url, self._key, _SECONDS, prompt)
        if count is not None and count + self._settings.max_response_length > longest:
            raise too_long(f"{count:,} tokens", self._settings.max_response_length, f"{longest:,}")

    def adapter_in_use(self) -> str | None:
        """The served name of the adapter version that ``[rl.serving]`` points to, if the server has it on this model.

        ``None``: sample from the model of ``[llm]``, because nothing was published there.
        """
        return adapter_in_use(self._settings.serving, self._listed, model=self._model, url=self._url)

    def _context(self) -> int | None:
        """Tokens; of an adapter those of its base model."""
        own = [listed for listed in self._listed if listed.id == self._model]
        named = {self._model, *(listed.parent for listed in own)}
        return next((one.max_model_len for one in self._listed if one.id in named and one.max_model_len), None)

    def _check_vendor(self) -> None:
        """A hosted model needs its key; without ``[llm]`` OpenHands asks for one of a vendor that nobody named."""
        if self._key:
            return
        asked = litellm.validate_environment(model=self._full_name)["missing_keys"]
        # AWS has roles and profiles, too; what is no key has a default.
        missing = [name for name in asked if name.endswith("_KEY") and not name.startswith("AWS_")]
        if missing and not any(os.environ.get(name) for name in missing):
            keys = ", ".join(missing)
            raise ConfigError(f"[llm] names no server, and {self._full_name} needs a key ({keys}): {_START}")


def _of_tls(error: BaseException) -> bool:
    """Whether something answered, but not with a certificate that we trust: litellm may be set to."""
    below = error.__cause__ or error.__context__
    return isinstance(error, ssl.SSLError) or (below is not None and _of_tls(below))


def check_reward(reward: RewardSettings, runtime: str | None) -> None:
    """Raises ``ConfigError`` when the reward needs a command's result that this runtime cannot give.

    ``runtime``: its name or class path, as in ``[core] runtime``; ``None`` when it is not known.
    """
    asked = workspace_command(reward)
    if asked is None or not runtime or hasattr(get_runtime_cls(runtime), "check"):
        return
    raise ConfigError(
        f"[rl.reward]: `{asked.command}` judges a workspace at the end of an episode, and runtime = {runtime!r} cannot "
        f"run it there: set runtime = {_OWN_RUNTIME!r} in [core], or choose another reward"
    )


def too_long(prompt: str, answer: int, context: str) -> ConfigError:
    """The refusal of a first prompt that does not fit."""
    return ConfigError(
        f"OpenHands' first prompt has {prompt} and [rl] max_response_length leaves {answer:,} for the answer: more "
        f"than the {context} of the model's context; serve a model with a context of {_WANTED_CONTEXT:,} or more "
        '(vLLM: --max-model-len), or set [rl.workspace] prompt = "compact"'
    )
