"""What both hosts read out of litellm's calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import litellm
from litellm.types.utils import Choices, ModelResponse

from openhands_rl_plugin.core.errors import EpisodeError, describe
from openhands_rl_plugin.core.messages import text_in, usage_in, whole_message
from openhands_rl_plugin.core.types import Message, Tokens, ToolCall, Usage
from openhands_rl_plugin.models.engines.extensions import LOGPROBS, SAMPLING, TOKEN_IDS
from openhands_rl_plugin.session.upstream import ServerError


def model_server_error(error: Exception) -> EpisodeError:
    """``ModelError`` when the server refuses the request itself (4xx), else ``InfrastructureError``."""
    status = getattr(error, "status_code", None)
    return ServerError(status if isinstance(status, int) else 500, describe(error)).as_failure()


OPENAI_COMPATIBLE = frozenset({"openai", "custom_openai", "hosted_vllm", "litellm_proxy"})

KEY_VARIABLES = {"hosted_vllm": "HOSTED_VLLM_API_KEY", "litellm_proxy": "LITELLM_PROXY_API_KEY"}
"""Where litellm takes the key from when [llm] has none; a custom_openai is an openai to it."""

_FIELDS = (TOKEN_IDS, LOGPROBS, SAMPLING)


def wanted_fields(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields to ask a server for, except for those that the user set: his own values take precedence."""
    own = {**(given.get("extra_body") or {}), **given}
    return tuple(name for name in _FIELDS if name not in own) if is_self_hosted(given) else ()


def asks_for_tokens(given: Mapping[str, Any]) -> bool:
    """Whether token ids and logprobs are asked for, by us or in the call: what a user turned off is not missing."""
    own = {**(given.get("extra_body") or {}), **given}
    return is_self_hosted(given) and all(own.get(name, True) for name in (TOKEN_IDS, LOGPROBS))


def is_self_hosted(asked: Mapping[str, Any]) -> bool:
    """Whether the server may be self-hosted. OpenAI and other vendors reject what they do not know, such as token ids,
    and have APIs and rules of their own for parameters, which litellm knows."""
    base_url = str(asked.get("base_url") or asked.get("api_base") or "")
    if not base_url or (urlsplit(base_url).hostname or "").endswith("openai.com"):
        return False
    provider = asked.get("custom_llm_provider") or split_provider(asked.get("model") or "")[0]
    return provider in OPENAI_COMPATIBLE


def missing_keys(model: str) -> list[str]:
    """The environment variables of keys that a vendor's model needs and this process has not."""
    asked = litellm.validate_environment(model=model)["missing_keys"]
    # AWS has roles and profiles, too; what is no key has a default.
    return [name for name in asked if name.endswith("_KEY") and not name.startswith("AWS_")]


def split_provider(model: str) -> tuple[str, str]:
    """``"openai/Qwen/Qwen3-8B"`` -> ``("openai", "Qwen/Qwen3-8B")``; the provider is empty when unknown."""
    provider, slash, name = model.partition("/")
    return (provider, name) if slash and provider in litellm.provider_list else ("", model)


def take_message(choice: Choices) -> Message:
    """The message. Lone surrogates and arguments that are absent are replaced in the choice, too: OpenHands could
    neither send them again nor read them."""
    message = choice.message
    calls = message.tool_calls or ()
    said = Message(
        role="assistant",
        content=text_in({"content": message.content}, calls),
        tool_calls=tuple(
            ToolCall(id=call.id or "", name=call.function.name or "", arguments=call.function.arguments)
            for call in calls
        ),
    )
    whole = whole_message(said)
    if whole is not said or whole.content is None:
        message.content = whole.content
    for call, own in zip(calls, whole.tool_calls, strict=True):
        if (call.id, call.function.name, call.function.arguments) != (own.id, own.name, own.arguments):
            call.id, call.function.name, call.function.arguments = own.id, own.name, own.arguments
    return whole


def take_tokens(prompt_ids: object, choice: Choices) -> Tokens | None:
    """Move the token arrays out of the choice; ``None`` without both kinds of ids."""
    logprobs, choice.logprobs = getattr(choice, "logprobs", None), None
    sampled_ids = (getattr(choice, "provider_specific_fields", None) or {}).pop("token_ids", None)
    if not (isinstance(prompt_ids, list) and isinstance(sampled_ids, list)):
        return None
    content = getattr(logprobs, "content", None) or ()
    values = tuple(float(entry.logprob) for entry in content)
    # Not validated here: 35,000 ids in every turn would cost most of a millisecond. ``Session`` checks the ids that
    # each prompt adds before they are stored.
    return Tokens.model_construct(
        prompt_ids=tuple(prompt_ids),
        sampled_ids=tuple(sampled_ids),
        logprobs=Tokens.known_logprobs(values, len(sampled_ids)),
    )


def usage_of(response: ModelResponse) -> Usage:
    """Tokens of one call."""
    usage = getattr(response, "usage", None)
    return usage_in(usage.model_dump() if usage is not None else None)
