"""Prompts and tools in the SDK's wire format, written once: the SDK writes all of both anew for every request."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Self

from openhands.sdk.llm import LLM
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.tool import ToolDefinition
from pydantic import PrivateAttr

from openhands_rl_plugin.core.messages import WireMessage
from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.compact_prompt import compact_tools, is_offered
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
