"""Code on litellm that both hosts share: OpenHands' requests for it, its responses and its errors.

A session answers in litellm's place. The arguments of the call become the body of a request, the document that the
session returns becomes litellm's response, and an error of the model server becomes litellm's exception.

What a run needs of its model server and its strategy is checked here, before the run begins.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import litellm
from litellm.litellm_core_utils.exception_mapping_utils import exception_type
from litellm.litellm_core_utils.llm_response_utils.convert_dict_to_response import convert_to_model_response_object
from litellm.llms.openai.common_utils import OpenAIError as ServersError
from litellm.types.utils import ModelResponse
from openai import OpenAIError

from openhands_rl_plugin.config.build import make_strategy
from openhands_rl_plugin.config.rl import AUTO, RLSettings, ServingSettings
from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import CaughtFailure, ConfigError, InfrastructureError, boundary
from openhands_rl_plugin.core.messages import (
    finish_in,
    is_json_object,
    reasoning_in,
    to_message,
    to_wire,
    usage_in,
    usage_to_wire,
)
from openhands_rl_plugin.core.protocols import EnvInfo
from openhands_rl_plugin.core.types import FailureKind, JsonObject
from openhands_rl_plugin.environments.workspace.sandbox import check_bubblewrap
from openhands_rl_plugin.models.adapters.store import AdapterStore
from openhands_rl_plugin.models.engines.client import (
    HttpUpstream,
    ListedModel,
    ServerError,
    Upstream,
    check_model_server,
    listed_models,
    server_error,
)
from openhands_rl_plugin.models.engines.openai_wire import Json, parse_object
from openhands_rl_plugin.rollout.strategies.base import SearchStrategy
from openhands_rl_plugin.session.session import Complete

# Litellm's proxy adds the working folder, where agents write modules, to the path.
if sys.path[-1] == os.getcwd() and "litellm.proxy.proxy_cli" in sys.modules:
    sys.path.pop()

OPENAI_COMPATIBLE = frozenset({"openai", "custom_openai", "hosted_vllm", "litellm_proxy"})

_KEY_VARIABLES = {"hosted_vllm": "HOSTED_VLLM_API_KEY", "litellm_proxy": "LITELLM_PROXY_API_KEY"}

_MALFORMED = ("FunctionCallConversionError", "FunctionCallNotExistsError", "FunctionCallValidationError")
_MALFORMED += ("LLMMalformedActionError", "LLMNoActionError", "LLMResponseError")


def malformed(errors: ModuleType) -> tuple[type[Exception], ...]:
    """The exceptions that OpenHands raises for a completion that it cannot parse. ``errors``: its module of errors.

    V0's controller reports all but the first to the model; that one ends the session.
    """
    return tuple(getattr(errors, name) for name in _MALFORMED)


# litellm's own arguments, which are no part of a request.
_LITELLMS = frozenset({"api_key", "base_url", "api_base", "api_version", "custom_llm_provider", "timeout", "client"})
_LITELLMS |= {"drop_params", "extra_body", "extra_headers", "allowed_openai_params", "safety_settings"}
_LITELLMS |= {"aws_region_name", "aws_access_key_id", "aws_secret_access_key"}
_SHOWN = 1000
_NO_TIMEOUT = 600.0  # litellm's own, where OpenHands sets none


def answered(complete: Complete, asked: Mapping[str, Any]) -> ModelResponse:
    """Call ``complete`` with litellm's arguments ``asked``, and return its response as litellm would.

    Errors of the model server are raised as litellm's exceptions; other errors of ``complete`` pass through.
    """
    body = {name: value for name, value in asked.items() if name not in _LITELLMS and value is not None}
    body |= asked.get("extra_body") or {}
    provider, body["model"] = named_in(asked)
    try:
        document = complete(body)
    except CaughtFailure as caught:
        error = server_error(caught)
        if error is None:
            raise
        if error.status == 200:  # OpenHands asks again
            found = parse_object(error.body) or {}
            kept = {name: found[name] for name in ("id", "created", "model", "usage") if found.get(name)}
            return ModelResponse(**kept, choices=[])
        raise _litellms_error(error, provider, body["model"]) from caught
    return response_of(document)


def response_of(document: Json) -> ModelResponse:
    """A chat completion as litellm's object. If litellm cannot read a field, only the recorded fields are converted."""
    convert = partial(convert_to_model_response_object, model_response_object=ModelResponse())
    try:
        with boundary(FailureKind.MODEL, "litellm"):
            response = convert(response_object=document)
    except CaughtFailure:
        choice, usage = document["choices"][0], usage_to_wire(usage_in(document.get("usage")))
        sent = to_wire(to_message({**choice["message"], "role": "assistant"}))
        for function in (call["function"] for call in sent.get("tool_calls") or ()):
            if not is_json_object(function["arguments"]):  # too deep for the host, too
                function["arguments"] = function["arguments"][:_SHOWN]
        sent["reasoning_content"] = reasoning_in(choice["message"])
        kept = {"message": sent, "finish_reason": finish_in(choice) or "stop"}
        response = convert(response_object={"model": document.get("model"), "choices": [kept], "usage": usage})
    assert isinstance(response, ModelResponse)
    return response


