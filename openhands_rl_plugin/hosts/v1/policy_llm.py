"""The LLM that an agent's step is given: its completions are decided by the strategy, and recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, Self

from openhands.sdk.llm import LLM, LLMResponse
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.tool import ToolDefinition
from pydantic import PrivateAttr

from openhands_rl_plugin.hosts.v1.values import chunks_of
from openhands_rl_plugin.hosts.v1.written_prompts import sharing


class Completes(Protocol):
    """Answers requests in the place of an LLM."""

    def complete(
        self, llm: LLM, messages: list[SdkMessage], tools: Sequence[ToolDefinition], arguments: dict[str, Any]
    ) -> LLMResponse:
        """What ``llm.completion`` would return or raise. Blocks."""
        ...

    def cancel(self) -> None:
        """End a request that is under way; its ``complete`` raises ``asyncio.CancelledError``. Blocks."""
        ...


class PolicyLLM(LLM):
    """An LLM with the settings and the metrics of ``plain``, whose completions are those of ``policy``.

    It is never stored: the agent that is serialised keeps the plain LLM.
    """

    _plain: LLM | None = PrivateAttr(default=None)
    _policy: Completes | None = PrivateAttr(default=None)

    @classmethod
    def over(cls, plain: LLM, policy: Completes) -> Self:
        """Metrics and telemetry are shared, else the costs would not reach the conversation."""
        return sharing(cls, plain, _plain=plain, _policy=policy)

    def uses_responses_api(self) -> bool:
        """Never: token ids come with chat completions only."""
        return False

    def completion(
        self, messages: list[SdkMessage], tools: Sequence[ToolDefinition] | None = None, *more: Any, **arguments: Any
    ) -> LLMResponse:
        """As of the plain LLM. A stream is replayed when the answer is there."""
        assert not more, "the SDK gives all that follows the tools by name"
        on_token = arguments.pop("on_token", None)
        response = self._complete(messages, tools, arguments)
        if on_token is not None and self.stream:
            for chunk in chunks_of(response):
                on_token(chunk)
        return response

    async def acompletion(
        self, messages: list[SdkMessage], tools: Sequence[ToolDefinition] | None = None, *more: Any, **arguments: Any
    ) -> LLMResponse:
        """``completion`` in a thread. Cancelling it ends the request: nothing of it counts as acted on."""
        assert not more, "the SDK gives all that follows the tools by name"
        on_token = arguments.pop("on_token", None)
        try:
            response = await asyncio.to_thread(self._complete, messages, tools, arguments)
        except asyncio.CancelledError:
            if self._policy is not None:
                self._policy.cancel()
            raise
        for chunk in chunks_of(response) if self.stream else ():
            if on_token is not None and asyncio.iscoroutine(waiting := on_token(chunk)):
                await waiting
        return response

    def _complete(
        self, messages: list[SdkMessage], tools: Sequence[ToolDefinition] | None, arguments: dict[str, Any]
    ) -> LLMResponse:
        assert self._plain is not None and self._policy is not None
        return self._policy.complete(self._plain, messages, tools or (), arguments)
