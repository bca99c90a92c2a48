"""The LLM that an agent's step is given: a session answers its requests, in the place of litellm.

It is the SDK's own ``LLM`` but for the call of litellm at its end. So the prompt, the arguments, retries, the reading
of calls, metrics and logs are the SDK's. Prompts and tools are written once.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from litellm.llms.base_llm.base_model_iterator import convert_model_response_to_streaming
from litellm.types.utils import ModelResponse
from openhands.sdk.llm import LLM, ImageContent, LLMResponse, exceptions
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.tool import ToolDefinition
from pydantic import PrivateAttr, SecretStr

from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.compact_prompt import compact_tools, described, is_offered
from openhands_rl_plugin.hosts.shared.litellm_calls import answered, malformed, upstream_of
from openhands_rl_plugin.session.branches import Complete
from openhands_rl_plugin.session.upstream import Upstream


def has_images(messages: Sequence[SdkMessage]) -> bool:
    """Whether any message shows an image."""
    return any(isinstance(part, ImageContent) for message in messages for part in message.content)


def price_of(model: str) -> float | None:
    """The price of a token, in USD: 0 for a model that is not in litellm's list, else ``None``, which takes that one.

    Otherwise the SDK asks litellm for the price of each answer, and warns each time that there is none.
    """
    from litellm import model_cost

    if model in model_cost or model.partition("/")[2] in model_cost:
        return None
    return 0.0


_RISK = "add_security_risk_prediction"


class Written(list[dict[str, Any]]):
    """Messages as ``LLM.format_messages_for_llm`` returns them, which nobody changes. So a copy is the same."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Written:
        return self


class WrittenTool:
    """A tool whose schemas are written once, which takes milliseconds; in all else the tool itself."""

    def __init__(self, tool: ToolDefinition, *, compact: bool) -> None:
        self._tool = tool
        self._compact = compact
        self._written: dict[str, Any] = {}

    def to_openai_tool(self, **asked: Any) -> JsonObject:
        """As of the tool. A copy, in which litellm may write."""
        key = repr(asked)
        if key not in self._written:
            written = self._tool.to_openai_tool(**asked)
            self._written[key] = compact_tools([written])[0] if self._compact else written
        return copied(self._written[key])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)


class Prompts:
    """Writes the prompts of one conversation, and its tools, once. ``compact``: fewer tools, with short texts."""

    def __init__(self, *, compact: bool) -> None:
        self.compact = compact
        self._settings: dict[str, Any] = {}
        self._messages: Sequence[SdkMessage] = ()
        self._written = Written()
        self._tools: tuple[ToolDefinition, ...] = ()
        self._offered: list[Any] = []
        self._risk = self._fixed = False

    def write(self, llm: LLM, messages: Sequence[SdkMessage]) -> Written:
        """What ``llm.format_messages_for_llm`` returns. Not to be changed: the next prompt shares it.

        Of a conversation that goes on from the last prompt, only what is new is written.
        """
        known = self._known(llm, messages)
        # Copies: the SDK may mark messages for the prompt cache while it writes them.
        new = llm.format_messages_for_llm([each.model_copy() for each in messages[known:]])
        # Without ``self``, an LLM that is changed later would be compared with itself.
        self._settings, self._messages = dict(llm.__dict__), tuple(messages)
        self._written = Written([*self._written[:known], *new])
        return self._written

    def offer(
        self, llm: LLM, tools: Sequence[ToolDefinition], arguments: dict[str, Any]
    ) -> tuple[list[Any] | None, dict[str, Any]]:
        """The tools that are sent, and the arguments of the completion."""
        if self._fixed:
            return self._offered or None, {**arguments, _RISK: self._risk}
        if len(tools) != len(self._tools) or not all(map(operator.is_, tools, self._tools)):
            self._tools = tuple(tools)
            told = [tool for tool in tools if not self.compact or is_offered(tool.name)]
            # A log of completions shows the tools' own fields, which are not what is sent of compact ones.
            plain = llm.log_completions and not self.compact
            self._offered = told if plain else [WrittenTool(tool, compact=self.compact) for tool in told]
        self._risk = bool(arguments.get(_RISK))
        return self._offered or None, arguments

    def forked(self) -> Prompts:
        """For a copy of the conversation: with the tools of this one, whatever the copy has."""
        twin = Prompts(compact=self.compact)
        twin._offered, twin._risk, twin._fixed = self._offered, self._risk, bool(self._tools)
        return twin

    def _known(self, llm: LLM, messages: Sequence[SdkMessage]) -> int:
        """How many of the messages are written as they were in the last prompt."""
        before = self._messages
        if not before or llm.__dict__ != self._settings:
            return 0
        # Which messages are marked, and how large an image may be, depends on the others.
        if llm.is_caching_prompt_active() or has_images(messages):
            return 0
        return len(before) if tuple(messages[: len(before)]) == before else 0


