"""Prompts and tools in the SDK's wire format, written once; of a model without tool calling, as text of the prompt."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from litellm.types.utils import Choices, ModelResponse
from openhands.sdk.llm import LLM
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.tool import ToolDefinition
from pydantic import PrivateAttr

from openhands_rl_plugin.core.messages import WireMessage
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.compact_prompt import compact_tools, described, is_offered
from openhands_rl_plugin.hosts.v1.values import has_images

_RISK = "add_security_risk_prediction"

Written = list[dict[str, Any]]
"""Messages as ``LLM.format_messages_for_llm`` returns them."""


class PromptWriter:
    """Writes the prompts of one conversation. Of one that goes on from the last, only what is new is written."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._messages: Sequence[SdkMessage] = ()
        self._written: Written = []

    def write(self, llm: LLM, messages: Sequence[SdkMessage]) -> Written:
        """What ``llm.format_messages_for_llm`` returns. Not to be changed: the next prompt shares it."""
        known = self._known(llm, messages)
        # Copies: the SDK may mark messages for the prompt cache while it writes them.
        new = llm.format_messages_for_llm([each.model_copy() for each in messages[known:]])
        # Without ``self``, an LLM that is changed later would be compared with itself.
        self._settings, self._messages = dict(llm.__dict__), tuple(messages)
        self._written = [*self._written[:known], *new]
        return self._written

    def _known(self, llm: LLM, messages: Sequence[SdkMessage]) -> int:
        """How many of the messages are written as they were in the last prompt."""
        before = self._messages
        if not before or llm.__dict__ != self._settings:
            return 0
        # Which messages are marked, and how large an image may be, depends on the others.
        if llm.is_caching_prompt_active() or has_images(messages):
            return 0
        return len(before) if tuple(messages[: len(before)]) == before else 0


class OfferedTools:
    """The tools as the SDK sends them, written once for the same tools: their schemas take milliseconds."""

    def __init__(self, *, compact: bool = False) -> None:
        """``compact``: fewer tools, with short texts."""
        self._compact = compact
        self._tools: tuple[ToolDefinition, ...] = ()
        self._risk = False
        self._offered: tuple[JsonObject, ...] = ()

    def selected(self, tools: Sequence[ToolDefinition]) -> Sequence[ToolDefinition]:
        """Those of the agent's tools that its model is told of."""
        return [tool for tool in tools if is_offered(tool.name)] if self._compact else tools

    def of(self, tools: Sequence[ToolDefinition], arguments: Mapping[str, Any]) -> tuple[JsonObject, ...]:
        """``tools``: the selected ones; ``arguments``: what the agent gives its LLM beside messages and tools."""
        risk = bool(arguments.get(_RISK))
        same = len(tools) == len(self._tools) and all(map(operator.is_, tools, self._tools))
        if not same or risk != self._risk:
            offered: list[Any] = [tool.to_openai_tool(add_security_risk_prediction=risk) for tool in tools]
            if self._compact:
                offered = compact_tools(offered)
            self._tools, self._risk, self._offered = tuple(tools), risk, tuple(offered)
        return self._offered


class WrittenTool:
    """A tool in the form of ``OfferedTools``; in all else the tool itself."""

    def __init__(self, tool: ToolDefinition, offered: JsonObject, arguments: Mapping[str, Any]) -> None:
        self._tool = tool
        self._offered = offered
        self._asked = {_RISK: bool(arguments.get(_RISK))}

    def to_openai_tool(self, **asked: Any) -> JsonObject:
        """As of the tool. A copy, in which litellm may write."""
        if asked == self._asked:
            return _copied(self._offered)
        other: Any = self._tool.to_openai_tool(**asked)
        return other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)


class WrittenLLM(LLM):
    """``plain`` with one prompt that is written already. Never stored."""

    _prompt: Sequence[WireMessage] | None = PrivateAttr(default=None)

    @classmethod
    def over(cls, plain: LLM, prompt: Sequence[WireMessage] | None) -> Self:
        """Metrics and telemetry are shared with ``plain``."""
        return sharing(cls, plain, _prompt=prompt)

    def format_messages_for_llm(self, messages: list[SdkMessage]) -> Written:
        """The prompt, if there is one, whatever the messages. A copy, in which the SDK and litellm may write."""
        if self._prompt is None:
            return super().format_messages_for_llm(messages)
        return [_copied(message) for message in self._prompt]


def sharing[Kind: LLM](kind: type[Kind], plain: LLM, **private: object) -> Kind:
    """An LLM of another class with all attributes of ``plain``, and ``private`` ones of its own."""
    made = kind.model_construct(_fields_set=set(plain.model_fields_set), **plain.__dict__)
    shared = {**(made.__pydantic_private__ or {}), **(plain.__pydantic_private__ or {})}
    object.__setattr__(made, "__pydantic_private__", {**shared, **private})
    return made


def _copied(value: Any) -> Any:
    """A deep copy of JSON; ``copy.deepcopy`` takes ten times as long."""
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


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
