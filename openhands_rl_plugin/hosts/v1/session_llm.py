"""The LLM of an agent's step: a session answers its requests instead of litellm.

Prompts, retries, errors, text calls, costs and logs are the SDK's. The SDK formats the whole conversation and all tools
for each completion; this LLM formats each message and tool once.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

from litellm import model_cost
from litellm.llms.base_llm.base_model_iterator import convert_model_response_to_streaming
from litellm.types.utils import ModelResponse
from openhands.sdk.llm import LLM, ImageContent, LLMResponse, exceptions
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.tool import ToolDefinition
from pydantic import PrivateAttr, SecretStr

from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.compact_prompt import compact_tools, described
from openhands_rl_plugin.hosts.shared.litellm_calls import answered, malformed, upstream_of
from openhands_rl_plugin.session.session import Complete, Upstream


class Prompts:
    """Formats each message and tool of one conversation once. ``compact``: fewer tools, with short texts."""

    def __init__(self, *, compact: bool) -> None:
        self.compact = compact
        self._settings: dict[str, Any] = {}
        self._messages: Sequence[SdkMessage] = ()
        self._written = _Written()
        self._tools: tuple[ToolDefinition, ...] = ()
        self._offered: list[Any] = []
        self._risk = self._fixed = False

    def write(self, llm: LLM, messages: Sequence[SdkMessage]) -> list[JsonObject]:
        """The result of ``llm.format_messages_for_llm``. Do not change it: the next prompt shares it.

        If the conversation extends the last prompt, only its new messages are formatted.
        """
        before, parts = self._messages, (part for message in messages for part in message.content)
        # Which messages are marked, and how large an image may be, depends on the others.
        alone = not llm.is_caching_prompt_active() and not any(isinstance(part, ImageContent) for part in parts)
        goes_on = alone and llm.__dict__ == self._settings and tuple(messages[: len(before)]) == before
        known = len(before) if goes_on else 0
        # Copies, because the SDK may mark messages for the prompt cache while it formats them.
        new = llm.format_messages_for_llm([each.model_copy() for each in messages[known:]])
        # Without ``self``, an LLM that is changed later would be compared with itself.
        self._settings, self._messages = dict(llm.__dict__), tuple(messages)
        self._written = _Written([*self._written[:known], *new])
        return self._written

    def offer(self, tools: Sequence[ToolDefinition], risk: bool) -> tuple[list[Any], bool]:
        """The tools in wire format, and whether they have the argument ``security_risk``. Do not change them."""
        if not self._fixed and (risk, *map(id, tools)) != (self._risk, *map(id, self._tools)):
            self._tools, self._risk = tuple(tools), risk
            written = [tool.to_openai_tool(add_security_risk_prediction=risk) for tool in tools]
            self._offered = [_Offered(tool) for tool in (compact_tools(written) if self.compact else written)]
        return self._offered, self._risk

    def forked(self) -> Prompts:
        """Prompts for a copy of the conversation, with the tools of this one."""
        twin = copy.copy(self)
        twin._fixed = bool(self._tools)
        return twin


class _Written(list[Any]):
    """Messages of a prompt that are never changed, so that the SDK's copies for its logs cost nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class _Offered(dict[str, Any]):
    """A tool in wire format, in place of the definition that the SDK expects."""

    def to_openai_tool(self, **_: Any) -> JsonObject:
        return {**self}


MALFORMED = malformed(exceptions)
"""The exceptions that the SDK raises for a completion that it cannot parse."""
_RISK = "add_security_risk_prediction"
_COST = {"llm_provider-x-litellm-response-cost": 0.0}


class Unrecorded(Exception):
    """Raised if the plugin itself failed; the SDK then calls the model without it."""


