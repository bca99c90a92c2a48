"""Requests to a model without tool calling: tools and calls are text of the prompt, converted and read by the SDK."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from litellm.types.utils import Choices, ModelResponse
from openhands.sdk.llm import LLM
from pydantic import PrivateAttr

from openhands_rl_plugin.core.messages import WireMessage
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.compact_prompt import described
from openhands_rl_plugin.hosts.v1.written_prompts import Written, WrittenLLM, sharing

# Absent in 1.15, where the SDK's text says nothing of the argument ``security_risk``.
_WITH_RISK = "include_security_params"


@dataclass
class TextExchange:
    """One request. ``compact``: tools are described by the text of ``compact_prompt``, which is 1,500 tokens shorter
    than the SDK's. ``restore`` makes of the SDK's prompt the one that is sent; ``answer`` is the choice before the SDK
    reads its call."""

    compact: bool
    restore: Callable[[Sequence[WireMessage]], list[WireMessage]] = list
    answer: Choices | None = None
    converted: Written = field(default_factory=list)


class TextLLM(WrittenLLM):
    """A ``WrittenLLM`` whose request is a ``TextExchange``."""

    _exchange: TextExchange = PrivateAttr()

    @classmethod
    def exchanging(cls, plain: LLM, prompt: Sequence[WireMessage] | None, exchange: TextExchange) -> Self:
        """As ``over``."""
        return sharing(cls, plain, _prompt=prompt, _exchange=exchange)

    def pre_request_prompt_mock(
        self, messages: list[dict[str, Any]], tools: list[Any], kwargs: dict[str, Any], *more: Any, **named: Any
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """As the SDK's, with the exchange's text on tools and its answers."""
        convert = super().pre_request_prompt_mock
        if self._exchange.compact:
            # The SDK adds its text where there are tools and a system message.
            system = [message for message in messages if message["role"] == "system"]
            rest = [message for message in messages if message["role"] != "system"]
            converted, arguments = convert(rest, [], kwargs, *more, **named)
            converted = described([*system, *converted], tools)
        else:
            converted, arguments = convert(messages, tools, kwargs, *more, **named)
        self._exchange.converted = converted
        return [dict(message) for message in self._exchange.restore(converted)], arguments

    def post_response_prompt_mock(
        self, resp: ModelResponse, nonfncall_msgs: list[dict[str, Any]], tools: list[Any], *more: Any, **named: Any
    ) -> ModelResponse:
        """As the SDK's, which reads the calls of the whole conversation again: in its own form."""
        if resp.choices and isinstance(choice := resp.choices[0], Choices):
            self._exchange.answer = choice.model_copy()
        return super().post_response_prompt_mock(resp, self._exchange.converted, tools, *more, **named)


def is_text(llm: LLM, tools: Sequence[Any]) -> bool:
    """Whether the calls of such a request are text."""
    return bool(tools) and not llm.native_tool_calling


def as_sent(
    llm: LLM, written: Written, offered: Sequence[JsonObject], arguments: Mapping[str, Any], *, compact: bool
) -> Written:
    """The prompt as the SDK sends it: converted, where calls are text. ``arguments``: what the agent gives its LLM
    beside messages and tools."""
    if not is_text(llm, offered):
        return written
    named = {}
    if _WITH_RISK in inspect.signature(LLM.pre_request_prompt_mock).parameters:
        named[_WITH_RISK] = bool(arguments.get("add_security_risk_prediction"))
    asked = TextLLM.exchanging(llm, None, TextExchange(compact))
    return asked.pre_request_prompt_mock(written, list(offered), {}, **named)[0]
