"""The LLM that an agent's step is given: a session answers its requests, in the place of litellm.

Its completions are made here, from prompt to response: the SDK formats and copies the whole conversation for each one.
Prompts and tools are written once; arguments, retries, errors, text calls, costs and logs are the SDK's.
"""

from __future__ import annotations

import asyncio
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any, Self

from litellm import model_cost
from litellm.llms.base_llm.base_model_iterator import convert_model_response_to_streaming
from litellm.types.utils import ModelResponse
from openhands.sdk.llm import LLM, ImageContent, LLMResponse, exceptions
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.llm.llm import LLM_RETRY_EXCEPTIONS
from openhands.sdk.llm.options.chat_options import select_chat_options
from openhands.sdk.llm.utils.telemetry import Telemetry
from openhands.sdk.tool import ToolDefinition
from pydantic import PrivateAttr, SecretStr

from openhands_rl_plugin.core.errors import BadEnvironmentError, describe
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.compact_prompt import compact_tools, described
from openhands_rl_plugin.hosts.shared.litellm_calls import answered, malformed, upstream_of
from openhands_rl_plugin.session.branches import Complete
from openhands_rl_plugin.session.upstream import Upstream


class Prompts:
    """Writes the prompts of one conversation, and its tools, once. ``compact``: fewer tools, with short texts."""

    def __init__(self, *, compact: bool) -> None:
        self.compact = compact
        self._settings: dict[str, Any] = {}
        self._messages: Sequence[SdkMessage] = ()
        self._written: list[JsonObject] = []
        self._tools: tuple[ToolDefinition, ...] = ()
        self._offered: list[Any] = []
        self._risk = self._fixed = False
        self.outside: frozenset[str] = frozenset()

    def write(self, llm: LLM, messages: Sequence[SdkMessage]) -> list[JsonObject]:
        """What ``llm.format_messages_for_llm`` returns. Not to be changed: the next prompt shares it.

        Of a conversation that goes on from the last prompt, only what is new is written.
        """
        known = self._known(llm, messages)
        # Copies: the SDK may mark messages for the prompt cache while it writes them.
        new = llm.format_messages_for_llm([each.model_copy() for each in messages[known:]])
        # Without ``self``, an LLM that is changed later would be compared with itself.
        self._settings, self._messages = dict(llm.__dict__), tuple(messages)
        self._written = [*self._written[:known], *new]
        return self._written

    def offer(self, tools: Sequence[ToolDefinition], risk: bool) -> tuple[list[Any], bool]:
        """The tools as they are sent, and whether they have the argument ``security_risk``. Not to be changed."""
        same = risk == self._risk and len(tools) == len(self._tools) and all(map(operator.is_, tools, self._tools))
        if not (same or self._fixed):
            self._tools, self._risk = tuple(tools), risk
            written = [tool.to_openai_tool(add_security_risk_prediction=risk) for tool in tools]
            self._offered = compact_tools(written) if self.compact else [*map(dict, written)]
        return self._offered, self._risk

    def forked(self, outside: frozenset[str]) -> Prompts:
        """For a copy of the conversation: with the tools of this one, whatever the copy has. It lacks ``outside``."""
        twin = Prompts(compact=self.compact)
        twin.outside = outside
        twin._offered, twin._risk, twin._fixed = self._offered, self._risk, bool(self._tools)
        return twin

    def _known(self, llm: LLM, messages: Sequence[SdkMessage]) -> int:
        """How many of the messages are written as they were in the last prompt."""
        before = self._messages
        if not before or llm.__dict__ != self._settings:
            return 0
        # Which messages are marked, and how large an image may be, depends on the others.
        images = any(isinstance(part, ImageContent) for message in messages for part in message.content)
        if llm.is_caching_prompt_active() or images:
            return 0
        return len(before) if tuple(messages[: len(before)]) == before else 0


MALFORMED = malformed(exceptions)
"""What the SDK raises for an answer of the model that it cannot parse."""
_RISK, _RISK_IN_TEXT = "add_security_risk_prediction", "include_security_params"
# Newer than 1.15: a text on the argument ``security_risk`` in text calls, what a completion belongs to, the provider.
_HAS_RISK_IN_TEXT = _RISK_IN_TEXT in signature(LLM.pre_request_prompt_mock).parameters
_CONTEXT = "call_context"
_HAS_CONTEXT = _CONTEXT in signature(select_chat_options).parameters
_HAS_PROVIDER = "provider_info" in signature(Telemetry.on_response).parameters