class _Metrics:
    """The metrics of an LLM, of which the telemetry makes no copy for each answer: that takes milliseconds."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics

    def deep_copy(self) -> Any:
        return self._metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metrics, name)


class SessionLLM(LLM):
    """An LLM with the settings, the metrics and the telemetry of ``plain``, whose requests ``complete`` answers.

    It is never stored: the agent that is serialised keeps the plain LLM. It has one model: the ``fallback_strategy`` of
    ``plain`` is not used.
    """

    _plain: LLM = PrivateAttr()
    _complete: Complete = PrivateAttr()
    _prompts: Prompts = PrivateAttr()
    _on_malformed: Callable[[str], None] | None = PrivateAttr(default=None)

    @classmethod
    def over(
        cls, plain: LLM, complete: Complete, prompts: Prompts, on_malformed: Callable[[str], None] | None = None
    ) -> Self:
        """Make the LLM. ``complete`` may raise ``Unrecorded``; ``prompts`` formats those of one conversation.

        ``on_malformed`` gets the error of a completion that cannot be parsed.
        """
        # A search may take longer than a completion.
        changed: dict[str, Any] = {"timeout": None, "fallback_strategy": None}
        made = cls.model_construct(_fields_set=set(plain.model_fields_set), **{**plain.__dict__, **changed})
        # A copy keeps its own running request. The plain LLM's is made on first use.
        telemetry = plain.telemetry.model_copy(update={"metrics": _Metrics(plain.metrics)})
        own = {"_plain": plain, "_complete": complete, "_prompts": prompts, "_on_malformed": on_malformed}
        shared = {**(made.__pydantic_private__ or {}), **(plain.__pydantic_private__ or {}), "_telemetry": telemetry}
        object.__setattr__(made, "__pydantic_private__", {**shared, **own})
        return made

    def uses_responses_api(self) -> bool:
        """Always false, because only chat completions return token ids."""
        return False

    def resolve_runtime_metadata(self, **_: Any) -> None:
        """Do nothing: this LLM lasts for one step, and each one would look up the router's limits."""

    async def aresolve_runtime_metadata(self, **_: Any) -> None:
        """Do nothing, for the same reason."""

    def format_messages_for_llm(self, messages: list[SdkMessage]) -> list[dict[str, Any]]:
        """As of the plain LLM. Do not change the result."""
        return self._prompts.write(self._plain, messages)

    async def aformat_messages_for_llm(self, messages: list[SdkMessage]) -> list[dict[str, Any]]:
        """As ``format_messages_for_llm``, in a thread."""
        return await asyncio.to_thread(self.format_messages_for_llm, messages)

    def pre_request_prompt_mock(  # type: ignore[override]
        self, messages: list[dict[str, Any]], tools: list[Any], kwargs: dict[str, Any], **risk: bool
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The prompt for calls in the text; a compact one without the SDK's own text of 1,500 tokens."""
        if not self._prompts.compact:
            return super().pre_request_prompt_mock([*messages], tools, kwargs, **risk)
        # The SDK adds its text if there are tools and a system message.
        rest = [message for message in messages if message["role"] != "system"]
        written, given = super().pre_request_prompt_mock(rest, [], kwargs, **risk)
        return described(messages, written, tools), given

    def post_response_prompt_mock(self, *given: Any, **named: Any) -> ModelResponse:
        """As of the plain LLM: reads the calls in the text."""
        try:
            return super().post_response_prompt_mock(*given, **named)
        except MALFORMED as error:
            if self._on_malformed is not None:
                self._on_malformed(describe(error))
            raise

    def completion(  # type: ignore[override]
        self, messages: list[SdkMessage], tools: Sequence[ToolDefinition] | None = None, **named: Any
    ) -> LLMResponse:
        """As of the plain LLM. A stream is one chunk with the whole response: litellm's streams have no prompt ids."""
        return super().completion(messages, **self._offering(tools, named))

    async def acompletion(  # type: ignore[override]
        self, messages: list[SdkMessage], tools: Sequence[ToolDefinition] | None = None, **named: Any
    ) -> LLMResponse:
        """``completion`` in a thread."""
        return await cast(Any, super()).acompletion(messages, **self._offering(tools, named))

    def _transport_call(  # type: ignore[override]
        self, *, messages: list[JsonObject], enable_streaming: bool = False, on_token: Any = None, **asked: Any
    ) -> ModelResponse:
        try:
            response = answered(self._complete, {"model": self.model, "seed": self.seed, **asked, "messages": messages})
        except Unrecorded:
            # Copies, because litellm may change them.
            own, vendors = copy.deepcopy([*messages]), self._plain
            return vendors._transport_call(messages=own, enable_streaming=enable_streaming, on_token=on_token, **asked)
        if enable_streaming and on_token is not None and response.choices:
            on_token(convert_model_response_to_streaming(response))
        if not _has_price(self):
            response._hidden_params = {**response._hidden_params, "additional_headers": _COST}
        return response

    async def _atransport_call(self, *, on_token: Any = None, **asked: Any) -> ModelResponse:
        heard: list[Any] = []
        response = await asyncio.to_thread(self._transport_call, on_token=on_token and heard.append, **asked)
        for chunk in heard:
            if asyncio.iscoroutine(waiting := on_token(chunk)):
                await waiting
        return response

    def _offering(self, tools: Sequence[ToolDefinition] | None, named: Mapping[str, Any]) -> dict[str, Any]:
        offered, risk = self._prompts.offer(tools or (), bool(named.get(_RISK)))
        return {**named, "tools": offered, _RISK: risk}


def _has_price(llm: LLM) -> bool:
    """Whether a completion's cost is known. If not, the SDK would ask litellm each time, and warn."""
    names = (llm.model, llm.model.partition("/")[2])
    return llm.input_cost_per_token is not None or any(name in model_cost for name in names)


def key_of(llm: LLM) -> str | None:
    """Its API key."""
    return llm.api_key.get_secret_value() if isinstance(llm.api_key, SecretStr) else llm.api_key


def model_server(llm: LLM) -> Upstream:
    """What ``llm`` asks."""
    given: dict[str, Any] = {name: getattr(llm, name) for name in ("model", "base_url", "timeout", "extra_headers")}
    given |= {"api_key": key_of(llm), "extra_body": llm.litellm_extra_body}

    def send(*, model: str, seed: int | None = None, **asked: Any) -> ModelResponse:
        # A copy, because litellm may change it.
        return llm.model_copy(update={"model": model, "seed": seed})._transport_call(**copy.deepcopy(asked))

    return upstream_of(given, send)
