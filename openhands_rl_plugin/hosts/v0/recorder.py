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
from typing import Any

from litellm.types.utils import Choices, ModelResponse
from openhands.llm.llm import LLM
from pydantic import JsonValue
from pydantic_core import from_json

from openhands_rl_plugin.core.concurrency import bound
from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.messages import WireMessage, recorded_parameters, sampling_in, whole_json
from openhands_rl_plugin.core.records import MISSING
from openhands_rl_plugin.core.types import TURN, Completion, JsonObject, PolicyRef, Tokens
from openhands_rl_plugin.hosts.shared.litellm_calls import (
    TokenInterceptor,
    asks_for_tokens,
    base_url_of,
    extensions_of,
    intercepting,
    intercepting_client,
    split_provider,
    take_message,
    take_tokens,
    token_request,
    usage_of,
    wanted_fields,
)
from openhands_rl_plugin.models.engines.extensions import LOGPROBS, TOKEN_IDS, ExtensionAttempt, missing_parts
from openhands_rl_plugin.models.gateway.token_id_text import ContextCache


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
    ``restore``: makes of OpenHands' prompt the one that is sent.
    """

    session: str
    step: int
    base_model: str
    attempts: list[Attempt] = field(default_factory=list)
    ask_tokens: bool = True
    after: Tokens | None = None
    altering: JsonObject = field(default_factory=dict)
    restore: Callable[[Sequence[WireMessage]], list[WireMessage]] | None = None


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
        if log.restore is not None:
            kwargs["messages"] = given["messages"] = log.restore(given["messages"])
        wanted = wanted_fields(given) if log.ask_tokens else ()
        asking = extensions_of(base_url_of(given)).attempt(str(given.get("model")), wanted)
        while True:
            added = token_request(given, asking.fields)
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
            asked_for = log.ask_tokens and asks_for_tokens(given)
            if completion and asked_for and (missing := missing_parts(asking, completion.tokens)):
                completion.metadata[MISSING] = missing
            error = None if completion else "the server answered without a choice"
            log.attempts.append(_attempt(asked, latency, self._kind, completion, error))
            return response


def _is_refused(asking: ExtensionAttempt, error: BaseException) -> bool:
    """Whether to send the request again with the fields that are left."""
    status = getattr(error, "status_code", None)
    return isinstance(error, Exception) and isinstance(status, int) and asking.is_refused(status, str(error).encode())


def _attempt(
    asked: Mapping[str, Any], latency: float, kind: str, completion: Completion | None = None, error: str | None = None
) -> Attempt:
    return Attempt(
        messages=asked.get("messages") or (),
        tools=asked.get("tools") or (),
        parameters=recorded_parameters(_parameters(asked)),
        model=str(asked.get("model")),
        latency=latency,
        completion=completion,
        error=error,
        kind=kind,
    )


def _completion(
    asked: Mapping[str, Any], response: ModelResponse, base_model: str, interceptor: TokenInterceptor
) -> Completion | None:
    prompt_ids = (response.model_extra or {}).pop("prompt_token_ids", None)
    choice = response.choices[0] if response.choices else None
    if not isinstance(choice, Choices):
        return None
    # Tokens that were not intercepted are still in the response.
    remaining = take_tokens(prompt_ids, choice)
    message = take_message(choice)
    # Without the token arrays, which would make it many times larger.
    raw: JsonValue = (
        from_json(interceptor.rest) if interceptor.rest else response.model_dump(mode="json", warnings=False)
    )
    served = split_provider(response.model or str(asked.get("model")))[1]
    return Completion.model_construct(
        message=message,
        tokens=interceptor.tokens or remaining,
        finish_reason=choice.finish_reason,
        usage=usage_of(response),
        policy=PolicyRef.from_served_name(base_model, served),
        sampling=sampling_in(_parameters(asked)),
        metadata={"response": whole_json(raw)},
    )


def _parameters(asked: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**(asked.get("extra_body") or {}), **asked}
