"""Records every completion of one OpenHands ``LLM``: the request as sent and the server's response.

It wraps OpenHands' call of litellm (``LLM._completion_unwrapped``), below retries, message formatting and the
conversion of tools to a prompt, and before the answer is parsed. So it records the wire form, every attempt, and
answers whose tool call cannot be parsed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import litellm
from litellm.types.utils import Choices, ModelResponse
from openhands.llm.llm import LLM
from pydantic import JsonValue
from pydantic_core import from_json

from openhands_rl_plugin.core.acted import TURN
from openhands_rl_plugin.core.concurrency import bound
from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.messages import (
    NEUTRAL_PARAMETERS,
    RECORDED_PARAMETERS,
    WireMessage,
    text_of,
    whole_json,
    whole_message,
)
from openhands_rl_plugin.core.records import MISSING
from openhands_rl_plugin.core.types import (
    Completion,
    JsonObject,
    Message,
    PolicyRef,
    SamplingParams,
    Tokens,
    ToolCall,
    Usage,
)
from openhands_rl_plugin.hosts.shared.token_interceptor import TokenInterceptor, intercepting, intercepting_client
from openhands_rl_plugin.models.engines.extensions import (
    LOGPROBS,
    SAMPLING,
    TOKEN_IDS,
    ExtensionAttempt,
    ExtensionTable,
    extension_values,
    missing_parts,
)
from openhands_rl_plugin.models.gateway.token_id_text import ContextCache

OPENAI_COMPATIBLE = frozenset({"openai", "custom_openai", "hosted_vllm", "litellm_proxy"})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request and its outcome. ``latency`` is in seconds; ``completion`` is ``None`` without an answer. ``kind``:
    a turn of the agent, or a condenser's request."""

    messages: Sequence[WireMessage]
    tools: Sequence[JsonObject]
    parameters: JsonObject
    model: str
    latency: float
    completion: Completion | None
    error: str | None
    kind: str = TURN

    def summary(self) -> JsonObject:
        """The attempt without the messages and the completion, which the tree has."""
        return {"model": self.model, "parameters": self.parameters, "latency": self.latency, "error": self.error}


@dataclass(slots=True)
class CallLog:
    """The attempts of one call, in order. ``session`` and ``step`` are OpenHands'; ``ask_tokens``: request token ids.

    ``after``: the tokens of the last sampled node before the answer, if known. Of a prompt that extends them, only the
    new tokens are kept. ``altering``: sampling parameters beyond OpenAI's; OpenHands drops an ``extra_body`` of a call.
    """

    session: str
    step: int
    base_model: str
    attempts: list[Attempt] = field(default_factory=list)
    ask_tokens: bool = True
    after: Tokens | None = None
    altering: JsonObject = field(default_factory=dict)


_LOG: ContextVar[CallLog | None] = ContextVar("rl_call_log", default=None)


def recording(log: CallLog) -> AbstractContextManager[CallLog]:
    """Attempts made in this context are appended to ``log``."""
    return bound(_LOG, log)


def record_completions(llm: LLM, kind: str = TURN) -> None:
    """Install the recorder in ``llm``, whose completions are of that ``kind``. Idempotent."""
    # OpenHands declares a functools.partial here; it only ever calls it.
    holder: Any = llm
    if not isinstance(holder._completion_unwrapped, RecordedCompletion):
        holder._completion_unwrapped = RecordedCompletion(holder._completion_unwrapped, kind)
        holder._post_completion = _one_at_a_time(holder._post_completion)


def _one_at_a_time[T](count: Callable[[ModelResponse], T]) -> Callable[[ModelResponse], T]:
    """Serialize the calls: OpenHands' update of its metrics is not atomic, and candidates arrive concurrently."""
    turn = threading.Lock()

    def counted(response: ModelResponse) -> T:
        with turn:
            return count(response)

    return counted


class RecordedCompletion:
    """litellm's ``completion`` as OpenHands bound it, with every call appended to the current ``CallLog``.

    Outside ``recording`` it only forwards the call. Inside, it requests token ids and logprobs from an
    OpenAI-compatible server and removes them from the response: OpenHands would copy and store them with every event.
    A request that the server refuses is sent again without them.
    """

    def __init__(self, send: Callable[..., ModelResponse], kind: str = TURN) -> None:
        self._send = send
        self._kind = kind
        self._bound: Mapping[str, Any] = getattr(send, "keywords", {})
        self._contexts = ContextCache()

    def __call__(self, *args: Any, **kwargs: Any) -> ModelResponse:
        log = _LOG.get()
        if log is None:
            return self._send(*args, **kwargs)
        given = {**self._bound, **kwargs}
        if log.altering:
            kwargs["extra_body"] = given["extra_body"] = {**(given.get("extra_body") or {}), **log.altering}
        wanted = _wanted(given) if log.ask_tokens else ()
        asking = _extensions_of(_base_url(given)).attempt(str(given.get("model")), wanted)
        while True:
            added = _token_request(given, asking.fields)
            asked = {**given, **added}
            started = time.perf_counter()
            try:
                with intercepting(self._contexts, log.after) as interceptor:
                    client = intercepting_client(asked) if {TOKEN_IDS, LOGPROBS}.intersection(asking.fields) else {}
                    response = self._send(*args, **{**kwargs, **added, **client})
            except BaseException as error:
                log.attempts.append(_attempt(asked, time.perf_counter() - started, self._kind, error=describe(error)))
                if _is_refused(asking, error):
                    continue
                raise
            asking.succeeded()
            latency = time.perf_counter() - started
            completion = _completion(asked, response, log.base_model, interceptor)
            # What the user turned off himself is not missing.
            if (
                completion
                and {TOKEN_IDS, LOGPROBS} <= {*wanted}
                and (missing := missing_parts(asking, completion.tokens))
            ):
                completion.metadata[MISSING] = missing
            error = None if completion else "the server answered without a choice"
            log.attempts.append(_attempt(asked, latency, self._kind, completion, error))
            return response