def copied(value: Any) -> Any:
    """A deep copy of JSON; ``copy.deepcopy`` takes ten times as long."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


MALFORMED = malformed(exceptions)
"""What the SDK raises for an answer of the model that it cannot parse."""


class Unrecorded(Exception):
    """The plugin itself failed: the model is asked as without it."""


class SessionLLM(LLM):
    """An LLM with the settings, the metrics and the telemetry of ``plain``, whose requests ``complete`` answers.

    It is never stored: the agent that is serialised keeps the plain LLM.
    """

    _plain: LLM | None = PrivateAttr(default=None)
    _complete: Complete | None = PrivateAttr(default=None)
    _cancel: Callable[[], None] | None = PrivateAttr(default=None)
    _prompts: Prompts | None = PrivateAttr(default=None)
    _unread: Callable[[str], None] | None = PrivateAttr(default=None)

    @classmethod
    def over(
        cls,
        plain: LLM,
        complete: Complete,
        prompts: Prompts | None = None,
        *,
        cancel: Callable[[], None] | None = None,
        unread: Callable[[str], None] | None = None,
    ) -> Self:
        """``complete`` may raise ``Unrecorded``; ``cancel`` ends its call, and blocks until it has ended. ``prompts``
        writes those of one conversation. ``unread`` is called with the reason why an answer cannot be read."""
        # Made when it is asked for, and to be shared, else the costs would not reach the conversation.
        assert plain.telemetry is not None
        # A search may take longer than a completion.
        made = cls.model_construct(_fields_set=set(plain.model_fields_set), **{**plain.__dict__, "timeout": None})
        shared = {**(made.__pydantic_private__ or {}), **(plain.__pydantic_private__ or {})}
        own = {"_plain": plain, "_complete": complete, "_prompts": prompts, "_cancel": cancel, "_unread": unread}
        object.__setattr__(made, "__pydantic_private__", {**shared, **own})
        return made

    def uses_responses_api(self) -> bool:
        """Never: token ids come with chat completions only."""
        return False

    def completion(
        self, messages: list[SdkMessage], tools: Sequence[ToolDefinition] | None = None, *more: Any, **arguments: Any
    ) -> LLMResponse:
        """As of the plain LLM. A stream is one chunk, when the answer is there: litellm's would bring no prompt ids."""
        if self._prompts is not None:
            tools, arguments = self._prompts.offer(self, tools or (), arguments)
        with self._read():
            return super().completion(messages, tools, *more, **arguments)

    async def acompletion(
        self, messages: list[SdkMessage], tools: Sequence[ToolDefinition] | None = None, *more: Any, **arguments: Any
    ) -> LLMResponse:
        """``completion`` in a thread. Cancelling it ends the request: nothing of it counts as acted on."""
        if self._prompts is not None:
            tools, arguments = self._prompts.offer(self, tools or (), arguments)
        asked: Any = super()  # absent in 1.15
        with self._read():
            return await asked.acompletion(messages, tools, *more, **arguments)

    def format_messages_for_llm(self, messages: list[SdkMessage]) -> list[dict[str, Any]]:
        """As of the plain LLM. Not to be changed: the next prompt shares it."""
        assert self._plain is not None
        if self._prompts is None:
            return self._plain.format_messages_for_llm(messages)
        return self._prompts.write(self._plain, messages)

    async def aformat_messages_for_llm(self, messages: list[SdkMessage]) -> list[dict[str, Any]]:
        """As ``format_messages_for_llm``."""
        return await asyncio.to_thread(self.format_messages_for_llm, messages)

    def pre_request_prompt_mock(
        self, messages: list[dict[str, Any]], tools: list[Any], kwargs: dict[str, Any], *more: Any, **named: Any
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """As the SDK's; of a compact prompt with the text of ``compact_prompt``, which is 1,500 tokens shorter."""
        convert, own = super().pre_request_prompt_mock, [copied(message) for message in messages]
        if self._prompts is None or not self._prompts.compact:
            return convert(own, tools, kwargs, *more, **named)
        # The SDK adds its text where there are tools and a system message.
        rest = [message for message in own if message["role"] != "system"]
        converted, arguments = convert(rest, [], kwargs, *more, **named)
        return described(own, converted, tools), arguments

    def _transport_call(
        self, *, messages: list[dict[str, Any]], enable_streaming: bool = False, on_token: Any = None, **kwargs: Any
    ) -> ModelResponse:
        try:
            response = self._answered(messages, kwargs)
        except Unrecorded:
            asked = {"messages": copied([*messages]), "enable_streaming": enable_streaming, "on_token": on_token}
            return self._plain._transport_call(**asked, **kwargs)  # type: ignore[union-attr]
        if enable_streaming and on_token and response.choices:
            on_token(convert_model_response_to_streaming(response))
        return response

    async def _atransport_call(
        self, *, messages: list[dict[str, Any]], enable_streaming: bool = False, on_token: Any = None, **kwargs: Any
    ) -> ModelResponse:
        try:
            response = await asyncio.to_thread(self._answered, messages, kwargs)
        except Unrecorded:
            asked = {"messages": copied([*messages]), "enable_streaming": enable_streaming, "on_token": on_token}
            return await self._plain._atransport_call(**asked, **kwargs)  # type: ignore[union-attr]
        except asyncio.CancelledError:
            if self._cancel is not None:
                self._cancel()
            raise
        if enable_streaming and on_token and response.choices:
            waiting = on_token(convert_model_response_to_streaming(response))
            if asyncio.iscoroutine(waiting):
                await waiting
        return response

    @contextmanager
    def _read(self) -> Iterator[None]:
        try:
            yield
        except MALFORMED as error:
            if self._unread is not None:
                self._unread(describe(error))
            raise

    def _answered(self, messages: Sequence[dict[str, Any]], kwargs: dict[str, Any]) -> ModelResponse:
        assert self._complete is not None
        return answered(self._complete, {"model": self.model, "seed": self.seed, **kwargs, "messages": messages})


def model_server(llm: LLM) -> Upstream:
    """What ``llm`` asks."""
    key = llm.api_key.get_secret_value() if isinstance(llm.api_key, SecretStr) else llm.api_key
    given = {
        "model": llm.model,
        "base_url": llm.base_url,
        "api_key": key,
        "timeout": llm.timeout,
        "extra_headers": llm.extra_headers,
        "extra_body": llm.litellm_extra_body,
    }

    def send(*, model: str, messages: Any, seed: int | None = None, **kwargs: Any) -> ModelResponse:
        asked: Any = llm.model_copy(update={"model": model, "seed": seed})
        return asked._transport_call(messages=[*messages], **kwargs)

    return upstream_of(given, send)