def upstream_of(given: Mapping[str, Any], send: Callable[..., ModelResponse]) -> Upstream:
    """The model server that litellm would call. ``given``: the arguments of every call.

    ``send`` makes a call by litellm, for the APIs of vendors.
    """
    provider, _ = named_in(given)
    base_url = str(given.get("base_url") or "")
    openais = (urlsplit(base_url).hostname or "").endswith("openai.com")
    # Vendors reject unknown fields, such as token ids, and have their own rules, which litellm knows.
    if not base_url or openais or provider not in OPENAI_COMPATIBLE:
        return _LiteLLM(send, provider)
    key = given.get("api_key") or key_of(provider)
    timeout = given.get("timeout") or _NO_TIMEOUT
    return HttpUpstream(base_url, key, timeout, headers=given.get("extra_headers"))


class _LiteLLM:
    """An ``Upstream`` for the APIs of vendors, which litellm knows."""

    def __init__(self, send: Callable[..., ModelResponse], provider: str) -> None:
        self.extensions: JsonObject = {}
        self._send = send
        self._provider = provider

    async def send(self, body: Json) -> bytes:
        """As ``Upstream.send``; the cause of the error is litellm's."""
        name = body["model"]
        asked = {**body, "model": f"{self._provider}/{name}" if self._provider else name}
        try:
            response = await background().blocking(partial(self._send, **asked))
        except OpenAIError as error:
            status = getattr(error, "status_code", None)
            raise ServerError(status if isinstance(status, int) else 500, str(error)) from error
        return response.model_dump_json(warnings=False).encode()


def _litellms_error(error: ServerError, provider: str, model: str) -> OpenAIError:
    """The exception that litellm raises for this error of a server."""
    if isinstance(error.__cause__, OpenAIError):
        return error.__cause__
    about = (found := parse_object(error.body) or {}).get("error", found)
    servers = ServersError(error.status, str(error), body=about if isinstance(about, dict) else None)
    try:
        exception_type(model=model, original_exception=servers, custom_llm_provider=provider)
    except OpenAIError as mapped:
        return mapped
    raise AssertionError("litellm raises for every error of a server")


def named_in(given: Mapping[str, Any]) -> tuple[str, str]:
    """The provider, by which litellm knows the API, and the model as the server calls it."""
    provider, name = given.get("custom_llm_provider") or "", str(given["model"])
    return (provider, name.removeprefix(f"{provider}/")) if provider else split_provider(name)


def key_of(provider: str) -> str | None:
    """The key that litellm uses if [llm] has none; it treats custom_openai as openai."""
    return os.environ.get(_KEY_VARIABLES.get(provider, "OPENAI_API_KEY"))


def split_provider(model: str) -> tuple[str, str]:
    """``"openai/Qwen/Qwen3-8B"`` -> ``("openai", "Qwen/Qwen3-8B")``; the provider is empty when unknown."""
    provider, slash, name = model.partition("/")
    return (provider, name) if slash and provider in litellm.provider_list else ("", model)


_WANTED_CONTEXT = 16_384

# OpenHands' own logger, by its name: nothing here imports OpenHands.
log = logging.getLogger("openhands")


def check_workspace_strategy(settings: RLSettings) -> None:
    """Raise ``ConfigError`` if no sandbox can be made here, or if the strategy cannot search in it."""
    isolated = settings.workspace.isolation != "none"
    if isolated:
        check_bubblewrap()
    if isinstance(strategy := make_strategy(settings), SearchStrategy):
        strategy.check_world(EnvInfo(emits_rewards=False) if isolated else None)


def check_model(settings: RLSettings, llm: Mapping[str, object]) -> str | None:
    """Check the model of ``[llm]``; returns the adapter that replaces it, as ``adapter_in_use``.

    ``llm``: ``model``, ``base_url``, ``api_key`` and ``custom_llm_provider`` of ``[llm]``, by litellm's names. Raises
    ``ConfigError`` or ``InfrastructureError`` when no completion can be expected from the model.
    """
    if settings.engine not in (AUTO, "openai"):
        return None
    provider, model = named_in(llm)
    url, key = str(llm.get("base_url") or "").rstrip("/"), str(llm.get("api_key") or "") or None
    if url and provider in OPENAI_COMPATIBLE:
        key = key or key_of(provider)
        check_model_server(url, model, key)
        return adapter_in_use(settings.serving, model, url, key)
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
        listed = listed_models(url, key) or ()
    for each in listed:
        if each.id in (current.name, f"{model}:{current.name}") and each.parent in (None, model):
            return each.id
    if listed:
        log.warning(
            "%s is not loaded on %s at %s, so that model itself is sampled; load it with: openhands-rl adapters "
            "publish --adapters %s --version %s --set serving.adapter=%s serving.base_url=%s",
            *(current.name, model, url, serving.adapters_directory, current.version, serving.adapter, url),
        )
    return None


def too_long(settings: RLSettings) -> str:
    """The error text, with the remedy, for a first prompt that is longer than the model's context."""
    return (
        f"OpenHands' first prompt and [rl] max_response_length = {settings.max_response_length:,} are longer than the "
        f"model's context; serve a model with a context of {_WANTED_CONTEXT:,} or more (vLLM: --max-model-len), or set "
        '[rl.workspace] prompt = "compact"'
    )
