"""The LLM that an agent's step is given: a session answers its requests, in the place of litellm.

It is the SDK's own ``LLM`` but for the call of litellm at its end. So the prompt, the arguments, retries, the reading
of calls, metrics and logs are the SDK's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from litellm.types.utils import ModelResponse
from openhands.sdk.llm import LLM, LLMResponse, exceptions
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.tool import ToolDefinition
from pydantic import PrivateAttr, SecretStr

from openhands_rl_plugin.core.errors import describe
from openhands_rl_plugin.hosts.compact_prompt import described
from openhands_rl_plugin.hosts.shared.litellm_calls import answered, malformed, upstream_of
from openhands_rl_plugin.hosts.v1.values import chunks_of
from openhands_rl_plugin.hosts.v1.written_prompts import Prompts, copied
from openhands_rl_plugin.session.branches import Complete
from openhands_rl_plugin.session.upstream import Upstream

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
        """As of the plain LLM. A stream is replayed when the answer is there."""
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
        for chunk in chunks_of(response) if enable_streaming and on_token else ():
            on_token(chunk)
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
        for chunk in chunks_of(response) if enable_streaming and on_token else ():
            if asyncio.iscoroutine(waiting := on_token(chunk)):
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