_FIELDS = (TOKEN_IDS, LOGPROBS, SAMPLING)


@lru_cache(16)
def _extensions_of(base_url: str) -> ExtensionTable:
    """What the models of one server accept; shared by all agents of the process."""
    return ExtensionTable()


def _wanted(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields to ask a server for, except for those that the user set: his own values take precedence."""
    own = {**(given.get("extra_body") or {}), **given}
    return tuple(name for name in _FIELDS if name not in own) if _knows_token_ids(given) else ()


def _token_request(given: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The parameters of litellm that request token ids, logprobs and neutral sampling."""
    own = given.get("extra_body") or {}
    values = extension_values(fields, {**own, **given})
    added: dict[str, Any] = {LOGPROBS: values.pop(LOGPROBS)} if LOGPROBS in values else {}
    return {**added, "extra_body": {**values, **own}} if values else added


def _is_refused(asking: ExtensionAttempt, error: BaseException) -> bool:
    """Whether to send the request again with the fields that are left."""
    status = getattr(error, "status_code", None)
    return isinstance(error, Exception) and isinstance(status, int) and asking.is_refused(status, str(error).encode())


def _base_url(given: Mapping[str, Any]) -> str:
    return str(given.get("base_url") or given.get("api_base") or "")


def _knows_token_ids(asked: Mapping[str, Any]) -> bool:
    """Whether the server may be self-hosted: OpenAI and other vendors reject the unknown parameter."""
    base_url = _base_url(asked)
    if not base_url or (urlsplit(base_url).hostname or "").endswith("openai.com"):
        return False
    provider = asked.get("custom_llm_provider") or split_provider(asked.get("model") or "")[0]
    return provider in OPENAI_COMPATIBLE


def split_provider(model: str) -> tuple[str, str]:
    """``"openai/Qwen/Qwen3-8B"`` -> ``("openai", "Qwen/Qwen3-8B")``; the provider is empty when unknown."""
    provider, slash, name = model.partition("/")
    return (provider, name) if slash and provider in litellm.provider_list else ("", model)


def _attempt(
    asked: Mapping[str, Any],
    latency: float,
    kind: str,
    completion: Completion | None = None,
    error: str | None = None,
) -> Attempt:
    return Attempt(
        messages=asked.get("messages") or (),
        tools=asked.get("tools") or (),
        parameters=_parameters(asked),
        model=str(asked.get("model")),
        latency=latency,
        completion=completion,
        error=error,
        kind=kind,
    )


def _parameters(asked: Mapping[str, Any]) -> JsonObject:
    given = {**(asked.get("extra_body") or {}), **asked}
    return {name: given[name] for name in RECORDED_PARAMETERS if given.get(name) is not None}


def _completion(
    asked: Mapping[str, Any], response: ModelResponse, base_model: str, interceptor: TokenInterceptor
) -> Completion | None:
    prompt_ids = (response.model_extra or {}).pop("prompt_token_ids", None)
    choice = response.choices[0] if response.choices else None
    if not isinstance(choice, Choices):
        return None
    # Tokens that were not intercepted are still in the response.
    remaining = _take_tokens(prompt_ids, choice)
    message = _take_message(choice)
    # Without the token arrays, which would make it many times larger.
    raw: JsonValue = (
        from_json(interceptor.rest) if interceptor.rest else response.model_dump(mode="json", warnings=False)
    )
    served = split_provider(response.model or str(asked.get("model")))[1]
    return Completion.model_construct(
        message=message,
        tokens=interceptor.tokens or remaining,
        finish_reason=choice.finish_reason,
        usage=_usage(response),
        policy=PolicyRef.from_served_name(base_model, served),
        sampling=_sampling(asked),
        metadata={"response": whole_json(raw)},
    )


def _take_message(choice: Choices) -> Message:
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


def _take_tokens(prompt_ids: object, choice: Choices) -> Tokens | None:
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


def _usage(response: ModelResponse) -> Usage:
    usage = (response.model_extra or {}).get("usage")
    details = getattr(usage, "prompt_tokens_details", None)
    return Usage(
        prompt_tokens=getattr(usage, "prompt_tokens", 0) or 0,
        completion_tokens=getattr(usage, "completion_tokens", 0) or 0,
        cached_tokens=getattr(details, "cached_tokens", 0) or 0,
        calls=1,
    )


def _sampling(asked: Mapping[str, Any]) -> SamplingParams:
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