_COST = {"llm_provider-x-litellm-response-cost": 0.0}


def _has_price(llm: LLM) -> bool:
    """Whether an answer's cost is known. Else the SDK asks litellm for it, and warns each time that there is none."""
    names = (llm.model, llm.model.partition("/")[2])
    return llm.input_cost_per_token is not None or any(name in model_cost for name in names)


class Unrecorded(Exception):
    """The plugin itself failed: the model is asked as without it."""


class _Metrics:
    """The metrics of an LLM, of which the telemetry makes no copy for each answer: that takes milliseconds."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics

    def deep_copy(self) -> Any:
        return self._metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metrics, name)


class _Request:
    """One completion, as the SDK makes it: ``body`` without the messages, ``wire``; ``tools`` where calls are text."""

    def __init__(self, llm: SessionLLM, messages: Sequence[SdkMessage], tools: Any, given: Mapping[str, Any]) -> None:
        self.llm, plain, prompts = llm, llm._plain, llm._prompts
        named = {name: given[name] for name in given if name not in {"on_token", "stream", _RISK, _CONTEXT}}
        offered, risk = prompts.offer(tools or (), bool(given.get(_RISK)))
        self.wire = written = prompts.write(plain, messages)
        self.tools = offered if llm.should_mock_tool_calls(offered) else []
        self.risk = {_RISK_IN_TEXT: risk} if _HAS_RISK_IN_TEXT else {}
        if self.tools:
            # The SDK adds its text where there are tools and a system message: 1,500 tokens more than the compact one.
            own: Any = copy.deepcopy(written)
            rest = [message for message in own if message["role"] != "system"] if prompts.compact else own
            shown = [] if prompts.compact else offered
            self.wire, named = llm.pre_request_prompt_mock(rest, shown, named, **self.risk)
            if prompts.compact:
                self.wire = described(own, self.wire, offered)
        named["tools"] = native = None if self.tools else offered or None
        context = {_CONTEXT: given.get(_CONTEXT)} if _HAS_CONTEXT else {}
        options = select_chat_options(llm, named, has_tools=bool(native), **context)
        self.body = {"model": llm.model, "seed": llm.seed, **options}
        longest = getattr(llm, "effective_max_input_tokens", llm.max_input_tokens)
        self.about: dict[str, Any] = {"context_window": longest or 0}
        if llm.telemetry.log_enabled:
            shown = offered if prompts.compact else tools
            self.about |= {"messages": self.wire, "tools": shown, "kwargs": options}
            self.about |= {"raw_messages": written} if self.tools else {}

    def answer(self, **again: Any) -> ModelResponse:
        """One attempt. ``again``: arguments that a retry changes."""
        llm: Any = self.llm  # releases differ
        sampled = None
        llm.telemetry.on_request(telemetry_ctx=self.about)
        response = answered(llm._complete, {**self.body, **again, "messages": self.wire})
        if self.tools:
            sampled = copy.deepcopy(response)
            response = llm.post_response_prompt_mock(response, nonfncall_msgs=self.wire, tools=self.tools, **self.risk)
        if not _has_price(llm):
            response._hidden_params = {**response._hidden_params, "additional_headers": _COST}
        provider = {"provider_info": llm._provider_info} if _HAS_PROVIDER else {}
        llm.telemetry.on_response(response, raw_resp=sampled, **provider)
        if not response.choices:
            raise exceptions.LLMNoResponseError(f"the model server answered without a choice: {response}")
        return response


class SessionLLM(LLM):
    """An LLM with the settings, the metrics and the telemetry of ``plain``, whose requests ``complete`` answers.

    It is never stored: the agent that is serialised keeps the plain LLM. It has one model: the ``fallback_strategy`` of
    ``plain`` is not used.
    """

    _plain: LLM = PrivateAttr()
    _complete: Complete = PrivateAttr()
    _prompts: Prompts = PrivateAttr()
    _cancel: Callable[[], None] | None = PrivateAttr(default=None)
    _unread: Callable[[str], None] | None = PrivateAttr(default=None)

    @classmethod
    def over(cls, plain: LLM, complete: Complete, prompts: Prompts) -> Self:
        """``complete`` may raise ``Unrecorded``. ``prompts`` writes those of one conversation."""
        # A search may take longer than a completion.
        made = cls.model_construct(_fields_set=set(plain.model_fields_set), **{**plain.__dict__, "timeout": None})
        # It keeps the request under way: in a copy, side by side. The plain one is made when it is asked for.
        telemetry = plain.telemetry.model_copy(update={"metrics": _Metrics(plain.metrics)})
        own = {"_plain": plain, "_complete": complete, "_prompts": prompts}
        shared = {**(made.__pydantic_private__ or {}), **(plain.__pydantic_private__ or {}), "_telemetry": telemetry}
        object.__setattr__(made, "__pydantic_private__", {**shared, **own})
        return made

    def heard_by(self, cancel: Callable[[], None], unread: Callable[[str], None]) -> Self:
        """``cancel`` ends a call, and blocks until it has ended; ``unread`` gets the reason why an answer cannot be
        read."""
        self._cancel, self._unread = cancel, unread
        return self

    def uses_responses_api(self) -> bool:
        """Never: token ids come with chat completions only."""
        return False

    def completion(  # type: ignore[override]
        self, messages: list[SdkMessage], tools: Sequence[ToolDefinition] | None = None, **named: Any
    ) -> LLMResponse:
        """As of the plain LLM. A stream is one chunk, when the answer is there: litellm's would bring no prompt ids."""
        try:
            with self._errors():
                made = self._retried(_Request(self, messages, tools, named).answer)()
        except Unrecorded:
            return self._plain.completion(messages, tools, **named)
        if (chunk := self._chunk(made, named)) is not None:
            named["on_token"](chunk)
        return self._response(made)

    async def acompletion(  # type: ignore[override]
        self, messages: list[SdkMessage], tools: Sequence[ToolDefinition] | None = None, **named: Any
    ) -> LLMResponse:
        """``completion`` in a thread. Cancelling it ends the request: nothing of it counts as acted on."""

        async def answer(**again: Any) -> ModelResponse:
            return await asyncio.to_thread(request.answer, **again)

        try:
            with self._errors():
                request = await asyncio.to_thread(_Request, self, messages, tools, named)
                made = await self._retried(answer)()
        except Unrecorded:
            plain: Any = self._plain  # absent in 1.15
            return await plain.acompletion(messages, tools, **named)
        except asyncio.CancelledError:
            if self._cancel is not None:
                self._cancel()
            raise
        if (chunk := self._chunk(made, named)) is not None and asyncio.iscoroutine(heard := named["on_token"](chunk)):
            await heard
        return self._response(made)

    def _retried(self, attempt: Callable[..., Any]) -> Callable[..., Any]:
        if (newer := getattr(self, "_make_retry_decorator", None)) is not None:
            return newer()(attempt)
        names = ("num_retries", "retry_min_wait", "retry_max_wait", "retry_multiplier")
        asked: dict[str, Any] = {name: getattr(self, name) for name in names}
        asked |= {"retry_exceptions": LLM_RETRY_EXCEPTIONS, "retry_listener": self._retry_listener_fn}
        return self.retry_decorator(**asked)(attempt)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Unrecorded:
            raise
        except Exception as error:
            self.telemetry.on_error(error)
            if isinstance(error, MALFORMED) and self._unread is not None:
                self._unread(describe(error))
            if (mapped := exceptions.map_provider_exception(error)) is not error:
                raise mapped from error
            raise

    def _chunk(self, made: ModelResponse, named: Mapping[str, Any]) -> Any:
        streams = (self.stream or named.get("stream")) and named.get("on_token")
        return convert_model_response_to_streaming(made) if streams else None

    def _response(self, made: ModelResponse) -> LLMResponse:
        choice: Any = made.choices[0]
        message = SdkMessage.from_llm_chat_message(choice.message)
        for call in message.tool_calls or ():
            if call.name in self._prompts.outside:
                raise BadEnvironmentError(f"the tool {call.name!r} cannot be executed in a fork of the conversation")
        return LLMResponse(message=message, metrics=self.metrics.get_snapshot(), raw_response=made)


def key_of(llm: LLM) -> str | None:
    """Its API key."""
    return llm.api_key.get_secret_value() if isinstance(llm.api_key, SecretStr) else llm.api_key


def model_server(llm: LLM) -> Upstream:
    """What ``llm`` asks."""
    given: dict[str, Any] = {name: getattr(llm, name) for name in ("model", "base_url", "timeout", "extra_headers")}
    given |= {"api_key": key_of(llm), "extra_body": llm.litellm_extra_body}

    def send(*, model: str, seed: int | None = None, **asked: Any) -> ModelResponse:
        vendors: Any = llm.model_copy(update={"model": model, "seed": seed})
        # A copy: litellm may write in it.
        return vendors._transport_call(**copy.deepcopy(asked))

    return upstream_of(given, send)
