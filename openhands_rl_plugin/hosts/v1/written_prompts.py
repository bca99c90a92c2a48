"""Prompts and tools in the SDK's wire format, written once."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from openhands.sdk.llm import LLM
from openhands.sdk.llm import Message as SdkMessage
from openhands.sdk.tool import ToolDefinition

from openhands_rl_plugin.core.types import JsonObject
from openhands_rl_plugin.hosts.compact_prompt import compact_tools, is_offered
from openhands_rl_plugin.hosts.v1.values import has_images

_RISK = "add_security_risk_prediction"


class Written(list[dict[str, Any]]):
    """Messages as ``LLM.format_messages_for_llm`` returns them, which nobody changes. So a copy is the same."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Written:
        return self


class PromptWriter:
    """Writes the prompts of one conversation. Of one that goes on from the last, only what is new is written."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._messages: Sequence[SdkMessage] = ()
        self._written = Written()

    def write(self, llm: LLM, messages: Sequence[SdkMessage]) -> Written:
        """What ``llm.format_messages_for_llm`` returns. Not to be changed: the next prompt shares it."""
        known = self._known(llm, messages)
        # Copies: the SDK may mark messages for the prompt cache while it writes them.
        new = llm.format_messages_for_llm([each.model_copy() for each in messages[known:]])
        # Without ``self``, an LLM that is changed later would be compared with itself.
        self._settings, self._messages = dict(llm.__dict__), tuple(messages)
        self._written = Written([*self._written[:known], *new])
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
            return copied(self._offered)
        other: Any = self._tool.to_openai_tool(**asked)
        return other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)


class Prompts:
    """Writes the prompts of one conversation, and the tools that its model is told of. ``compact``: the short form."""

    def __init__(self, *, compact: bool) -> None:
        self.compact = compact
        self._writer = PromptWriter()
        self._offered = OfferedTools(compact=compact)
        self._asked: tuple[list[Any], bool] | None = None
        self._fixed = False

    def write(self, llm: LLM, messages: Sequence[SdkMessage]) -> Written:
        """What ``llm.format_messages_for_llm`` returns. Not to be changed: the next prompt shares it."""
        return self._writer.write(llm, messages)

    def offer(
        self, llm: LLM, tools: Sequence[ToolDefinition], arguments: dict[str, Any]
    ) -> tuple[list[Any] | None, dict[str, Any]]:
        """The tools that are sent, and the arguments of the completion."""
        if self._fixed and self._asked is not None:
            offered, risk = self._asked
            return offered or None, {**arguments, _RISK: risk}
        told = self._offered.selected(tools)
        written = self._offered.of(told, arguments)
        # A log of completions shows the tools' own fields, which are not what is sent of compact ones.
        if (llm.log_completions and not self.compact) or len(written) != len(told):
            offered = [*told]
        else:
            offered = [WrittenTool(tool, one, arguments) for tool, one in zip(told, written, strict=True)]
        self._asked = offered, bool(arguments.get(_RISK))
        return offered or None, arguments

    def forked(self) -> Prompts:
        """For a copy of the conversation: with the tools of this one, whatever the copy has."""
        twin = Prompts(compact=self.compact)
        twin._asked, twin._fixed = self._asked, True
        return twin


def copied(value: Any) -> Any:
    """A deep copy of JSON; ``copy.deepcopy`` takes ten times as long."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value
