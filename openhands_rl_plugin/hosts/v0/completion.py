"""The completions of an OpenHands ``LLM``, asked of a session by a direct call in the place of litellm's.

It takes the place of ``LLM._completion_unwrapped``, below retries, message formatting and the conversion of tools to a
prompt, and before the answer is parsed. An error of the model server is raised as litellm's exception, so that
OpenHands' own retries and messages work as before.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from litellm import Message as LiteLLMMessage
from litellm.litellm_core_utils.exception_mapping_utils import exception_type
from litellm.llms.openai.common_utils import OpenAIError as ServersError
from litellm.types.utils import Choices, ModelResponse
from openai import OpenAIError
from openhands.core.exceptions import (
    FunctionCallConversionError,
    FunctionCallNotExistsError,
    FunctionCallValidationError,
    LLMMalformedActionError,
    LLMNoActionError,
    LLMResponseError,
)
from openhands.llm.fn_call_converter import (
    STOP_WORDS,
    convert_fncall_messages_to_non_fncall_messages,
    convert_non_fncall_messages_to_fncall_messages,
)
from openhands.llm.llm import LLM
from openhands.llm.model_features import get_features

from openhands_rl_plugin.core.concurrency import background
from openhands_rl_plugin.core.errors import CaughtFailure
from openhands_rl_plugin.core.messages import WireMessage
from openhands_rl_plugin.hosts.compact_prompt import described
from openhands_rl_plugin.hosts.shared.litellm_calls import (
    KEY_VARIABLES,
    is_self_hosted,
    split_provider,
    wanted_fields,
)
from openhands_rl_plugin.models.engines.extensions import ExtensionTable
from openhands_rl_plugin.models.gateway.token_id_text import Json, parse_object
from openhands_rl_plugin.session.branches import Complete
from openhands_rl_plugin.session.session import Session
from openhands_rl_plugin.session.upstream import HttpUpstream, ServerError, Upstream

ANSWERED = (
    FunctionCallNotExistsError,
    FunctionCallValidationError,
    LLMMalformedActionError,
    LLMNoActionError,
    LLMResponseError,
)
"""Errors of an answer that OpenHands' controller reports to the model; others end the session."""

MALFORMED = (FunctionCallConversionError, *ANSWERED)
"""What OpenHands raises for an answer of the model that it cannot parse."""

# litellm's own arguments, which are no part of a request.
_LITELLMS = frozenset({"api_key", "base_url", "api_base", "api_version", "custom_llm_provider", "timeout", "client"})
_LITELLMS |= {"drop_params", "extra_body", "extra_headers", "allowed_openai_params", "safety_settings"}
_LITELLMS |= {"aws_region_name", "aws_access_key_id", "aws_secret_access_key"}
_NO_TIMEOUT = 600.0  # litellm's own, where OpenHands sets none


def connect(session: Session, llm: LLM) -> None:
    """Let the session sample from the model of ``llm``."""
    session.connect(_upstream(llm))


def ask(llm: LLM, complete: Complete) -> None:
    """Let ``complete`` answer the requests of ``llm``."""
    holder: Any = llm
    given: dict[str, Any] = _send_of(llm).keywords

    def answer(**more: Any) -> ModelResponse:
        asked = {**given, **more}
        body = {name: value for name, value in asked.items() if name not in _LITELLMS and value is not None}
        body |= asked.get("extra_body") or {}
        provider, body["model"] = _named(asked)
        try:
            document = complete(body)
        except CaughtFailure as caught:
            error = _server_error(caught)
            if error is None:
                raise
            if error.status == 200:  # OpenHands asks again
                told = parse_object(error.body) or {}
                kept = {name: told[name] for name in ("id", "created", "model", "usage") if told.get(name)}
                return ModelResponse(**kept, choices=[])
            raise _litellms_error(error, provider, body["model"]) from caught
        # A copy, because search may execute an answer several times.
        return ModelResponse(**copy.deepcopy(document))

    answer.send = _send_of(llm)  # type: ignore[attr-defined]
    holder._completion_unwrapped = answer


def ask_beside(llm: LLM, session: Session, kind: str) -> None:
    """Record what ``llm`` is asked beside the episode, such as a condenser's summaries, as nodes of this ``kind``."""
    ask(llm, lambda body: background().wait_for(session.aside(body, kind)))


