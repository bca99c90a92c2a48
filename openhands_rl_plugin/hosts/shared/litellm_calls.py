"""What both hosts read out of litellm's calls: which fields to ask a server for, and the parts of its response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import litellm
from litellm.types.utils import Choices, ModelResponse

from openhands_rl_plugin.core.messages import NEUTRAL_PARAMETERS, RECORDED_PARAMETERS, text_of, whole_message
from openhands_rl_plugin.core.types import JsonObject, Message, SamplingParams, Tokens, ToolCall, Usage
from openhands_rl_plugin.models.engines.extensions import (
    LOGPROBS,
    SAMPLING,
    TOKEN_IDS,
    ExtensionTable,
    extension_values,
)

OPENAI_COMPATIBLE = frozenset({"openai", "custom_openai", "hosted_vllm", "litellm_proxy"})

_FIELDS = (TOKEN_IDS, LOGPROBS, SAMPLING)


@lru_cache(16)
def extensions_of(base_url: str) -> ExtensionTable:
    """What the models of one server accept; shared by all agents of the process."""
    return ExtensionTable()


def wanted_fields(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields to ask a server for, except for those that the user set: his own values take precedence."""
    own = {**(given.get("extra_body") or {}), **given}
    return tuple(name for name in _FIELDS if name not in own) if _knows_token_ids(given) else ()


def asks_for_tokens(given: Mapping[str, Any]) -> bool:
    """Whether token ids and logprobs are asked for, by us or in the call: what a user turned off is not missing."""
    own = {**(given.get("extra_body") or {}), **given}
    return _knows_token_ids(given) and all(own.get(name, True) for name in (TOKEN_IDS, LOGPROBS))


def token_request(given: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The parameters of litellm that request token ids, logprobs and neutral sampling."""
    own = given.get("extra_body") or {}
    values = extension_values(fields, {**own, **given})
    added: dict[str, Any] = {LOGPROBS: values.pop(LOGPROBS)} if LOGPROBS in values else {}
    return {**added, "extra_body": {**values, **own}} if values else added


def base_url_of(given: Mapping[str, Any]) -> str:
    """The server of a call; empty for a provider's own."""
    return str(given.get("base_url") or given.get("api_base") or "")


def _knows_token_ids(asked: Mapping[str, Any]) -> bool:
    """Whether the server may be self-hosted: OpenAI and other vendors reject the unknown parameter."""
    base_url = base_url_of(asked)
    if not base_url or (urlsplit(base_url).hostname or "").endswith("openai.com"):
        return False
    provider = asked.get("custom_llm_provider") or split_provider(asked.get("model") or "")[0]
    return provider in OPENAI_COMPATIBLE


def split_provider(model: str) -> tuple[str, str]:
    """``"openai/Qwen/Qwen3-8B"`` -> ``("openai", "Qwen/Qwen3-8B")``; the provider is empty when unknown."""
    provider, slash, name = model.partition("/")
    return (provider, name) if slash and provider in litellm.provider_list else ("", model)


def recorded_parameters(asked: Mapping[str, Any]) -> JsonObject:
    """The parameters of a call that are stored."""
    given = {**(asked.get("extra_body") or {}), **asked}
    return {name: given[name] for name in RECORDED_PARAMETERS if given.get(name) is not None}


def take_message(choice: Choices) -> Message:
    """The message. Lone surrogates are replaced in the choice, too: OpenHands could not send them again."""
    said = _message(choice)
    whole = whole_message(said)
    if whole is not said:
        choice.message.content = whole.content
        for call, own in zip(choice.message.tool_calls or (), whole.tool_calls, strict=True):
            call.id, call.function.name, call.function.arguments = own.id, own.name, own.arguments
    return whole


def _message(choice: Choices) -> Message:
    message = choice.message
    return Message(
        role="assistant",
        content=text_of(message.content),
        tool_calls=tuple(
            ToolCall(id=call.id or "", name=call.function.name or "", arguments=call.function.arguments or "")
            for call in message.tool_calls or ()
        ),
    )


def take_tokens(prompt_ids: object, choice: Choices) -> Tokens | None:
    """Move the token arrays out of the choice; ``None`` without both kinds of ids."""
    logprobs, choice.logprobs = getattr(choice, "logprobs", None), None
    sampled_ids = (getattr(choice, "provider_specific_fields", None) or {}).pop("token_ids", None)
    if not (isinstance(prompt_ids, list) and isinstance(sampled_ids, list)):
        return None
    content = getattr(logprobs, "content", None) or ()
    values = tuple(float(entry.logprob) for entry in content)
    # Not validated here: 35,000 ids in every turn would cost most of a millisecond. ``HostEpisode`` checks the ids that
    # each prompt adds before they are stored.
    return Tokens.model_construct(
        prompt_ids=tuple(prompt_ids),
        sampled_ids=tuple(sampled_ids),
        logprobs=values if len(values) == len(sampled_ids) else (),
    )


def usage_of(response: ModelResponse) -> Usage:
    """Tokens of one call."""
    usage = getattr(response, "usage", None)
    details = getattr(usage, "prompt_tokens_details", None)
    return Usage(
        prompt_tokens=getattr(usage, "prompt_tokens", 0) or 0,
        completion_tokens=getattr(usage, "completion_tokens", 0) or 0,
        cached_tokens=getattr(details, "cached_tokens", 0) or 0,
        calls=1,
    )


def sampling_of(asked: Mapping[str, Any]) -> SamplingParams:
    """What a call was sampled with; ``None`` for what was left to the server."""
    given = {**(asked.get("extra_body") or {}), **asked}
    stop = given.get("stop") or ()
    return SamplingParams.model_construct(
        temperature=given.get("temperature"),
        top_p=given.get("top_p"),
        **{name: given.get(name) for name in NEUTRAL_PARAMETERS},
        max_tokens=given.get("max_completion_tokens") or given.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        seed=given.get("seed"),
    )