def twin(llm: LLM) -> LLM:
    """An LLM with the same settings and metrics of its own, which does not try again."""
    config = llm.config.model_copy(update={"num_retries": 1, "log_completions": False})
    return LLM(config, service_id=llm.service_id)


def _send_of(llm: LLM) -> Any:
    """litellm's ``completion`` as OpenHands bound it."""
    holder: Any = llm._completion_unwrapped
    return getattr(holder, "send", holder)


def _named(given: dict[str, Any]) -> tuple[str, str]:
    """The provider, by which litellm knows the API, and the model as the server calls it."""
    provider, name = given.get("custom_llm_provider") or "", str(given["model"])
    return (provider, name.removeprefix(f"{provider}/")) if provider else split_provider(name)


def _upstream(llm: LLM) -> Upstream:
    send = _send_of(llm)
    given: dict[str, Any] = send.keywords
    provider, _ = _named(given)
    fields = wanted_fields(given)
    if not is_self_hosted(given):
        return _LiteLLM(send, provider)
    key = given.get("api_key") or os.environ.get(KEY_VARIABLES.get(provider, "OPENAI_API_KEY"))
    timeout = given.get("timeout") or _NO_TIMEOUT
    return HttpUpstream(str(given["base_url"]), key, timeout, fields=fields, headers=given.get("extra_headers"))


class _LiteLLM:
    """An ``Upstream`` for the APIs of vendors, which litellm knows."""

    fields = ()

    def __init__(self, send: Callable[..., ModelResponse], provider: str) -> None:
        self.extensions = ExtensionTable()
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


def _server_error(caught: BaseException) -> ServerError | None:
    """The model server's error that was the cause."""
    error: BaseException | None = caught
    while error is not None and not isinstance(error, ServerError):
        error = error.__cause__
    return error


def _litellms_error(error: ServerError, provider: str, model: str) -> OpenAIError:
    """The exception that litellm raises for it."""
    if isinstance(error.__cause__, OpenAIError):
        return error.__cause__
    told = parse_object(error.body) or {}
    about = told.get("error", told)
    servers = ServersError(error.status, str(error), body=about if isinstance(about, dict) else None)
    try:
        exception_type(model=model, original_exception=servers, custom_llm_provider=provider)
    except OpenAIError as mapped:
        return mapped
    raise AssertionError("litellm raises for every error of a server")


def describe_tools(llm: LLM) -> None:
    """Let ``llm`` describe tools in the prompt by our own text, which is shorter than OpenHands'."""
    holder: Any = llm
    if not isinstance(llm.completion, partial):
        holder._completion = partial(_completed_by_text, llm, llm.completion)


def _completed_by_text(
    llm: LLM, complete: Callable[..., ModelResponse], *, messages: Any, tools: Sequence[Any], **more: Any
) -> ModelResponse:
    sent = described_tools(llm.format_messages_for_llm(messages), tools)
    if get_features(llm.config.model).supports_stop_words and not llm.config.disable_stop_word:
        more["stop"] = STOP_WORDS
    response = complete(messages=sent, **more)
    read_described_call(response, tools)
    return response


def described_tools(prompt: Sequence[WireMessage], tools: Sequence[Any]) -> list[Any]:
    """The prompt as it is sent. Raises OpenHands' ``FunctionCallConversionError``."""
    system = [message for message in prompt if message["role"] == "system"]
    rest: list[Any] = [message for message in prompt if message["role"] != "system"]
    # Without tools it adds no text to the conversation.
    converted = convert_fncall_messages_to_non_fncall_messages(rest, [], add_in_context_learning_example=False)
    return described([*system, *converted], tools)


def read_described_call(response: ModelResponse, tools: Sequence[Any]) -> None:
    """Put the call that the answer's text holds in its place. Raises OpenHands' errors of a call that is wrong."""
    choice = response.choices[0] if response.choices else None
    if isinstance(choice, Choices):
        [answer] = convert_non_fncall_messages_to_fncall_messages([choice.message.model_dump()], list(tools))
        choice.message = LiteLLMMessage(**answer)
